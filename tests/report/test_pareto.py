from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from widecli.report.find import find_runs
from widecli.report.load import load
from widecli.report.pareto import fronts
from widecli.report.points import Figure, Point, points

VALUES = st.integers(0, 6).map(float)  # few values: ties happen


def point(i: int, gain: float, quality: float, name: str) -> Point:
    figures = {name: Figure(quality, None, (f"run{i}",)), "flops at t": Figure(gain, None, (f"run{i}",))}
    figures["flops at tasks [all]"] = figures["flops at t"]
    return Point("m", "calibrate", "wide", 0.5, 64, 300, (0,), f'{{"i": {i}}}', figures, (f"run{i}",), extra=str(i))


@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=12), st.sampled_from(["perplexity t", "average [all]"]))
def test_a_point_is_dominated_exactly_when_another_is_no_worse_on_both_and_better_on_one(
    pairs: list[tuple[float, float]], name: str
) -> None:
    (front,) = fronts([point(i, gain, quality, name) for i, (gain, quality) in enumerate(pairs)])
    sign = -1 if front.better == "lower" else 1
    for candidate in front.candidates:
        mine = (candidate.gain.value, sign * candidate.quality.value)
        better = [
            other
            for gain, quality in pairs
            if (other := (gain, sign * quality)) != mine and other[0] >= mine[0] and other[1] >= mine[1]
        ]
        assert (candidate.dominated_by is not None) == bool(better)
        if candidate.dominated_by is not None:
            assert candidate.dominated_by in [kept.point for kept in front.candidates]
    along = [sign * candidate.quality.value for candidate in front.front]
    assert along == sorted(along, reverse=True)  # more gain on the front costs quality


def test_the_comparisons_of_a_study(runs: Path) -> None:
    found = {(front.quality, front.gain): front for front in fronts(points(load(find_runs([runs]).runs).frame))}
    assert found.keys() == {
        ("average [all]", "flops at tasks [all]"),
        ("average [all]", "ttft b1 p1024"),
        ("average [all]", "tpot b1 p1024 g128"),
        ("retention [all]", "flops at tasks [all]"),
        ("retention [all]", "ttft b1 p1024"),
        ("retention [all]", "tpot b1 p1024 g128"),
        ("perplexity wikitext2", "flops at wikitext2"),
        ("perplexity wikitext2", "ttft b1 p1024"),
        ("perplexity wikitext2", "tpot b1 p1024 g128"),
    }
    front = found["perplexity wikitext2", "flops at wikitext2"]
    assert [candidate.point.mode for candidate in front.front] == ["dense", "wide", "wide"]
    (token,) = [candidate for candidate in front.candidates if candidate.point.mode == "token"]
    assert token.dominated_by is not None and token.dominated_by.sparsity == 0.5
    speed = found["retention [all]", "ttft b1 p1024"]
    assert [(c.point.mode, c.gain.value) for c in speed.candidates] == [("dense", 1.0), ("wide", 1.2)]


def test_dense_models_alone_make_no_front(runs: Path) -> None:
    made = points(load(find_runs([runs / "eval-dense"]).runs).frame)
    assert made and fronts(made) == []


@pytest.mark.parametrize("empty", [[]])
def test_no_points_make_no_front(empty: list[Point]) -> None:
    assert fronts(empty) == []

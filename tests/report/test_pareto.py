from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stored_runs import write_calibration, write_evaluation, write_pair
from widecli.report import plots
from widecli.report.charts import front_chart
from widecli.report.find import find_runs
from widecli.report.load import load
from widecli.report.pareto import fronts
from widecli.report.points import Figure, Point, points
from widecli.report.report import build
from widecli.report.summaries import front_table
from widecli.report.svg import chart_svg, legend

VALUES = st.integers(0, 6).map(float)  # few values: ties happen


def point(i: int, gain: float, quality: float, name: str) -> Point:
    figures = {name: Figure(quality, None, (f"run{i}",)), "flops net at t": Figure(gain, None, (f"run{i}",))}
    figures["flops net at tasks [all]"] = figures["flops net at t"]
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
        ("average [all]", "flops net at tasks [all]"),
        ("average [all]", "ttft b1 p1024"),
        ("average [all]", "tpot b1 p1024 g128"),
        ("retention [all]", "flops net at tasks [all]"),
        ("retention [all]", "ttft b1 p1024"),
        ("retention [all]", "tpot b1 p1024 g128"),
        ("perplexity wikitext2", "flops net at wikitext2"),
        ("perplexity wikitext2", "ttft b1 p1024"),
        ("perplexity wikitext2", "tpot b1 p1024 g128"),
    }
    front = found["perplexity wikitext2", "flops net at wikitext2"]
    assert [candidate.point.mode for candidate in front.front] == ["dense", "wide", "wide"]
    (token,) = [candidate for candidate in front.candidates if candidate.point.mode == "token"]
    assert token.dominated_by is not None and token.dominated_by.sparsity == 0.5
    speed = found["retention [all]", "ttft b1 p1024"]
    assert [(c.point.mode, c.gain.value) for c in speed.candidates] == [("dense", 1.0), ("wide", 1.2)]


def test_a_point_is_dominated_by_points_of_its_own_model_alone(tmp_path: Path) -> None:
    for model, worst in (("small", 60.0), ("large", 12.0)):
        write_evaluation(tmp_path, f"dense-{model}", perplexity=worst / 3, accuracy=None, model=model)
        for name, sparsity, perplexity in (("s25", 0.25, worst / 2), ("s50", 0.5, worst), ("token", 0.4, 1.1 * worst)):
            options = {"model": model, "sparsity": sparsity, "mode": "token" if name == "token" else "wide"}
            write_pair(tmp_path, f"{model}-{name}", perplexity=perplexity, accuracy=None, dense=None, **options)
    found = {}
    for report in build([tmp_path]).models:
        (front,) = report.fronts
        assert {c.point.model for c in front.candidates} == {report.model}
        winners = [c.dominated_by for c in front.candidates if c.dominated_by is not None]
        assert {winner.model for winner in winners} == {report.model}
        found[report.model] = {c.point.label for c in front.candidates if c.dominated_by is not None}
        chart = front_chart(front)
        hollow = {mark.label for series in chart.series if series.dots for mark in series.marks if mark.hollow}
        assert hollow == found[report.model]
    # every figure of the large model beats all of the small one's, and dominates none of them
    assert found == {model: {"token, S 40 %, 300 steps"} for model in ("small", "large")}


def second_stage(folder: Path, name: str, began_with: str, **options: Any) -> None:
    write_calibration(folder, name, command="lora", began_with=began_with, sparsity=options["sparsity"])
    write_evaluation(folder, f"lora-{name}", of=name, command="lora", accuracy=None, **options)


def test_a_second_stage_is_joined_to_the_calibration_it_began_with(tmp_path: Path) -> None:
    write_pair(tmp_path, "s25", perplexity=25.0, accuracy=None, sparsity=0.25)
    write_pair(tmp_path, "s50", perplexity=60.0, accuracy=None, sparsity=0.5)
    second_stage(tmp_path, "a", "s50", perplexity=40.0, sparsity=0.5)
    second_stage(tmp_path, "b", "s25", perplexity=22.0, sparsity=0.25)
    second_stage(tmp_path, "c", "gone", perplexity=23.0, sparsity=0.3)
    (model,) = build([tmp_path]).models
    chart = front_chart(model.fronts[0])
    (line,) = [series for series in chart.series if series.line == "pairs"]
    ends = [mark.y for mark in line.marks]
    assert sorted(zip(ends[::2], ends[1::2], strict=True)) == [(25.0, 22.0), (60.0, 40.0)]
    assert line.name in legend(chart)
    paths = re.findall(r'<path class="line [^"]*" d="([^"]*)"', chart_svg(chart))
    assert any(re.fullmatch(r"(M[\d. ]+L[\d. ]+){2}", path) for path in paths)  # two strokes, not joined
    if plots.available():
        assert plots.draw(chart, "svg").startswith(b"<?xml")


def test_dense_models_alone_make_no_front(runs: Path) -> None:
    made = points(load(find_runs([runs / "eval-dense"]).runs).frame)
    assert made and fronts(made) == []


@pytest.mark.parametrize("empty", [[]])
def test_no_points_make_no_front(empty: list[Point]) -> None:
    assert fronts(empty) == []


def test_old_records_are_compared_gross_and_new_ones_net_as_well(tmp_path: Path) -> None:
    write_pair(tmp_path, "new", perplexity=38.0, accuracy=None)
    write_pair(tmp_path, "other", perplexity=44.0, accuracy=None, changes=("compensation.rank=0",))
    (front,) = fronts(points(load(find_runs([tmp_path]).runs).frame))
    assert front.gain == "flops net at wikitext2" and len(front.candidates) == 3
    write_pair(tmp_path, "old", perplexity=60.0, accuracy=None, old=True)
    made = points(load(find_runs([tmp_path]).runs).frame)
    net, gross = fronts(made)
    assert (net.gain, gross.gain) == ("flops net at wikitext2", "flops gross at wikitext2")
    assert {c.point.series for c in gross.candidates} - {c.point.series for c in net.candidates} == {
        "wide, contiguous, no compensation"
    }
    charts = [front_chart(front) for front in (net, gross)]
    assert [chart.x_label for chart in charts] == [
        "prunable FLOPs skipped, net of routers and compensation, %",
        "prunable FLOPs skipped, gross, %",
    ]
    assert all("FLOPs skipped, " in chart.title for chart in charts) and charts[0].name != charts[1].name
    heads = [column.head for front in (net, gross) for column in front_table(front).columns if column.key == "gain"]
    assert heads == ["FLOPs\nnet, %", "FLOPs\ngross, %"]

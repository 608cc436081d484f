"""Axes as people write them, and the points that they come to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from widecli.errors import UsageError
from widecli.sweep.grid import calibration_key, check_axes, check_stages, expand, heads, parse_values


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("16,64, 128", [16, 64, 128]),
        ("0.1:0.7:0.1", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]),  # exact, and the stop belongs to it
        ("0:4:2,9", [0, 2, 4, 9]),
        ("0.7:0.5:-0.1", [0.7, 0.6, 0.5]),
        ("wide,token", ["wide", "token"]),
        ("1e-3,2e-3", [0.001, 0.002]),
        ("text/*.jsonl,off", ["text/*.jsonl", "off"]),
        ("true,null", [True, None]),
    ],
)
def test_values_are_read_as_written(text: str, values: list[object]) -> None:
    found = parse_values(text)
    assert found == values and [type(v) for v in found] == [type(v) for v in values]


@given(st.integers(0, 50), st.integers(1, 9), st.integers(0, 30))
def test_a_range_holds_every_step_and_both_ends(start: int, step: int, steps: int) -> None:
    stop = start + step * steps
    found = parse_values(f"{start / 100:.2f}:{stop / 100:.2f}:{step / 100:.2f}")
    assert found == [round((start + i * step) / 100, 2) for i in range(steps + 1)]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "empty"),
        ("1,,2", "empty"),
        ("1:2:0", "no values"),
        ("1:0:1", "no values"),
        ("0:9:1e-9", "larger"),
        ("16:64", "lacks its step"),
        ("0.1, 0.2:0.4", "lacks its step"),
    ],
)
def test_values_that_are_none_are_refused(text: str, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        parse_values(text)


def test_an_unknown_key_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UsageError, match=r"trian\.steps .*did you mean train\.steps"):
        check_axes({"trian.steps": "1,2"})
    with pytest.raises(UsageError, match="section"):
        check_axes({"train": "1,2"})
    with pytest.raises(UsageError, match="cannot be an axis"):
        check_axes({"track.project": "a,b"})
    assert check_axes({"G": "16,64", "budget.sparsity": 0.5}) == {
        "routing.ffn_group_size": [16, 64],
        "budget.sparsity": [0.5],
    }


def test_stages_run_in_their_order_and_only_those_that_exist() -> None:
    commands = ("calibrate", "lora", "eval")
    assert check_stages(["eval", "calibrate"], commands) == ("calibrate", "eval")
    with pytest.raises(UsageError, match=r"'evaluate'.*calibrate, lora, eval"):
        check_stages(["evaluate"], commands)
    with pytest.raises(UsageError, match="wide profile"):
        check_stages(["profile"], commands)
    assert check_stages(["profile"], (*commands, "profile")) == ("profile",)


def test_every_combination_is_a_point_with_its_own_recipe() -> None:
    axes = {"routing.ffn_group_size": [16, 64], "budget.sparsity": [0.25, 0.5], "train.seed": [0, 1]}
    points = expand(None, ["train.steps=7"], {}, axes)
    assert len(points) == len({point.calibration.hash8 for point in points}) == 8
    assert dict(points[1].values) == {"routing.ffn_group_size": 16, "budget.sparsity": 0.25, "train.seed": 1}
    recipe = points[1].calibration.recipe
    assert (recipe.routing.ffn_group_size, recipe.budget.sparsity, recipe.train.seed) == (16, 0.25, 1)
    assert recipe.train.steps == 7


def test_modes_without_groups_are_one_point_whatever_the_group_size() -> None:
    points = expand(None, [], {}, {"routing.mode": ["wide", "token"], "routing.ffn_group_size": [16, 32, 128]})
    assert [dict(point.values) for point in points] == [
        *({"routing.mode": "wide", "routing.ffn_group_size": size} for size in (16, 32, 128)),
        {"routing.mode": "token"},
    ]


def test_points_that_differ_in_later_stages_share_a_calibration_that_calibrate_would_name() -> None:
    from widecli.recipe.load import resolve

    points = expand("smollm2_s50_g64", ["eval.limit=7"], {}, {"lora.rank": [4, 8], "eval.tasks": ["piqa", "boolq"]})
    assert len(points) == 4
    assert {point.calibration.hash8 for point in points} == {resolve("smollm2_s50_g64").hash8}
    assert [point.resolved.recipe.lora.rank for point in points] == [4, 4, 8, 8]
    assert points[1].resolved.recipe.eval.tasks == ("boolq",) and points[1].resolved.recipe.eval.limit == 7


def test_the_calibration_key_ignores_what_a_calibration_does_not_read() -> None:
    from widecli.recipe.load import resolve

    plain = calibration_key(resolve(None).recipe)
    assert calibration_key(resolve(None, ["eval.limit=3", "lora.rank=4", "track.project=x"]).recipe) == plain
    assert calibration_key(resolve(None, ["eval.perplexity_window=64"]).recipe) != plain  # its validation reads it
    assert calibration_key(resolve(None, ["train.seed=3"]).recipe) != plain


def test_a_key_given_twice_and_a_value_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match=r"budget\.sparsity is both"):
        expand(None, ["budget.sparsity=0.5"], {}, {"budget.sparsity": [0.1, 0.2]})
    with pytest.raises(UsageError, match=r"train\.steps is both"):
        expand(None, [], {"train.steps": 5}, {"train.steps": [1]})
    with pytest.raises(UsageError, match=r"budget\.sparsity=1\.5"):
        expand(None, [], {}, {"budget.sparsity": [0.5, 1.5]})
    with pytest.raises(UsageError, match="means nothing with"):
        expand(None, ["budget.kind=parts", "budget.ffn=0.3"], {}, {"budget.sparsity": [0.1]})


def test_groupings_and_compensations_are_axes_whose_runs_have_names_of_their_own() -> None:
    from widecli.track.run import run_name

    axes = {
        "routing.grouping": ["clustered", "contiguous"],
        "compensation.rank": [0, 8, 32],
        "compensation.mean": [True, False],
    }
    points = expand(None, [], {}, axes)
    assert len(points) == len({run_name(point.calibration) for point in points}) == 12
    recipe = points[-1].calibration.recipe
    assert (recipe.routing.grouping, recipe.compensation.rank, recipe.compensation.mean) == ("contiguous", 32, False)
    assert heads(list(axes)) == ["grouping", "compensation rank", "means"]


def test_modes_without_groups_are_one_point_whatever_the_grouping() -> None:
    axes = {"routing.mode": ["wide", "token"], "routing.grouping": ["clustered", "contiguous"]}
    points = expand(None, [], {}, axes)
    assert [dict(point.values) for point in points] == [
        {"routing.mode": "wide", "routing.grouping": "clustered"},
        {"routing.mode": "wide", "routing.grouping": "contiguous"},
        {"routing.mode": "token"},
    ]
    assert points[2].calibration.recipe.routing.grouping == "contiguous"
    assert points[2].calibration.recipe.compensation.rank == 0


def test_axes_that_would_be_called_alike_keep_their_whole_names() -> None:
    assert heads(["routing.rank", "lora.rank", "budget.sparsity"]) == ["routing.rank", "lora.rank", "S"]
    assert heads(["lora.rank", "compensation.rank"]) == ["rank", "compensation rank"]

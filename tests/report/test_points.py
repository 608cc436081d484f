from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev

import pytest

from stored_runs import with_pattern_keys, write_calibration, write_evaluation, write_pair
from widecli.report.find import find_runs
from widecli.report.load import load
from widecli.report.points import Point, best_protocol, by_model, points
from widecli.report.sweeps import sweeps


def made(folder: Path) -> list[Point]:
    return points(load(find_runs([folder]).runs).frame)


def test_seeds_of_one_configuration_become_mean_and_spread_with_all_runs_named(runs: Path) -> None:
    (point,) = [point for point in made(runs) if point.sparsity == 0.5]
    assert point.seeds == (0, 1, 2)
    found = point.figures["perplexity wikitext2"]
    assert found.value == pytest.approx(mean((50, 53, 56)))
    assert found.spread == pytest.approx(stdev((50, 53, 56)))
    assert found.runs == ("eval-s50-seed0", "eval-s50-seed1", "eval-s50-seed2")


def test_a_single_run_has_no_spread(runs: Path) -> None:
    (point,) = [point for point in made(runs) if point.sparsity == 0.25]
    assert point.figures["average [all]"].spread is None


def test_two_evaluations_of_one_checkpoint_are_not_two_trainings(tmp_path: Path) -> None:
    write_pair(tmp_path, "x", perplexity=30.0)
    write_evaluation(tmp_path, "x-400", of="x", perplexity=31.0, accuracy=0.42, limit=400)
    point = made(tmp_path)[-1]
    assert point.figures["perplexity wikitext2"].runs == ("eval-x",)  # the fuller one
    assert point.figures["average [all]"].value == 0.4
    assert point.figures["average [400]"].value == 0.42
    assert best_protocol(point, "average") == "average [all]"


def test_what_an_evaluation_saw_goes_before_what_the_training_ended_with(tmp_path: Path) -> None:
    write_calibration(tmp_path, "x")
    assert made(tmp_path)[0].figures["skip mean"].runs == ("calibrate-x",)
    write_evaluation(tmp_path, "x", of="x")
    assert made(tmp_path)[-1].figures["skip mean"].runs == ("eval-x",)


def test_a_recipe_from_before_a_key_existed_is_the_configuration_with_its_default(tmp_path: Path) -> None:
    write_pair(tmp_path, "new", seed=0, perplexity=30.0)
    write_pair(tmp_path, "old", seed=1, perplexity=34.0)
    for run in ("calibrate-old", "eval-old"):
        recipe = tmp_path / run / "recipe.yaml"
        lines = recipe.read_text().splitlines(keepends=True)
        kept = [line for line in lines if not line.startswith("  ramp_ratio")]
        assert len(kept) < len(lines)
        recipe.write_text("".join(kept))
    (point,) = [point for point in made(tmp_path) if point.stage != "dense"]
    assert point.seeds == (0, 1) and point.figures["perplexity wikitext2"].value == 32.0


def test_keys_about_patterns_that_say_nothing_make_no_configuration(tmp_path: Path) -> None:
    write_pair(tmp_path, "new", seed=0, perplexity=30.0)
    write_pair(tmp_path, "old", seed=1, perplexity=34.0)
    for run in ("calibrate-old", "eval-old"):
        recipe = tmp_path / run / "recipe.yaml"
        recipe.write_text(with_pattern_keys(recipe.read_text()))
        assert "pattern_count: 64" in recipe.read_text()
    (point,) = [point for point in made(tmp_path) if point.stage != "dense"]
    assert point.seeds == (0, 1) and point.figures["perplexity wikitext2"].value == 32.0


def test_sweeps_of_stored_patterns_say_how_many(tmp_path: Path) -> None:
    for group_size in (16, 64):
        write_pair(tmp_path, f"g{group_size}", perplexity=60.0, group_size=group_size, accuracy=None)
        for count in (16, 64):
            patterns = {"group_size": group_size, "patterns": count, "mode": "patterns", "accuracy": None}
            write_pair(tmp_path, f"g{group_size}-c{count}", perplexity=66.0, **patterns)  # type: ignore[arg-type]
    (sweep,) = sweeps(made(tmp_path))
    assert sorted(name for name, _ in sweep.lines) == [
        "patterns, S 50 %, C 16, 300 steps",
        "patterns, S 50 %, C 64, 300 steps",
        "wide, S 50 %, 300 steps",
    ]


def test_the_records_of_patterns_are_told_apart_as_they_were(repository: Path) -> None:
    labels = {point.label for point in made(repository / "reports" / "smollm2-h200-patterns")}
    trained = "patterns, S 50 %, G 16, C 64, 300 steps"
    assert {label for label in labels if label.startswith(trained)} == {
        trained,
        *(f"{trained}, {extra}" for extra in ("pattern after 0.8", "pattern update learned", "pattern update refit")),
        f"{trained}, pattern after 0.8, pattern update learned",
    }
    assert "converted patterns, S 50 %, G 64, C 256, 300 steps, segments 2" in labels


def test_how_gpus_held_the_backbone_makes_no_configuration(tmp_path: Path) -> None:
    write_pair(tmp_path, "one", seed=0, perplexity=30.0)
    write_pair(tmp_path, "two", seed=1, perplexity=34.0, changes=("distributed.shard=full", "sweep.retries=2"))
    (point,) = [point for point in made(tmp_path) if point.stage != "dense"]
    assert point.seeds == (0, 1)


def test_configurations_of_one_label_say_in_what_they_differ(tmp_path: Path) -> None:
    write_pair(tmp_path, "x", perplexity=30.0)
    write_pair(tmp_path, "y", perplexity=90.0, changes=("routing.warm_start=random", "train.temperature_start=5"))
    labels = [point.label for point in made(tmp_path)]
    assert labels == [
        "dense",
        "wide, S 50 %, G 64, 300 steps",
        "wide, S 50 %, G 64, 300 steps, warm start random, temperature start 5",
    ]


def test_how_a_run_is_measured_or_stored_makes_no_other_configuration(tmp_path: Path) -> None:
    write_pair(tmp_path, "x", perplexity=30.0)
    write_pair(tmp_path, "y", perplexity=32.0, changes=("train.compile=false", "eval.max_length=512"))
    assert [len(point.figures["perplexity wikitext2"].runs) for point in made(tmp_path)] == [1, 2]


def test_models_are_kept_apart(tmp_path: Path) -> None:
    write_pair(tmp_path, "x", perplexity=30.0)
    write_pair(tmp_path, "y", perplexity=10.0, model="large")
    grouped = by_model(made(tmp_path))
    assert {model: len(found) for model, found in grouped.items()} == {"tiny": 2, "large": 2}


def test_a_sweep_joins_configurations_that_differ_in_its_axis_alone(runs: Path) -> None:
    (sweep,) = sweeps(made(runs))
    assert sweep.axis == "sparsity"
    ((name, line),) = sweep.lines
    assert name == "wide, G 64, 300 steps"
    assert [point.sparsity for point in line] == [0.25, 0.5]


def test_a_group_size_sweep_is_found_and_token_mode_has_no_group_size(tmp_path: Path) -> None:
    for size in (16, 64, 128):
        write_pair(tmp_path, f"g{size}", perplexity=30.0 + size, group_size=size)
        write_pair(tmp_path, f"token{size}", perplexity=99.0, group_size=size, mode="token")
    (sweep,) = sweeps(made(tmp_path))
    assert sweep.axis == "group_size"
    assert [[point.group_size for point in line] for _, line in sweep.lines] == [[16, 64, 128]]

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev

import pytest

from stored_runs import AS_BEFORE, with_pattern_keys, write_calibration, write_evaluation, write_pair
from widecli.report.find import find_runs
from widecli.report.load import load
from widecli.report.points import Point, best_protocol, by_model, names_of, points
from widecli.report.summaries import summary_table
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


def test_what_stands_in_one_row_comes_from_one_evaluation(tmp_path: Path) -> None:
    one, other = "one:" + "a" * 16, "other:" + "b" * 16
    write_pair(tmp_path, "x", perplexity=30.0, accuracy=None, text=one, skips=0.41)
    write_evaluation(tmp_path, "x2", of="x", perplexity=60.0, accuracy=None, text=other, skips=0.62)
    write_evaluation(tmp_path, "x3", of="x", perplexity=33.0, accuracy=0.4, limit=50, text=one, skips=0.47)
    (point,) = [point for point in made(tmp_path) if point.mode != "dense"]
    rows = {row.runs[0]: row for row in point.rows()}
    assert set(rows) == {"eval-x3", "eval-x2"}  # the first measured nothing that the third did not
    assert rows["eval-x3"].value("perplexity one") == 33.0 and rows["eval-x3"].value("skip mean") == 0.47
    assert rows["eval-x2"].value("perplexity other") == 60.0 and rows["eval-x2"].value("skip mean") == 0.62
    for row in rows.values():
        assert len({figure.runs for name, figure in row.figures.items() if not name.startswith("validation")}) == 1
    table = summary_table(made(tmp_path))
    texts = [(row.get("perplexity one"), row.get("perplexity other"), row["skip mean"]) for row in table.rows[1:]]
    assert len(texts) == 2 and all((a is None) != (b is None) for a, b, _ in texts)


def test_trainings_of_one_configuration_share_a_row_though_one_was_measured_on_more(tmp_path: Path) -> None:
    write_pair(tmp_path, "a", seed=0, perplexity=30.0, accuracy=0.4, skips=0.5)
    write_pair(tmp_path, "b", seed=1, perplexity=34.0, accuracy=None, skips=0.6)
    (point,) = [point for point in made(tmp_path) if point.mode != "dense"]
    (row,) = point.rows()
    assert row.value("perplexity wikitext2") == 32.0 and row.value("skip mean") == pytest.approx(0.55)
    assert row.figures["average [all]"].runs == ("eval-a",)


def test_files_of_one_name_and_different_contents_are_never_one_text(tmp_path: Path) -> None:
    write_pair(tmp_path, "x", sparsity=0.3, perplexity=30.0, accuracy=None, text="held-out:" + "a" * 16)
    write_pair(tmp_path, "y", sparsity=0.5, perplexity=60.0, accuracy=None, text="held-out:" + "b" * 16)
    write_pair(tmp_path, "z", sparsity=0.7, perplexity=90.0, accuracy=None, text="held-out:" + "a" * 16)
    found = made(tmp_path)
    assert names_of(found, "perplexity ") == ["perplexity held-out #aaaaaa", "perplexity held-out #bbbbbb"]
    assert [point.value("perplexity held-out #aaaaaa") for point in found if point.mode != "dense"] == [
        30.0,
        None,
        90.0,
    ]


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


def test_groupings_and_compensations_are_series_of_their_own_named_where_they_are_not_the_default(
    tmp_path: Path,
) -> None:
    contiguous = ("routing.grouping=contiguous",)
    write_pair(tmp_path, "new", perplexity=38.0)
    write_pair(tmp_path, "contiguous", perplexity=46.0, changes=contiguous)
    write_pair(tmp_path, "bare", perplexity=45.0, changes=("compensation.mean=false", "compensation.rank=0"))
    write_pair(tmp_path, "mean", perplexity=44.0, changes=("compensation.rank=0",))
    write_pair(tmp_path, "rank", perplexity=43.0, changes=(*contiguous, "compensation.rank=16"))
    write_pair(tmp_path, "old", perplexity=60.0, old=True)
    write_pair(tmp_path, "parts", perplexity=190.0, mode="token")
    found = {point.label: point for point in made(tmp_path)}
    end = "S 50 %, G 64, 300 steps"
    assert set(found) == {
        "dense",
        f"wide, {end}",
        f"wide, contiguous, {end}",
        f"wide, no compensation, {end}",
        f"wide, compensation by means, {end}",
        f"wide, contiguous, compensation by means and rank 16, {end}",
        f"wide, contiguous, no compensation, {end}",
        "token, S 50 %, 300 steps",
    }
    assert all(point.extra == "" and label.startswith(point.series) for label, point in found.items())
    assert (found[f"wide, {end}"].grouping, found[f"wide, {end}"].compensation) == ("clustered", "means and rank 32")


def test_where_all_are_alike_nothing_is_said_of_it(tmp_path: Path) -> None:
    for name, model, old in (("new", "a", False), ("old", "b", True)):
        for seed, sparsity in enumerate((0.25, 0.5)):
            changes = {"sparsity": sparsity, "model": model, "old": old, "perplexity": 30.0}
            write_pair(tmp_path, f"{name}{seed}", **changes)  # type: ignore[arg-type]
    routed = [point for point in made(tmp_path) if point.mode == "wide"]
    assert len(routed) == 4 and {point.series for point in routed} == {"wide"}
    assert {point.grouping for point in routed} == {"clustered", "contiguous"}


def test_a_record_from_before_is_the_same_configuration_as_a_run_that_asks_for_that_today(tmp_path: Path) -> None:
    write_pair(tmp_path, "old", seed=0, perplexity=60.0, old=True)
    later = (*AS_BEFORE, "compensation.learning_rate=0.5")  # which nothing reads then
    write_pair(tmp_path, "today", seed=1, perplexity=64.0, changes=later)
    (point,) = [point for point in made(tmp_path) if point.mode == "wide"]
    assert point.seeds == (0, 1) and point.figures["perplexity wikitext2"].value == 62.0
    assert point.figures["flops gross"].runs == ("eval-old", "eval-today")
    assert point.figures["flops net"].runs == ("eval-today",)


def test_a_rate_of_compensation_is_no_rate_of_routers(tmp_path: Path) -> None:
    write_pair(tmp_path, "x", perplexity=30.0)
    write_pair(tmp_path, "y", perplexity=31.0, changes=("compensation.learning_rate=0.001", "train.distill=0.5"))
    assert made(tmp_path)[-1].extra == "compensation learning rate 0.001, distill 0.5"


def test_sweeps_of_groupings_are_lines_of_their_own(tmp_path: Path) -> None:
    for size in (64, 128):
        write_pair(tmp_path, f"new{size}", perplexity=30.0 + size, group_size=size)
    for size in (16, 32):
        write_pair(tmp_path, f"old{size}", perplexity=50.0 + size, group_size=size, old=True)
    (sweep,) = sweeps(made(tmp_path))
    assert {name: [point.group_size for point in line] for name, line in sweep.lines} == {
        "wide, S 50 %, 300 steps": [64, 128],
        "wide, contiguous, no compensation, S 50 %, 300 steps": [16, 32],
    }


def test_a_stage_on_old_routers_begins_with_them_not_with_new_ones_of_that_name(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", "x", perplexity=60.0, old=True)
    write_pair(tmp_path / "b", "x", perplexity=38.0)
    write_calibration(tmp_path / "c", "l", command="lora", began_with="x", old=True)
    points_here = {point.series: point for point in made(tmp_path)}
    adapted = points_here["wide + lora, contiguous, no compensation"]
    assert adapted.began_with == points_here["wide, contiguous, no compensation"].configuration


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

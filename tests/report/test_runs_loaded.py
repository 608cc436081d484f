from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from stored_runs import speed_point, write_calibration, write_evaluation, write_pair, write_profile
from widecli.report.find import find_runs
from widecli.report.load import Results, load, perplexity_name
from widecli.report.points import Point, points


def read(folder: Path) -> Results:
    return load(find_runs([folder]).runs)


def row(frame: pd.DataFrame, run: str, stage: str | None = None) -> Any:
    rows = frame[(frame["run"] == run) & ((frame["stage"] == stage) if stage else frame["stage"].ne("dense"))]
    assert len(rows) == 1
    return rows.iloc[0]


def test_an_evaluation_belongs_to_the_run_that_made_its_checkpoint(runs: Path) -> None:
    frame = read(runs).frame
    found = row(frame, "eval-s50-seed1")
    assert found["origin"] == "calibrate-s50-seed1 at step 300" == row(frame, "calibrate-s50-seed1")["origin"]
    assert (found["sparsity"], found["group_size"], found["seed"], found["mode"]) == (0.5, 64, 1, "wide")
    assert found["perplexity wikitext2"] == 53.0
    assert found["average [all]"] == pytest.approx(0.45)
    assert found["retention [all]"] == pytest.approx(0.9)
    assert found["flops net at wikitext2"] == pytest.approx(0.8 * 0.52)  # of that text, not of everything
    assert found["flops gross at wikitext2"] == pytest.approx(0.9 * 0.52)
    assert (found["flops net"], found["flops gross"]) == (pytest.approx(0.4), pytest.approx(0.45))


def test_a_moved_and_renamed_calibration_is_found_by_its_name_or_its_recipe(tmp_path: Path) -> None:
    write_pair(tmp_path / "archive", "x", perplexity=30.0)
    write_pair(tmp_path / "archive", "y", perplexity=30.0, seed=1)
    (tmp_path / "archive" / "calibrate-y").rename(tmp_path / "archive" / "calibrate-other-name")
    frame = read(tmp_path).frame
    assert row(frame, "eval-x")["origin"].startswith("calibrate-x")
    assert row(frame, "eval-y")["origin"].startswith("calibrate-other-name")


def test_a_run_of_that_name_with_another_recipe_is_not_taken(tmp_path: Path) -> None:
    write_calibration(tmp_path, "x", sparsity=0.25)
    write_evaluation(tmp_path, "x", of="x", sparsity=0.5)
    results = read(tmp_path)
    assert row(results.frame, "eval-x")["origin"].startswith("runs/calibrate-x/checkpoints")
    assert row(results.frame, "eval-x")["sparsity"] == 0.5  # its own recipe tells, and fits its plan
    assert any("eval-x" in note for note in results.notes)


def test_of_two_calibrations_of_one_recipe_the_one_beside_the_evaluation_is_meant(tmp_path: Path) -> None:
    for folder, perplexity in (("a", 30.0), ("b", 40.0)):
        write_pair(tmp_path / folder, "x", perplexity=perplexity)
    frame = read(tmp_path).frame
    assert row(frame, "a/eval-x")["origin"].startswith("a/calibrate-x")
    assert row(frame, "b/eval-x")["origin"].startswith("b/calibrate-x")


def test_retention_without_a_dense_part_comes_from_the_dense_run_of_the_same_protocol(tmp_path: Path) -> None:
    write_evaluation(tmp_path, "dense", accuracy=0.5)
    write_evaluation(tmp_path, "dense-400", accuracy=0.6, limit=400)
    write_pair(tmp_path, "x", perplexity=30.0, accuracy=0.45, dense=None)
    write_pair(tmp_path, "y", perplexity=30.0, accuracy=0.45, dense=None, limit=400, seed=1)
    frame = read(tmp_path).frame
    assert row(frame, "eval-x")["retention [all]"] == pytest.approx(0.9)
    assert row(frame, "eval-y")["retention [400]"] == pytest.approx(0.75)
    assert pd.isna(row(frame, "eval-y")["retention [all]"])


def test_a_lora_run_is_a_stage_of_its_own(tmp_path: Path) -> None:
    write_calibration(tmp_path, "x")
    write_calibration(tmp_path, "x", command="lora")
    write_evaluation(tmp_path, "lora-x", of="x", command="lora", perplexity=25.0)
    found = [point for point in points(read(tmp_path).frame) if point.stage == "lora"]
    assert [point.series for point in found] == ["wide + lora"]
    assert found[0].figures["perplexity wikitext2"].value == 25.0


def test_a_profile_joins_its_checkpoint_and_a_bare_shape_joins_nothing(tmp_path: Path) -> None:
    write_pair(tmp_path, "x", perplexity=30.0)
    write_profile(tmp_path, "x", of="x", points=[speed_point("ttft", 1.5), speed_point("ttft", 1.9, masks="random")])
    write_profile(tmp_path, "shape", of=None, points=[speed_point("tpot", 3.0)])
    made = points(read(tmp_path).frame)
    assert [point.mode for point in made] == ["dense", "wide"]
    figures = {name: figure for point in made for name, figure in point.figures.items()}
    speeds = {name: figure for name, figure in figures.items() if name.startswith(("ttft", "tpot"))}
    assert {name: (figure.value, figure.runs) for name, figure in speeds.items()} == {
        "ttft b1 p1024": (1.5, ("profile-x",))
    }


def test_models_of_one_name_with_other_weights_are_told_apart(tmp_path: Path) -> None:
    write_pair(tmp_path, "x", perplexity=30.0)
    for path in (tmp_path / "calibrate-x", tmp_path / "eval-x"):
        copy = tmp_path / f"{path.name}-other"
        copy.mkdir()
        (copy / "recipe.yaml").write_text((path / "recipe.yaml").read_text())
        summary = json.loads((path / "summary.json").read_text())
        summary["backbone"]["weights_hash"] = "0123456789abcdef"
        (copy / "summary.json").write_text(json.dumps(summary))
    models = set(read(tmp_path).frame["model"])
    assert models == {"tiny (tiny-wei)", "tiny (01234567)"}


def test_an_unusual_window_is_part_of_a_perplexitys_name() -> None:
    assert perplexity_name("wikitext2/token_ppl", {"perplexity_window": 2048}) == "wikitext2"
    assert perplexity_name("wikitext2@60/token_ppl", {"perplexity_window": 2048}) == "wikitext2@60"
    assert perplexity_name("t/token_ppl", {"perplexity_window": 512, "perplexity_windows": 8}) == "t@8 (window 512)"


def test_an_old_record_has_a_gross_share_of_flops_and_no_net_one(tmp_path: Path) -> None:
    write_pair(tmp_path, "old", perplexity=60.0, old=True)
    write_pair(tmp_path, "new", perplexity=38.0)
    frame = read(tmp_path).frame
    old, new = row(frame, "eval-old"), row(frame, "eval-new")
    for where, sparsity in (("", 0.5), (" at wikitext2", 0.52), (" at tasks [all]", 0.5)):
        assert pd.isna(old[f"flops net{where}"]) and old[f"flops gross{where}"] == pytest.approx(0.9 * sparsity)
        assert new[f"flops net{where}"] == pytest.approx(0.8 * sparsity)
        assert new[f"flops gross{where}"] == pytest.approx(0.9 * sparsity)
    dense = row(frame, "eval-new", "dense")
    assert dense["flops net at wikitext2"] == dense["flops gross at wikitext2"] == 0


def test_an_evaluation_is_not_that_of_a_run_with_other_groups_nor_described_by_its_recipe(tmp_path: Path) -> None:
    write_calibration(tmp_path, "x", old=True)
    path = write_evaluation(tmp_path, "x", of="x")  # of regrouped channels, in a folder of that name elsewhere
    assert row(read(tmp_path).frame, "eval-x")["origin"].startswith("runs/calibrate-x/checkpoints")
    other = write_evaluation(tmp_path, "other", of="y", old=True)
    (path / "recipe.yaml").write_text((other / "recipe.yaml").read_text())  # and with a recipe of others
    assert row(read(tmp_path).frame, "eval-x")["sparsity"] is None or pd.isna(
        row(read(tmp_path).frame, "eval-x")["sparsity"]
    )


def test_odd_values_in_a_summary_become_empty_cells(tmp_path: Path) -> None:
    write_pair(tmp_path, "x", perplexity=30.0)
    path = tmp_path / "eval-x" / "summary.json"
    summary = json.loads(path.read_text())
    summary["skip_rate"]["ffn"] = "many"
    summary["perplexity"]["wikitext2/token_ppl"] = None
    summary["tasks"]["piqa"] = None
    path.write_text(json.dumps(summary))
    found: Point = points(read(tmp_path).frame)[-1]
    assert "perplexity wikitext2" not in found.figures and "task piqa [all]" not in found.figures
    assert found.figures["average [all]"].value == 0.4


def test_evaluations_under_other_versions_are_noted(tmp_path: Path) -> None:
    write_pair(tmp_path, "x", perplexity=30.0)
    write_pair(tmp_path, "y", perplexity=30.0, seed=1)
    path = tmp_path / "eval-y" / "summary.json"
    summary = json.loads(path.read_text())
    summary["protocol"]["transformers"] = "6"
    path.write_text(json.dumps(summary))
    (note,) = read(tmp_path).notes
    assert "transformers" in note and "eval-x" in note and "eval-y" in note


def test_converted_patterns_are_no_runs_of_the_recipe_that_they_would_be_trained_with(tmp_path: Path) -> None:
    write_pair(tmp_path, "trained", perplexity=70.0, mode="patterns")
    for name, perplexity in (("recorded", 50.0), ("older", 51.0)):
        path = write_evaluation(tmp_path, name, of="trained", mode="patterns", perplexity=perplexity)
        summary = json.loads((path / "summary.json").read_text())
        summary["checkpoint"] = f"conv/{name}"
        if name == "recorded":
            summary["origin"] = {"checkpoint": "runs/calibrate-bits/checkpoints/step-000300", "command": "patterns"}
        (path / "summary.json").write_text(json.dumps(summary))
    results = read(tmp_path)
    assert row(results.frame, "eval-trained")["stage"] == "calibrate"
    routed = [point for point in points(results.frame) if point.mode != "dense"]
    found = {point.series: point.figures["perplexity wikitext2"].value for point in routed}
    assert found == {"patterns": 70.0, "converted patterns": 50.5}

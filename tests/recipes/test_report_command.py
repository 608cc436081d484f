"""`wide report` as a whole, on runs that the test wrote and on runs that the other commands made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from whole_commands import Wide

from stored_runs import write_calibration, write_evaluation, write_pair
from widecli.report import plots


@pytest.fixture
def study(workplace: Path) -> Path:
    """Two models, two seeds, one unfinished run, below runs/."""
    folder = workplace / "runs"
    write_evaluation(folder, "dense", perplexity=20.0, accuracy=0.5)
    write_pair(folder, "a", perplexity=30.0, accuracy=0.40)
    write_pair(folder, "b", perplexity=34.0, accuracy=0.44, seed=1)
    write_pair(folder, "s25", perplexity=24.0, accuracy=0.48, sparsity=0.25)
    write_pair(folder, "large", perplexity=9.0, accuracy=0.6, model="large", dense=(8.0, 0.65))
    (write_calibration(folder, "killed") / "summary.json").unlink()
    return folder


def test_it_reads_runs_and_writes_runs_report(wide: Wide, study: Path) -> None:
    done = wide("report", "--format", "html,md,csv,tex,png", "--json")
    assert done.code == 0, done.err
    document = done.document
    assert document["schema"] == "wide.report/1" and document["out"] == "runs/report"
    assert json.loads((study / "report" / "report.json").read_text()) == document
    assert {model["model"] for model in document["models"]} == {"tiny", "large"}
    assert "2 models" in done.err  # and never in one table
    (skipped,) = document["skipped"]
    assert skipped["path"].endswith("calibrate-killed") and "left out" in done.err
    for name in ("report.html", "report.md", "report.tex", "runs.csv", "tables/summary-tiny.csv"):
        assert name in document["files"]
    assert all((study / "report" / name).stat().st_size > 0 for name in document["files"])
    assert any(name.endswith(".png") for name in document["files"]) == plots.available()


def test_seeds_are_averaged_and_every_figure_names_its_runs(wide: Wide, study: Path) -> None:
    document = wide("report", "--format", "md", "--json").document
    (tiny,) = [model for model in document["models"] if model["model"] == "tiny"]
    (point,) = [point for point in tiny["points"] if point["sparsity"] == 0.5]
    found = point["figures"]["perplexity wikitext2"]
    assert found["value"] == 32.0 and found["spread"] == pytest.approx(8**0.5)
    assert found["runs"] == ["eval-a", "eval-b"]
    assert all(figure["runs"] for point in tiny["points"] for figure in point["figures"].values())
    text = (study / "report" / "report.md").read_text()
    assert "32.00 ± 2.83" in text and "published by the paper" in text


def test_a_second_report_replaces_the_first_and_nothing_else(wide: Wide, study: Path) -> None:
    assert wide("report", "--format", "csv,md").code == 0
    again = wide("report", "--format", "csv", "--json")
    assert again.code == 0 and "left out" in again.err and "report:" not in again.err
    assert not (study / "report" / "report.md").exists() and (study / "report" / "runs.csv").exists()
    precious = study.parent / "thesis"
    precious.mkdir()
    (precious / "chapter.tex").write_text("...")
    wide("report", "--out", precious).refused_with("thesis", "not empty")
    assert [path.name for path in precious.iterdir()] == ["chapter.tex"]


def test_bad_input_ends_in_one_sentence(wide: Wide, workplace: Path) -> None:
    wide("report").refused_with("runs/", "wide calibrate")
    wide("report", "nowhere").refused_with("nowhere", "not a folder")
    (workplace / "empty").mkdir()
    wide("report", "empty").refused_with("no finished run", "empty")
    write_pair(workplace / "runs", "x", perplexity=30.0)
    wide("report", "--format", "pdf").refused_with("pdf", "html")
    wide("report", "--format", ",").refused_with("--format")


def test_without_matplotlib_one_sentence_and_the_other_formats(
    wide: Wide, study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "available", lambda: False)
    done = wide("report", "--format", "html,png,svg", "--json")
    assert done.code == 0 and done.document["files"] == ["report.html"]
    assert [line for line in done.err.splitlines() if "matplotlib" in line and plots.INSTALL in line]
    wide("report", "--format", "png").refused_with("matplotlib", plots.INSTALL)


def test_it_reports_what_calibrate_and_eval_wrote(wide: Wide, tiny_recipe: Path) -> None:
    for seed in (0, 1):
        made = wide("calibrate", tiny_recipe, "--seed", seed, "--steps", 2, "--json").document
        assert wide("eval", made["run_dir"], "--json").code == 0
    done = wide("report", "--format", "html,csv", "--json")
    assert done.code == 0, done.err
    (model,) = done.document["models"]
    dense, routed = model["points"]
    figure = routed["figures"]["perplexity held-out (window 64)"]
    assert len(figure["runs"]) == 2 and all(run.startswith("eval-") for run in figure["runs"])
    assert routed["seeds"] == [0, 1] and routed["sparsity"] == 0.4 and routed["group_size"] == 16
    assert dense["mode"] == "dense"
    (front,) = model["pareto"]
    assert front["gain"] == "flops net at held-out (window 64)" and len(front["points"]) == 2
    assert done.document["notes"] == []


def test_a_folder_that_cannot_be_made_is_refused_with_the_reports_own_flag(wide: Wide, workplace: Path) -> None:
    write_calibration(workplace / "runs", "x")
    (workplace / "file").write_text("words")
    refused = wide("report", "--out", "file/report")
    refused.refused_with("file/report cannot be made", "name another folder with --out")

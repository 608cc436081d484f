"""`wide inspect` as a whole, on a calibration that the test made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from whole_commands import PLAIN, Wide, invoke, write_recipe

from widecli.report import plots


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, text_file: Path, held_out: Path) -> Path:
    folder = tmp_path_factory.mktemp("calibration")
    recipe = write_recipe(folder / "tiny.yaml", model_folder, text_file, held_out)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        for mode in ("wide", "layer"):
            made = invoke("calibrate", recipe, "--mode", mode, "--steps", 2, "--run-dir", f"runs/calibrate-{mode}")
            assert made.code == 0, made.err
    return folder / "runs"


@pytest.fixture
def runs(calibrated: Path, workplace: Path) -> Path:
    shutil.copytree(calibrated, workplace / "runs")
    return workplace / "runs"


def test_a_checkpoint_is_described_in_a_run_of_its_own(wide: Wide, runs: Path, held_out: Path) -> None:
    done = wide("inspect", "runs/calibrate-wide", "--text", held_out, "--tokens", 200, "--json")
    assert done.code == 0, done.err
    document = done.document
    path = Path(document["run_dir"])
    assert path == Path("runs/inspect-wide-step-000002-held-out-200")
    assert json.loads((path / "summary.json").read_text()) == document
    assert document["tokens"] == 200 and "held-out" in document["text"]
    assert document["skip_rate"]["ffn"] == pytest.approx(document["overall"]["ffn"]["skip_rate"], abs=1e-5)
    assert len(document["layers"]) == 2 and len(document["layers"][0]["ffn"]["group_skip_rates"]) == 4
    assert len(document["token_shares"]["attention"][0]) == len(document["first_tokens"])
    assert "inspect.html" in document["files"] and all((path / name).is_file() for name in document["files"])
    assert any(name.endswith(".png") for name in document["files"]) == plots.available()
    assert len(document["grouping"]) == 2 and 0 < document["grouping"][0]["moved"] <= 1
    for layer in document["compensation"]:
        for left in layer.values():
            stands_in = left["mean"] > 0 and left["bypass"] > 0 and left["recovered"] <= 1
            assert stands_in or left["skipped"] == 0
    assert any(left["skipped"] > 0 for layer in document["compensation"] for left in layer.values())
    for word in ("skipped by layer", "union", "tokens that run most", "groups and what skipped ones", "inspect.html"):
        assert word in done.err
    wide("inspect", "runs/calibrate-wide", "--text", held_out, "--tokens", 200).refused_with("--overwrite")
    report = wide("report", "--format", "csv", "--json")  # an inspection is a run, and no result
    assert report.code == 0 and report.document["skipped"] == []


def test_a_checkpoint_without_regrouping_and_compensation_is_described_too(
    wide: Wide, tiny_recipe: Path, held_out: Path
) -> None:
    assert wide("calibrate", tiny_recipe, *PLAIN, "--steps", 1, "--run-dir", "runs/calibrate-plain").code == 0
    done = wide("inspect", "runs/calibrate-plain", "--text", held_out, "--format", "html", "--json")
    assert done.code == 0, done.err
    assert done.document["grouping"] is None and done.document["compensation"] is None
    assert "channels are grouped as they are stored, and skipped groups leave nothing" in done.err


def test_one_decision_a_layer_is_described_too(wide: Wide, runs: Path, held_out: Path) -> None:
    document = wide("inspect", "runs/calibrate-layer", "--text", held_out, "--format", "html", "--json").document
    assert document["files"] == ["inspect.html"]
    for layer in document["layers"]:
        assert layer["attention"] == layer["ffn"]


def test_texts_of_one_stem_are_inspections_of_their_own(wide: Wide, runs: Path) -> None:
    from widecli.cli.inspect import inspection_name

    checkpoint = Path("runs/calibrate-wide/checkpoints/step-000002")
    names = {
        inspection_name(checkpoint, text, 64) for text in ("news.v1.txt", "news.v2.txt", "wikitext2.txt", "wikitext2")
    }
    assert len(names) == 4


def test_bad_input_ends_in_one_sentence(wide: Wide, runs: Path, held_out: Path) -> None:
    wide("inspect", "nowhere").refused_with("nowhere", "neither a checkpoint")
    wide("inspect", "runs/calibrate-wide", "--text", "nothing.txt").refused_with("nothing.txt")
    wide("inspect", "runs/calibrate-wide", "--format", "gif").refused_with("gif", "html")
    assert not list(runs.glob("inspect-*"))
    (runs / "calibrate-wide" / "checkpoints" / "step-000002" / "recipe.yaml").unlink()
    wide("inspect", "runs/calibrate-wide", "--text", held_out).refused_with("recipe.yaml")

"""Runs from before channels were regrouped and skipped groups compensated go on as what they were."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from test_resume import steps_of, stop_after
from whole_commands import PLAIN, STRONG, Outcome, Wide, invoke, write_recipe

from stored_runs import without_later_keys
from widecli.model import checkpoint
from widecli.recipe.load import load_text, recipe_hash, resolve


def age(run: str) -> None:
    """Make a run's files what an older version would have written."""
    for path in Path(run).rglob("recipe.yaml"):
        path.write_text(without_later_keys(path.read_text()))
    for path in (*Path(run).rglob("wide_config.json"), *Path(run).glob("summary.json")):
        document = json.loads(path.read_text())
        document.get("achieved", document).get("flops_skipped", {}).pop("prunable_gross", None)
        path.write_text(json.dumps(document))


def assert_plain(run: str) -> None:
    """As the paper has it, under the hash that such a recipe always had."""
    folder = checkpoint.resolve(run)
    config = checkpoint.read_config(folder)
    assert config.plan.grouping == "contiguous" and config.plan.compensation is None
    assert checkpoint.routing_files(config) == ("router.safetensors",)
    assert not list(folder.glob("c*.safetensors"))
    text = (folder / "recipe.yaml").read_text()
    assert config.recipe_hash == recipe_hash(load_text(text)) == recipe_hash(load_text(without_later_keys(text)))


@pytest.fixture(scope="module")
def calibrated(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, text_file: Path, held_out: Path
) -> Outcome:
    folder = tmp_path_factory.mktemp("old")
    write_recipe(folder / "tiny.yaml", model_folder, text_file, held_out)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        done = invoke("calibrate", "tiny.yaml", *PLAIN, "--run-dir", "old", "--json")
        assert done.code == 0, done.err
        age("old")
    return Outcome(done.code, done.out, done.err, folder)


@pytest.fixture
def old(calibrated: Outcome, workplace: Path) -> Outcome:
    """An old calibration in `old/`."""
    assert calibrated.folder is not None
    shutil.copytree(calibrated.folder / "old", workplace / "old")
    return calibrated


def test_the_ageing_takes_the_keys_away(old: Outcome) -> None:
    for path in Path("old").rglob("recipe.yaml"):
        for word in ("grouping", "compensation", "distill"):
            assert word not in path.read_text()
    assert "prunable_gross" not in Path("old/summary.json").read_text()
    assert_plain("old")


def test_an_old_run_is_evaluated_inspected_and_exported_as_it_was(wide: Wide, old: Outcome) -> None:
    measured = wide("eval", "old", "--no-dense", "--json")
    assert measured.code == 0, measured.err
    (value,) = measured.document["perplexity"].values()
    assert value == pytest.approx(old.document["validation"]["final"], rel=1e-5)
    assert wide("inspect", "old", "--tokens", 64, "--format", "html").code == 0
    assert wide("export", "old", "--merge", "--out", "e").code == 0
    assert "gross | net |" in Path("e/README.md").read_text()


def test_a_second_stage_on_an_old_run_has_contiguous_groups_without_compensation(wide: Wide, old: Outcome) -> None:
    done = wide("lora", "old", *STRONG, "--run-dir", "adapted", "--json")
    assert done.code == 0, done.err
    assert_plain("adapted")
    assert done.document["plan"] == old.document["plan"]
    assert done.document["validation"]["start"] == pytest.approx(old.document["validation"]["final"], rel=1e-5)
    again = wide("lora", "old", *STRONG, "--run-dir", "adapted", "--resume", "--json")
    assert again.code == 0 and again.document == done.document


@pytest.mark.parametrize("extra", [(), ("data.packing=sample",)])
def test_an_old_run_that_was_stopped_resumes_to_the_same_bytes(
    wide: Wide, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch, extra: tuple[str, ...]
) -> None:
    assert wide("calibrate", tiny_recipe, *PLAIN, *extra, "--run-dir", "whole").code == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 3, signal.SIGTERM)
        assert wide("calibrate", tiny_recipe, *PLAIN, *extra, "--run-dir", "cut").code == 75
    age("cut")
    today = wide("calibrate", tiny_recipe, *extra, "--run-dir", "cut", "--resume")
    today.refused_with("routing.grouping was contiguous and is now clustered", "compensation.rank")
    resumed = wide("calibrate", "cut", "--run-dir", "cut", "--resume", "--json")
    assert resumed.code == 0, resumed.err
    assert_plain("cut")
    assert resumed.document["recipe_hash"] == json.loads(Path("whole/summary.json").read_text())["recipe_hash"]
    router = "checkpoints/step-000008/router.safetensors"
    assert Path("cut", router).read_bytes() == Path("whole", router).read_bytes()
    assert steps_of("cut") == steps_of("whole")


def test_a_stored_run_of_this_repository_names_the_recipe_it_always_did(repository: Path) -> None:
    for run in sorted((repository / "reports/smollm2-h200").glob("calibrate-*")):
        resolved = resolve(str(run))
        assert resolved.hash8 == json.loads((run / "summary.json").read_text())["recipe_hash"]
        assert resolved.recipe.routing.grouping == "contiguous" and not resolved.recipe.compensation.rank

"""A model folder that is not what it says is refused by every command that loads one, with one sentence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from whole_commands import Wide, write_questions

from broken_models import copy_of, with_adapter, with_config, with_value, with_weights

UP = "model.layers.1.mlp.up_proj.weight"
FAULTS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "prefix": (lambda f: with_weights(f, lambda t: {f"_orig_mod.{k}": v for k, v in t.items()}), ["_orig_mod.model."]),
    "missing": (lambda f: with_weights(f, lambda t: t.pop(UP)), ["1 tensor is missing", UP]),
    "nan": (lambda f: with_value(f, UP, float("nan")), ["not finite", UP]),
    "rope": (
        lambda f: with_config(f, rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
        ["another model", "rope_parameters.rope_theta=100.0 instead of 10000.0"],
    ),
}
ALONE = [
    ["eval", "eval.perplexity_window=64"],
    ["generate", "--prompt", "a"],
    ["profile", "--gen", 4, "--seconds", 0.01, "--prompt", 8],
]
WITH_A_CHECKPOINT = [
    *(["eval", "--no-dense"], ["eval"], ["lora"], ["generate", "--prompt", "a"], ["inspect"]),
    *(["generate", "--prompt", "a", "--dense"], ["profile", "--gen", 4, "--seconds", 0.01, "--prompt", 8]),
    ["export", "--merge", "--out", "out"],
]


def nothing_measured(workplace: Path) -> bool:
    return not list(workplace.glob("r/summary.json")) and not (workplace / "out").exists()


@pytest.mark.parametrize("fault", ["prefix", "missing", "nan"])
def test_calibration_refuses_it(wide: Wide, tiny_recipe: Path, workplace: Path, model_folder: Path, fault: str) -> None:
    spoil, words = FAULTS[fault]
    spoil(copy_of(model_folder, workplace / "broken"))
    wide("calibrate", tiny_recipe, "--model", "broken", "--run-dir", "r").refused_with("broken", *words)
    assert not list(workplace.glob("r/checkpoints/*"))


@pytest.mark.parametrize("command", ALONE, ids=lambda c: c[0])
@pytest.mark.parametrize("fault", ["prefix", "missing", "nan", "adapter"])
def test_a_dense_model_is_refused(
    wide: Wide, workplace: Path, model_folder: Path, command: list[Any], fault: str
) -> None:
    broken = copy_of(model_folder, workplace / "broken")
    words = ["a whole model and an adapter beside it"]
    if fault == "adapter":
        with_adapter(broken, model_folder)
    else:
        spoil, words = FAULTS[fault]
        spoil(broken)
    options = ["--run-dir", "r"] if command[0] != "generate" else []
    wide(*command, "--model", "broken", *options).refused_with("broken", *words)
    assert nothing_measured(workplace)


@pytest.mark.parametrize("command", WITH_A_CHECKPOINT, ids=lambda c: " ".join(map(str, c[:2])))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_whose_model_went_bad_is_refused(
    wide: Wide, run: Any, workplace: Path, model_folder: Path, command: list[Any], fault: str
) -> None:
    spoil, words = FAULTS[fault]
    spoil(copy_of(model_folder, workplace / "broken"))
    for recipe in workplace.glob("calibrated/checkpoints/*/recipe.yaml"):
        recipe.write_text(recipe.read_text().replace(str(model_folder), str(workplace / "broken")))
    name, *options = command
    where = ["--run-dir", "r"] if name in ("eval", "lora", "inspect", "profile") else []
    wide(name, "calibrated", *options, *where).refused_with(*words)
    assert nothing_measured(workplace)


def test_a_run_does_not_go_on_with_a_model_that_computes_something_else(
    wide: Wide, tiny_recipe: Path, workplace: Path, model_folder: Path
) -> None:
    moved = copy_of(model_folder, workplace / "mine")
    changed = ("--model", "mine", "--run-dir", "r")
    assert wide("calibrate", tiny_recipe, *changed, "train.steps=4").code == 0
    (workplace / "r" / "summary.json").unlink()
    with_config(moved, rms_norm_eps=0.01)
    refused = wide("calibrate", tiny_recipe, *changed, "train.steps=4", "--resume")
    refused.refused_with("another model", "rms_norm_eps=0.01 instead of 1e-06")


def test_a_merged_export_that_still_holds_an_adapter_is_refused(
    wide: Wide, adapted: Any, workplace: Path, model_folder: Path
) -> None:
    assert wide("export", "adapted", "--merge", "--out", "merged").code == 0
    assert wide("eval", "merged", "--run-dir", "first").code == 0
    with_adapter(workplace / "left", model_folder)
    for path in (workplace / "left").glob("adapter_*"):
        shutil.copy(path, workplace / "merged")
    for command in (["eval", "merged", "--run-dir", "r"], ["generate", "merged", "--prompt", "a"]):
        wide(*command).refused_with("merged", "an adapter beside it (adapter_config.json)")
    assert nothing_measured(workplace)


def test_a_models_own_code_runs_only_with_the_flag(
    wide: Wide, workplace: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WIDE_TRUST_REMOTE_CODE", "")  # taken back after the test
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(workplace / "modules"))
    marker = workplace / "ran"
    folder = copy_of(model_folder, workplace / "own")
    (folder / "own.py").write_text(
        f"from transformers import PreTrainedConfig\nopen({str(marker)!r}, 'w').write('ran')\n"
        "class Own(PreTrainedConfig):\n    model_type = 'own'\n"
    )
    with_config(folder, model_type="own", auto_map={"AutoConfig": "own.Own"})
    command = ("generate", "--model", "own", "--prompt", "a")
    wide(*command).refused_with("own comes with Python code of its own", "--trust-remote-code")
    assert not marker.exists()
    wide(*command, "--trust-remote-code").refused_with("model type 'own' is not supported yet")
    assert marker.exists()


@pytest.mark.parametrize("command", [["eval", "eval.perplexity_window=64"], ["generate", "--prompt", "a"]])
def test_predictions_that_are_not_finite_are_refused_though_the_weights_are(
    wide: Wide, workplace: Path, model_folder: Path, command: list[str]
) -> None:
    broken = copy_of(model_folder, workplace / "broken")
    with_weights(broken, lambda tensors: tensors[UP].fill_(1e38))
    options = ["--run-dir", "r"] if command[0] == "eval" else []
    wide(*command, "--model", "broken", *options).refused_with("the model predicts NaN in float32")
    assert nothing_measured(workplace)


def test_tasks_refuse_predictions_that_are_not_finite(wide: Wide, workplace: Path, model_folder: Path) -> None:
    broken = copy_of(model_folder, workplace / "broken")
    with_weights(broken, lambda tensors: tensors[UP].fill_(1e38))
    asked = ("--tasks", "openbookqa", "--data-root", write_questions(workplace / "data"), "--offline")
    refused = wide("eval", "--model", "broken", *asked, "eval.perplexity=[]", "--run-dir", "r")
    refused.refused_with("the model predicts NaN in float32")
    assert nothing_measured(workplace)

"""`wide calibrate` as a whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from whole_commands import Wide

from tiny_models import save_model_folder
from widecli.model import checkpoint

KEYS = {
    "schema",
    "command",
    "model",
    "plan",
    "skip_rate",
    "flops_skipped",
    "steps",
    "tokens_per_second",
    "checkpoint",
    "run_dir",
}


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_json_prints_exactly_one_document_with_the_documented_keys(wide: Wide, tiny_recipe: Path) -> None:
    done = wide("calibrate", tiny_recipe, "--json")
    assert done.code == 0, done.err
    document = done.document
    assert document.keys() >= KEYS
    assert document["schema"] == "wide.summary/1" and document["command"] == "calibrate"
    assert document["steps"] == 8
    assert set(document["skip_rate"]) == {"attention", "ffn", "mean"}
    assert set(document["flops_skipped"]) == {"prunable", "prunable_gross", "total", "context_tokens"}
    assert 0 < document["skip_rate"]["mean"] < 1
    run = Path(document["run_dir"])
    assert json.loads((run / "summary.json").read_text()) == document
    assert document["validation"]["dense"] is not None and document["validation"]["final"] is not None


def test_without_json_stdout_stays_empty(wide: Wide, tiny_recipe: Path) -> None:
    done = wide("calibrate", tiny_recipe)
    assert done.code == 0 and done.out == ""
    assert "skip rate" in done.err and "checkpoint:" in done.err
    assert "8 steps take about" in done.err, "the expected time comes first"


def test_a_run_leaves_everything_it_depends_on(wide: Wide, tiny_recipe: Path, workplace: Path) -> None:
    assert wide("calibrate", tiny_recipe).code == 0
    (run,) = (workplace / "runs").iterdir()
    assert run.name.startswith("calibrate-tiny-llama-wide-s40-g16-")
    assert {p.name for p in run.iterdir()} == {
        "recipe.yaml",
        "metrics.jsonl",
        "summary.json",
        "environment.json",
        "checkpoints",
    }
    assert yaml.safe_load((run / "recipe.yaml").read_text())["train"]["steps"] == 8
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == [f"step-{step:06d}" for step in (0, 2, 4, 6, 8)]
    steps = [entry["step"] for entry in lines(run) if "lm_loss" in entry]
    assert steps == list(range(1, 9))
    config = checkpoint.read_config(run / "checkpoints" / "step-000008")
    assert config.step == 8 and config.achieved["skip_rate"]["mean"] > 0
    assert not [p for p in run.rglob("*") if p.suffix in {".pt", ".pkl", ".bin", ".pickle"}]


def test_only_the_newest_checkpoint_can_be_resumed_from(wide: Wide, tiny_recipe: Path, workplace: Path) -> None:
    assert wide("calibrate", tiny_recipe, "--run-dir", "r").code == 0
    with_state = [p.parent.name for p in (workplace / "r").rglob("optimizer.safetensors")]
    assert with_state == ["step-000008"]


def test_the_same_seed_gives_the_same_routers_and_another_one_others(wide: Wide, tiny_recipe: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert wide("calibrate", tiny_recipe, "--run-dir", name, "--seed", seed).code == 0
    routers = [Path(n, "checkpoints/step-000008/router.safetensors").read_bytes() for n in "abc"]
    assert routers[0] == routers[1]
    assert routers[0] != routers[2]


@pytest.mark.parametrize("mode", ["token", "layer"])
def test_other_modes_train_too(wide: Wide, tiny_recipe: Path, mode: str) -> None:
    done = wide("calibrate", tiny_recipe, "--mode", mode, "--steps", 3, "--json")
    assert done.code == 0, done.err
    assert done.document["plan"]["mode"] == mode


@pytest.mark.parametrize(
    "budget",
    [
        ["budget.kind=parts", "budget.attention=0.6", "~budget.sparsity"],
        ["budget.kind=uniform"],
        ["budget.kind=flops"],
    ],
)
def test_other_budgets_train_too(wide: Wide, tiny_recipe: Path, budget: list[str]) -> None:
    done = wide("calibrate", tiny_recipe, *budget, "--steps", 3, "--json")
    assert done.code == 0, done.err


def test_padded_sequences_train_too(wide: Wide, tiny_recipe: Path, workplace: Path) -> None:
    rows = [json.dumps({"text": "word " * (1 + i % 9)}) for i in range(60)]
    (workplace / "short.jsonl").write_text("\n".join(rows) + "\n")
    done = wide("calibrate", tiny_recipe, "--data", "short.jsonl", "data.packing=sample", "--steps", 3, "--json")
    assert done.code == 0, done.err
    assert done.document["data"]["tokens"] < 60 * 32


def test_a_random_start_is_random_and_a_closed_form_start_is_not(wide: Wide, tiny_recipe: Path) -> None:
    for start in ("random", "closed_form"):
        done = wide("calibrate", tiny_recipe, f"routing.warm_start={start}", "--steps", 0, "--run-dir", start)
        assert done.code == 0, done.err
    random, closed = (load_file(f"{n}/checkpoints/step-000000/router.safetensors") for n in ("random", "closed_form"))
    assert random.keys() == closed.keys()
    assert not bool(random["0.ffn.up.bias"].any()) and bool(closed["0.ffn.up.bias"].any())


def test_zero_steps_are_the_warm_start_alone(wide: Wide, tiny_recipe: Path) -> None:
    done = wide("calibrate", tiny_recipe, "--steps", 0, "--json")
    assert done.code == 0, done.err
    assert done.document["steps"] == 0 and done.document["tokens_per_second"] is None
    assert done.document["validation"]["start"] == done.document["validation"]["final"]


def test_text_sampled_from_the_model_itself_works_without_data(wide: Wide, tiny_recipe: Path) -> None:
    done = wide("calibrate", tiny_recipe, "--data", "self", "--steps", 1, "routing.warm_start_tokens=64", "--json")
    assert done.code == 0, done.err


def test_bf16_backbone_trains_fp32_routers(wide: Wide, tiny_recipe: Path) -> None:
    done = wide("calibrate", tiny_recipe, "model.dtype=bfloat16", "--steps", 2, "--run-dir", "r", "--json")
    assert done.code == 0, done.err
    stored = load_file("r/checkpoints/step-000002/router.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.float32}


def test_an_existing_run_is_refused_then_replaced_then_reused(wide: Wide, tiny_recipe: Path, workplace: Path) -> None:
    assert wide("calibrate", tiny_recipe, "--run-dir", "r", "--steps", 2).code == 0
    before = (workplace / "r/summary.json").read_bytes()
    wide("calibrate", tiny_recipe, "--run-dir", "r", "--steps", 2).refused_with("finished run", "--overwrite")
    assert (workplace / "r/summary.json").read_bytes() == before
    again = wide("calibrate", tiny_recipe, "--run-dir", "r", "--steps", 2, "--resume", "--json")
    assert again.code == 0 and again.document == json.loads(before)
    assert wide("calibrate", tiny_recipe, "--run-dir", "r", "--steps", 2, "--overwrite").code == 0
    assert (workplace / "r/summary.json").read_bytes() != before


def test_resuming_a_finished_run_with_another_recipe_is_refused(wide: Wide, tiny_recipe: Path) -> None:
    assert wide("calibrate", tiny_recipe, "--run-dir", "r", "--steps", 2).code == 0
    refused = wide("calibrate", tiny_recipe, "--run-dir", "r", "--steps", 2, "--sparsity", 0.2, "--resume")
    refused.refused_with("another recipe", "budget.sparsity")


def test_resuming_on_a_model_whose_weights_changed_is_refused(
    wide: Wide, tiny_recipe: Path, workplace: Path, model_folder: Path, other_model_folder: Path
) -> None:
    shutil.copytree(model_folder, workplace / "model")
    arguments = ("calibrate", tiny_recipe, "--model", "model", "--run-dir", "r")
    assert wide(*arguments).code == 0
    (workplace / "r/summary.json").unlink()  # as if it had been killed at the very end
    shutil.rmtree(workplace / "model")
    shutil.copytree(other_model_folder, workplace / "model")
    wide(*arguments, "--resume").refused_with("another model", "weights")


def test_a_loss_that_is_not_finite_stops_with_the_step_and_keeps_the_checkpoint(
    wide: Wide, tiny_recipe: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from widecli.train import loop

    honest = loop.next_token_loss
    calls = []

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return honest(*args, **kwargs) * (float("nan") if len(calls) == 6 else 1.0)

    monkeypatch.setattr(loop, "next_token_loss", spoiled)
    failed = wide("calibrate", tiny_recipe, "--run-dir", "r")
    failed.refused_with("not finite at step 6", "intact", code=1)
    assert not (workplace / "r/summary.json").exists()
    assert checkpoint.resolve("r").name == "step-000004"
    assert all(bool(t.isfinite().all()) for t in load_file("r/checkpoints/step-000004/router.safetensors").values())
    monkeypatch.setattr(loop, "next_token_loss", honest)
    resumed = wide("calibrate", tiny_recipe, "--run-dir", "r", "--resume", "--json")
    assert resumed.code == 0, resumed.err
    assert "resuming after step 4" in resumed.err
    assert [e["step"] for e in lines(workplace / "r") if "lm_loss" in e] == list(range(1, 9))


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_other_families_go_the_whole_way(wide: Wide, tiny_recipe: Path, workplace: Path, family: str) -> None:
    save_model_folder(workplace / family, family)
    done = wide("calibrate", tiny_recipe, "--model", family, "--steps", 2, "--json")
    assert done.code == 0, done.err
    again = wide("eval", done.document["run_dir"], "--json")
    assert again.code == 0, again.err
    measured = again.document
    (key,) = measured["perplexity"]
    assert measured["perplexity"][key] == pytest.approx(done.document["validation"]["final"], rel=1e-4)
    assert measured["dense"]["perplexity"][key] == pytest.approx(done.document["validation"]["dense"], rel=1e-4)

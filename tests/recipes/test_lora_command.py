"""`wide lora` as a whole, and what `wide eval` makes of its checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from test_resume import ROUTING, steps_of, stop_after
from whole_commands import PLAIN, STRONG, Outcome, Wide

from widecli.model import checkpoint


def stored(run: str, step: int = 8) -> dict[str, bytes]:
    """The files of a checkpoint that hold what was learned."""
    folder = Path(run, "checkpoints", f"step-{step:06d}")
    names = (*ROUTING, "adapter/adapter_model.safetensors", "adapter/adapter_config.json")
    return {name: (folder / name).read_bytes() for name in names}


def test_json_prints_the_documented_keys_and_the_adapters_facts(adapted: Outcome) -> None:
    document = adapted.document
    assert document["schema"] == "wide.summary/1" and document["command"] == "lora"
    assert document["steps"] == 8 and 0 < document["skip_rate"]["mean"] < 1
    assert set(document["flops_skipped"]) == {"prunable", "prunable_gross", "total", "context_tokens"}
    adapter = document["adapter"]
    assert (adapter["rank"], adapter["alpha"], adapter["dropout"]) == (4, 32, 0.1)
    assert adapter["targets"] == sorted(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    assert Path(adapter["folder"], "adapter_model.safetensors").is_file()
    assert document["routers"] == "trained" and document["objective"] == "lm"
    assert document["origin"]["checkpoint"] == "calibrated/checkpoints/step-000008"
    assert json.loads(Path("adapted/summary.json").read_text()) == document


def test_it_begins_where_the_calibration_ended(adapted: Outcome, calibration: Outcome) -> None:
    """Its start is the calibrated model, its dense side the bare one."""
    began, ended = adapted.document["validation"], calibration.document["validation"]
    assert began["start"] == pytest.approx(ended["final"], rel=1e-5)
    assert began["dense"] == pytest.approx(ended["dense"], rel=1e-5)
    assert began["final"] != pytest.approx(began["start"], rel=1e-3)


def test_without_a_recipe_it_is_the_calibrations_with_a_second_stages_values(adapted: Outcome) -> None:
    recipe, first = (yaml.safe_load(Path(run, "recipe.yaml").read_text()) for run in ("adapted", "calibrated"))
    assert (recipe["train"]["temperature_start"], recipe["train"]["temperature_end"]) == (0.5, 0.5)
    assert recipe["train"]["learning_rate"] == pytest.approx(first["train"]["learning_rate"] / 4)
    for key in ("model", "data", "routing", "budget", "eval"):
        assert recipe[key] == first[key]
    assert recipe["train"]["steps"] == first["train"]["steps"]


def test_the_text_comes_in_another_order_and_with_other_noise(adapted: Outcome) -> None:
    first, second = (steps_of(run)[0] for run in ("calibrated", "adapted"))
    assert first["lm_loss"] != second["lm_loss"]
    from widecli.data.stream import SequenceStream
    from widecli.train.lora import SEED_OFFSET

    orders = [SequenceStream(16, 16, seed).batch(0).tolist() for seed in (0, SEED_OFFSET)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


def test_n_steps_then_n_more_equal_2n_steps_bit_for_bit(
    wide: Wide, adapted: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("lora", "calibrated", *STRONG, "lora.dropout=0.5")
    assert wide(*arguments, "--run-dir", "whole").code == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 3, signal.SIGTERM)
        stopped = wide(*arguments, "--run-dir", "cut")
    assert stopped.code == 75, stopped.err
    assert checkpoint.resolve("cut").name == "step-000003"
    torch.manual_seed(12345)  # the process that continues is another one
    resumed = wide(*arguments, "--run-dir", "cut", "--resume", "--json")
    assert resumed.code == 0, resumed.err
    assert stored("cut") == stored("whole")
    assert steps_of("cut") == steps_of("whole")
    whole = json.loads(Path("whole/summary.json").read_text())
    for key in ("skip_rate", "flops_skipped", "validation", "recipe_hash", "origin"):
        assert resumed.document[key] == whole[key]


def test_frozen_routers_stay_what_they_were(wide: Wide, adapted: Outcome) -> None:
    done = wide("lora", "calibrated", "--freeze-routers", "--steps", 2, "--run-dir", "frozen", "--json")
    assert done.code == 0, done.err
    assert done.document["routers"] == "frozen"
    router = "checkpoints/step-000008/router.safetensors"
    frozen = Path("frozen/checkpoints/step-000002/router.safetensors").read_bytes()
    assert frozen == Path("calibrated", router).read_bytes() != Path("adapted", router).read_bytes()
    assert all("learning_rate" not in entry and entry["lora_learning_rate"] > 0 for entry in steps_of("frozen"))


def test_distillation_logs_both_losses(wide: Wide, adapted: Outcome) -> None:
    done = wide("lora", "calibrated", "lora.objective=distill", "--steps", 2, "--run-dir", "distilled", "--json")
    assert done.code == 0, done.err
    assert done.document["objective"] == "distill"
    assert all(entry["distill_loss"] > 0 and entry["lm_loss"] > 0 for entry in steps_of("distilled"))


def test_eval_measures_the_adapter_beside_the_bare_dense_model(adapted: Outcome, calibration: Outcome) -> None:
    found, before = (json.loads(Path(f"eval-{run}/summary.json").read_text()) for run in ("adapted", "calibrated"))
    validation = adapted.document["validation"]
    assert found["perplexity"]["held-out/token_ppl"] == pytest.approx(validation["final"], rel=1e-5)
    assert found["dense"]["perplexity"] == before["dense"]["perplexity"]
    assert found["adapter"]["rank"] == 4 and before["adapter"] is None
    assert found["skip_rate"] == pytest.approx(adapted.document["skip_rate"])


def test_peft_alone_loads_the_adapter_of_a_checkpoint(adapted: Outcome, model_folder: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    folder = "adapted/checkpoints/step-000008/adapter"
    model = AutoPeftModelForCausalLM.from_pretrained(folder)
    tensors = load_file(f"{folder}/adapter_model.safetensors")
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_B"
    found = model.get_submodule(f"{name}.default").weight
    assert torch.equal(found, tensors[f"{name}.weight"]) and bool(found.any())


def test_peft_alone_computes_what_the_regrouped_model_does_with_the_adapter(
    adapted: Outcome, model_folder: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from tiny_models import random_ids
    from widecli.model.backbone import load_backbone
    from widecli.recipe.schema import ModelSection

    folder, ids = Path("adapted/checkpoints/step-000008"), random_ids(2, 24, vocabulary=200)
    order = load_file(folder / "channels.safetensors")["order"]
    assert not torch.equal(order[1].long(), torch.arange(64)), "nothing was regrouped, so this says nothing"
    backbone = load_backbone(ModelSection(name=str(model_folder)))
    routed, adapter = checkpoint.attach(folder, backbone)
    plain = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        bare = plain(input_ids=ids).logits
        alone = PeftModel.from_pretrained(plain, folder / "adapter").eval()(input_ids=ids).logits
        with routed.dense():
            attached = backbone.model(input_ids=ids).logits
    assert adapter is not None
    torch.testing.assert_close(attached, alone, rtol=1e-5, atol=1e-4)  # fp32 sums in another order
    assert (alone - bare).abs().max() > 0.1  # the adapter does something


def test_only_the_newest_checkpoint_can_be_resumed_from_and_all_hold_the_adapter(adapted: Outcome) -> None:
    root = Path("adapted/checkpoints")
    assert [p.parent.name for p in root.rglob("optimizer.safetensors")] == ["step-000008"]
    assert len(list(root.rglob("adapter_model.safetensors"))) == 5
    assert not [p for p in root.rglob("*") if p.suffix in {".pt", ".pkl", ".bin", ".pickle"}]


def test_the_newest_calibration_is_meant_when_none_is_named(wide: Wide, adapted: Outcome, tiny_recipe: Path) -> None:
    for seed, age in ((0, 100), (1, 0)):
        document = wide("calibrate", tiny_recipe, "--steps", 1, "--seed", seed, "--json").document
        stat = Path(document["run_dir"]).stat()
        os.utime(document["run_dir"], (stat.st_atime - age, stat.st_mtime - age))
    first = wide("lora", "--json")
    assert first.code == 0, first.err
    assert first.document["origin"]["checkpoint"] == document["checkpoint"]
    run = Path(first.document["run_dir"])
    assert run.name.startswith("lora-tiny-llama-wide-s40-g16-")
    os.utime(run)  # now the newest run, but no calibration
    again = wide("lora", "--resume", "--json")
    assert again.code == 0 and again.document == first.document
    assert wide("eval", "--dry-run", "--json").document["checkpoint"] == first.document["checkpoint"]


def test_other_routers_give_another_run(wide: Wide, adapted: Outcome) -> None:
    names = []
    for step in (4, 8):
        folder = f"calibrated/checkpoints/step-{step:06d}"
        done = wide("lora", folder, "--steps", 1, "--json")
        assert done.code == 0, done.err
        names.append(done.document["run_dir"])
    assert names[0] != names[1]


def test_a_run_is_not_resumed_on_other_routers(wide: Wide, adapted: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 2, signal.SIGTERM)
        assert wide("lora", "calibrated", "--run-dir", "cut").code == 75
    other = "calibrated/checkpoints/step-000004"
    wide("lora", other, "--run-dir", "cut", "--resume").refused_with("began with the routers of", "step-000008")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["calibrated", "--G-does-not-exist"], []),
        (["calibrated", "routing.ffn_group_size=32"], ["routing.ffn_group_size=16", "32"]),
        (["calibrated", "routing.mode=layer"], ["routing.mode=layer", "routing.grouping must be contiguous"]),
        (["adapted"], ["been through this stage", "calibrated/checkpoints/step-000008"]),
        (["nowhere"], ["nowhere is neither a checkpoint"]),
        (["calibrated", "lora.rank=0"], ["lora.rank", "above 0"]),
        (["calibrated", "lora.objective=kl"], ["lora.objective", "lm, distill"]),
        (["calibrated", "lora.ranks=3"], ["lora.ranks", "lora.rank"]),
        (["calibrated", "--run-dir", "calibrated", "--overwrite"], ["holds the checkpoint"]),
        ([], ["no calibrated checkpoint below runs/"]),
    ],
)
def test_what_cannot_continue_is_refused_before_anything_is_written(
    wide: Wide, adapted: Outcome, workplace: Path, arguments: list[str], words: list[str]
) -> None:
    before = sorted(workplace.rglob("*"))
    refused = wide("lora", *arguments)
    if words:
        refused.refused_with(*words)
    assert refused.code == 2
    assert sorted(workplace.rglob("*")) == before


def test_another_model_is_refused(wide: Wide, adapted: Outcome, other_model_folder: Path) -> None:
    refused = wide("lora", "calibrated", "--model", other_model_folder, "--run-dir", "other")
    refused.refused_with("another model", "weights differ")
    wide("eval", "adapted", "--model", other_model_folder).refused_with("another model", "weights differ")


def test_a_checkpoint_without_its_adapter_is_refused_not_measured_without(wide: Wide, adapted: Outcome) -> None:
    folder = Path("adapted/checkpoints/step-000008/adapter")
    (folder / "adapter_model.safetensors").unlink()
    wide("eval", "adapted").refused_with("adapter lacks adapter_model.safetensors")
    shutil.rmtree(folder)
    wide("eval", "adapted").refused_with("adapter lacks adapter_config.json")
    assert not Path("runs").exists(), "it is noticed before anything is measured"


def test_a_version_that_knows_no_adapters_or_no_regrouping_refuses_the_checkpoint(
    wide: Wide, adapted: Outcome, tiny_recipe: Path
) -> None:
    def schema(run: str, step: int = 8) -> Any:
        return json.loads(Path(run, f"checkpoints/step-{step:06d}/wide_config.json").read_text())["schema"]

    assert (schema("calibrated"), schema("adapted")) == ("wide.checkpoint/4", "wide.checkpoint/4")
    assert wide("calibrate", tiny_recipe, *PLAIN, "--steps", 1, "--run-dir", "plain").code == 0
    assert wide("lora", "plain", "--run-dir", "on-plain").code == 0
    assert (schema("plain", 1), schema("on-plain", 1)) == ("wide.checkpoint/1", "wide.checkpoint/2")


def test_a_dry_run_with_a_checkpoint_loads_and_writes_nothing(wide: Wide, adapted: Outcome, workplace: Path) -> None:
    before = sorted(workplace.rglob("*"))
    done = wide("lora", "calibrated", "lora.rank=4", "--dry-run", "--json")
    assert done.code == 0, done.err
    document = done.document
    assert document["command"] == "lora" and document["checkpoint"] == "calibrated/checkpoints/step-000008"
    assert document["estimate"]["adapter_parameters"] == adapted.document["adapter"]["parameters"]
    assert sorted(workplace.rglob("*")) == before

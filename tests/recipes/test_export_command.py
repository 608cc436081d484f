"""`wide export` as a whole: what it writes can be measured, loaded by others, and says what its runs measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from whole_commands import PLAIN, Outcome, Wide

from tiny_models import random_ids
from widecli.model import checkpoint
from widecli.model.backbone import Backbone, load_backbone
from widecli.recipe.schema import ModelSection

FILES = {
    "README.md",
    "channels.safetensors",
    "compensation.safetensors",
    "config.json",
    "generation_config.json",
    "modeling_wide.py",
    "model.safetensors",
    "recipe.yaml",
    "router.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "wide_config.json",
}


def routed_logits(folder: Path, model: Path | str) -> tuple[torch.Tensor, Backbone]:
    backbone = load_backbone(ModelSection(name=str(model)))
    checkpoint.attach(folder, backbone)
    with torch.no_grad():
        return backbone.model(input_ids=random_ids(2, 24, vocabulary=200)).logits, backbone


def test_merged_logits_equal_the_unmerged_ones_and_embeddings_stay_tied(
    wide: Wide, adapted: Outcome, model_folder: Path
) -> None:
    done = wide("export", "adapted", "--merge", "--out", "merged", "--json")
    assert done.code == 0, done.err
    document = done.document
    assert document["schema"] == "wide.export/1" and document["command"] == "export" and document["merged"]
    assert document["check"]["changed_decisions"] == 0 and document["check"]["largest_difference"] < 1e-3
    assert {p.name for p in Path("merged").iterdir()} == FILES
    unmerged, _ = routed_logits(Path("adapted/checkpoints/step-000008"), model_folder)
    merged, backbone = routed_logits(Path("merged"), "merged")
    torch.testing.assert_close(merged, unmerged, rtol=1e-4, atol=1e-3)  # fp32 sums in another order
    assert backbone.model.lm_head.weight is backbone.model.model.embed_tokens.weight
    bare = load_file(model_folder / "model.safetensors")
    written = load_file("merged/model.safetensors")
    assert written.keys() == bare.keys()
    changed = {name for name in bare if not torch.equal(bare[name], written[name])}
    assert changed == {name for name in bare if name.endswith("_proj.weight")}


def test_a_merged_model_lies_in_the_regrouped_order_computes_what_its_base_does_and_is_not_moved_again(
    wide: Wide, adapted: Outcome, model_folder: Path
) -> None:
    assert wide("export", "calibrated", "--merge", "--out", "whole").code == 0
    order = load_file("whole/channels.safetensors")["order"].long()
    assert torch.equal(order, load_file("calibrated/checkpoints/step-000008/channels.safetensors")["order"].long())
    assert not torch.equal(order[0], torch.arange(64)), "nothing was regrouped, so this says nothing"
    bare, written = load_file(model_folder / "model.safetensors"), load_file("whole/model.safetensors")
    assert bare.keys() == written.keys()
    for name, tensor in bare.items():
        for layer in (0, 1):
            if f"layers.{layer}.mlp." in name:
                tensor = tensor[:, order[layer]] if "down_proj" in name else tensor[order[layer]]
        assert torch.equal(written[name], tensor), name

    def dense(name: Path | str) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = load_backbone(ModelSection(name=str(name))).model(random_ids(2, 24)).logits
        return logits

    torch.testing.assert_close(dense("whole"), dense(model_folder), rtol=1e-5, atol=1e-5)  # fp32, another order
    backbone = load_backbone(ModelSection(name="whole"))
    routed, _ = checkpoint.attach(Path("whole"), backbone)
    assert torch.equal(backbone.model.model.layers[0].mlp.up_proj.weight, written["model.layers.0.mlp.up_proj.weight"])
    routed.detach()
    routed, _ = checkpoint.attach(Path("whole"), backbone)  # nor by attaching twice
    assert torch.equal(backbone.model.model.layers[0].mlp.up_proj.weight, written["model.layers.0.mlp.up_proj.weight"])
    for command in (("eval", "whole"), ("generate", "whole", "--prompt", "the old", "--max-new-tokens", 3)):
        assert wide(*command).code == 0


def test_cards_say_what_is_regrouped_what_stands_in_and_what_transformers_alone_can_do(
    wide: Wide, adapted: Outcome, tiny_recipe: Path
) -> None:
    assert wide("export", "adapted", "--merge", "--out", "merged").code == 0
    assert wide("export", "adapted", "--out", "copy").code == 0
    merged, copy = (Path(name, "README.md").read_text() for name in ("merged", "copy"))
    for card in (merged, copy):
        assert "`compensation.safetensors`" in card and "`channels.safetensors`" in card
        assert "| FFN channels | regrouped: those that tokens need together share a group |" in card
        assert "| a skipped group leaves | its mean and a bypass of rank 4 |" in card
        assert "prunable FLOPs skipped, gross | net |" in card
    assert "FFN channels are regrouped" in merged and "transformers alone loads and routes it" in merged
    assert "transformers alone cannot load them; `wide export --merge`" in copy
    assert "PEFT loads it onto that model as it is" in copy
    assert wide("calibrate", tiny_recipe, *PLAIN, "--steps", 1, "--run-dir", "plain").code == 0
    assert wide("export", "plain", "--merge", "--out", "e").code == 0
    card = Path("e/README.md").read_text()
    assert "regrouped" not in card and "skipped group" not in card and "safetensors" in card
    assert not Path("e/channels.safetensors").exists() and not Path("e/compensation.safetensors").exists()


def test_the_dense_model_of_an_export_is_taken_with_a_word(wide: Wide, adapted: Outcome, held_out: Path) -> None:
    assert wide("export", "adapted", "--merge", "--out", "merged").code == 0
    for command in (
        ("eval", f"eval.perplexity=[{held_out}]", "eval.perplexity_window=64"),
        ("generate", "--prompt", "the old", "--max-new-tokens", 2),
    ):
        said = wide(*command, "--model", "merged")
        assert said.code == 0 and "merged holds a model that routes; as --model it is its dense model alone" in said.err
    assert "holds a model that routes" not in wide("generate", "merged", "--prompt", "the", "--max-new-tokens", 2).err


@pytest.mark.parametrize("name", ["channels.safetensors", "compensation.safetensors"])
def test_a_checkpoint_that_lacks_a_routing_file_is_not_exported(wide: Wide, adapted: Outcome, name: str) -> None:
    Path("adapted/checkpoints/step-000008", name).unlink()
    for how in ([], ["--merge"]):
        wide("export", "adapted", "--out", "e", *how).refused_with(f"lacks its {name}")
    assert not Path("e").exists()


def test_eval_works_from_a_merged_folder_alone(wide: Wide, adapted: Outcome, workplace: Path) -> None:
    assert wide("export", "adapted", "--merge", "--out", "elsewhere/merged").code == 0
    before = json.loads(Path("eval-adapted/summary.json").read_text())
    shutil.rmtree("adapted")
    shutil.rmtree("calibrated")
    done = wide("eval", "elsewhere/merged", "--json")
    assert done.code == 0, done.err
    document = done.document
    for key in ("held-out/token_ppl",):
        assert document["perplexity"][key] == pytest.approx(before["perplexity"][key], rel=1e-4)
        assert document["dense"]["perplexity"][key] == pytest.approx(before["dense"]["perplexity"][key], rel=1e-6)
    assert document["skip_rate"] == pytest.approx(before["skip_rate"], abs=1e-3)
    assert document["merged"] and document["adapter"]["rank"] == 4
    alone = wide("eval", "elsewhere/merged", "--no-dense", "--run-dir", "alone", "--json").document
    assert alone["perplexity"] == document["perplexity"] and alone["dense"] is None


def test_the_card_holds_the_figures_of_the_runs_and_names_them(wide: Wide, adapted: Outcome) -> None:
    assert wide("export", "adapted", "--merge", "--out", "merged").code == 0
    card = Path("merged/README.md").read_text()
    evaluation = json.loads(Path("eval-adapted/summary.json").read_text())
    rows = [line for line in card.splitlines() if "`eval-adapted`" in line]
    assert len(rows) == 1
    assert f"{evaluation['perplexity']['held-out/token_ppl']:.2f}" in rows[0]
    assert f"{evaluation['dense']['perplexity']['held-out/token_ppl']:.2f}" in rows[0]
    assert f"{evaluation['skip_rate']['attention']:.1%} / {evaluation['skip_rate']['ffn']:.1%}" in rows[0]
    for run in ("adapted", "calibrated"):
        validation = json.loads(Path(run, "summary.json").read_text())["validation"]
        (row,) = [line for line in card.splitlines() if line.endswith(f"`{run}` |")]
        assert f"{validation['final']:.2f}" in row
    assert "eval-calibrated" not in card, "that is another checkpoint"
    assert "Merged and unmerged on" in card


def test_a_card_has_no_figures_of_another_step(wide: Wide, adapted: Outcome) -> None:
    assert wide("export", "adapted/checkpoints/step-000004", "--out", "half").code == 0
    card = Path("half/README.md").read_text()
    assert "eval-adapted" not in card and "`adapted`" not in card and "`calibrated`" in card


def test_without_merge_the_small_files_are_copied_and_still_evaluate(wide: Wide, adapted: Outcome) -> None:
    done = wide("export", "adapted", "--out", "small", "--json")
    assert done.code == 0, done.err
    assert "--merge" in done.err and not done.document["merged"]
    names = {p.relative_to("small").as_posix() for p in Path("small").rglob("*") if p.is_file()}
    assert names == {
        "README.md",
        "channels.safetensors",
        "compensation.safetensors",
        "config.json",
        "recipe.yaml",
        "router.safetensors",
        "wide_config.json",
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
    }
    shutil.rmtree("adapted")
    before = json.loads(Path("eval-adapted/summary.json").read_text())
    assert wide("eval", "small", "--json").document["perplexity"] == before["perplexity"]


def test_a_calibration_exports_with_the_dense_weights(wide: Wide, adapted: Outcome) -> None:
    done = wide("export", "calibrated", "--merge", "--out", "whole", "--json")
    assert done.code == 0, done.err
    assert "no adapter to merge" in done.err and "its FFN channels regrouped" in done.err
    assert done.document["check"] is None
    before = json.loads(Path("eval-calibrated/summary.json").read_text())
    measured = wide("eval", "whole", "--model", "nowhere-to-be-found", "--json")
    assert measured.code == 0, measured.err  # it needs no other model
    assert measured.document["perplexity"] == pytest.approx(before["perplexity"])
    assert measured.document["dense"]["perplexity"] == pytest.approx(before["dense"]["perplexity"])


def test_merged_weights_can_be_bf16(wide: Wide, adapted: Outcome) -> None:
    done = wide("export", "adapted", "--merge", "--dtype", "bfloat16", "--out", "merged", "--json")
    assert done.code == 0, done.err
    assert done.document["check"]["dtype"] == "bfloat16"
    assert {t.dtype for t in load_file("merged/model.safetensors").values()} == {torch.bfloat16}


def test_a_merge_that_computes_something_else_writes_nothing(
    wide: Wide, adapted: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    from widecli.model.adapter import Adapter

    honest = Adapter.merge

    def spoiled(self: Adapter) -> None:
        honest(self)
        with torch.no_grad():
            self._base.model.layers[1].self_attn.o_proj.weight.mul_(1.05)

    monkeypatch.setattr(Adapter, "merge", spoiled)
    refused = wide("export", "adapted", "--merge", "--out", "merged")
    refused.refused_with("computes something else", code=1)
    assert not Path("merged").exists()


def test_only_an_empty_folder_or_an_earlier_export_is_written_over(
    wide: Wide, adapted: Outcome, workplace: Path
) -> None:
    (workplace / "mine").mkdir()
    (workplace / "mine/thesis.txt").write_text("years")
    wide("export", "adapted", "--out", "mine", "--overwrite").refused_with("mine is not empty and not an export")
    assert (workplace / "mine/thesis.txt").read_text() == "years"
    assert wide("export", "adapted", "--out", "e").code == 0
    wide("export", "adapted", "--out", "e").refused_with("--overwrite")
    assert wide("export", "calibrated", "--out", "e", "--overwrite").code == 0
    assert not Path("e/adapter").exists()
    wide("export", "adapted", "--out", "adapted", "--overwrite").refused_with("holds the checkpoint")
    wide("export", "adapted", "--out", "adapted/checkpoints/step-000008/e").refused_with("inside the checkpoint")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], ["nowhere is neither a checkpoint"]),
        ([], ["no checkpoint below runs/"]),
        (["adapted", "--dtype", "bfloat16"], ["--merge"]),
        (["adapted", "--merge", "--model", "./nowhere"], ["./nowhere is not a folder with a model"]),
    ],
)
def test_what_cannot_be_exported_is_one_sentence(
    wide: Wide, adapted: Outcome, arguments: list[str], words: list[str]
) -> None:
    wide("export", *arguments, "--out", "e").refused_with(*words)
    assert not Path("e").exists()


def test_the_wrong_base_model_is_refused(wide: Wide, adapted: Outcome, other_model_folder: Path) -> None:
    refused = wide("export", "adapted", "--merge", "--model", other_model_folder, "--out", "e")
    refused.refused_with("another model", "weights differ")


def test_an_adapter_that_does_not_fit_is_refused(wide: Wide, adapted: Outcome) -> None:
    path = Path("adapted/checkpoints/step-000008/adapter/adapter_model.safetensors")
    tensors = load_file(path)
    removed = sorted(tensors)[0]
    del tensors[removed]
    save_file(tensors, path)
    wide("export", "adapted", "--merge", "--out", "e").refused_with("does not fit", f"missing {removed}")
    path.unlink()
    wide("export", "adapted", "--merge", "--out", "e").refused_with("adapter lacks adapter_model.safetensors")
    wide("export", "adapted", "--out", "e").refused_with("adapter lacks adapter_model.safetensors")


def test_an_export_is_not_exported_again_nor_adapted(wide: Wide, adapted: Outcome) -> None:
    assert wide("export", "adapted", "--merge", "--out", "merged").code == 0
    wide("export", "merged", "--merge", "--out", "again").refused_with("exported model already")
    wide("lora", "merged").refused_with("been through this stage")


def test_a_run_beside_it_that_may_not_be_read_stops_no_export(
    wide: Wide, run: Outcome, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workplace / "private").mkdir()
    is_file = Path.is_file

    def denied(path: Path) -> bool:
        if path.parent.name == "private":
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", denied)
    assert wide("export", "calibrated", "--out", "x").code == 0

"""`wide export` as a whole: what it writes can be measured, loaded by others, and says what its runs measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from whole_commands import Outcome, Wide

from tiny_models import random_ids
from widecli.model import checkpoint
from widecli.model.backbone import Backbone, load_backbone
from widecli.recipe.schema import ModelSection

FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
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
    assert "no adapter to merge" in done.err and done.document["check"] is None
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

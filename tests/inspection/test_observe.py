"""Decisions seen on a text are the ones the model takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tiny_models import save_model_folder, shake_routers
from widecli.errors import UsageError
from widecli.inspection.observe import Observation, observe
from widecli.inspection.statistics import statistics
from widecli.model import checkpoint
from widecli.model.backbone import load_backbone
from widecli.model.plan import RoutingPlan
from widecli.model.routed import RoutedModel
from widecli.recipe.schema import ModelSection

TEXT = "The old fox sees seven stones near the cold river. " * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("observed")
    save_model_folder(root / "model")
    (root / "text.txt").write_text(TEXT)
    backbone = load_backbone(ModelSection(name=str(root / "model")))
    plan = RoutingPlan(attention_group_size=2, ffn_group_size=16, rank=4)
    routed = RoutedModel.attach(backbone.model, plan)
    shake_routers(routed)
    config = checkpoint.CheckpointConfig(backbone.identity, plan, 3, "abcdef12", {})
    checkpoint.save(root / "ck", routed.routers, config, "{}")
    return root


def see(folder: Path, tokens: int) -> Observation:
    return observe(folder / "ck", ModelSection(name=str(folder / "model")), str(folder / "text.txt"), tokens=tokens)


def test_masks_rates_and_certainty_are_the_models_own(folder: Path) -> None:
    seen = see(folder, 60)
    assert "".join(seen.tokens) == TEXT[:60]
    assert {key: tuple(mask.shape) for key, mask in seen.masks.items()} == {
        (layer, part): (60, groups) for layer in (0, 1) for part, groups in (("attention", 2), ("ffn", 4))
    }
    backbone = load_backbone(ModelSection(name=str(folder / "model")))
    routed = RoutedModel.attach(backbone.model, seen.config.plan)
    checkpoint.load_routers(folder / "ck", routed.routers)
    ids = backbone.tokenizer(TEXT[:60], return_tensors="pt", add_special_tokens=False).input_ids
    logits = []
    routed.decisions[0, "ffn"].router.register_forward_hook(lambda m, a, out: logits.append(out[0]))
    with torch.no_grad(), routed.tracing(keep_masks=True) as trace:
        backbone.model(ids)
    assert trace.masks is not None
    for key, (mask,) in trace.masks.items():
        assert torch.equal(mask, seen.masks[key])
    p = torch.softmax(logits[0].double(), -1)
    entropy = -(p * p.log2()).sum(-1).mean(0)
    torch.testing.assert_close(seen.certainty[0, "ffn"], entropy, atol=1e-5, rtol=1e-5)
    assert seen.summary["skip_rate"]["ffn"] == pytest.approx(trace.skip_rate().ffn)


def test_a_long_text_is_read_in_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = see(folder, 32)
    monkeypatch.setattr("widecli.inspection.observe.WINDOW", 32)
    pieces = see(folder, 70)
    assert all(len(mask) == 70 for mask in pieces.masks.values())
    assert all(torch.equal(pieces.masks[key][:32], mask) for key, mask in whole.masks.items())


def test_statistics_hold_every_layer_and_part(folder: Path) -> None:
    found = statistics(see(folder, 60))
    assert [sorted(layer) for layer in found.layers] == [["attention", "ffn"]] * 2
    overall = found.overall("ffn")
    assert overall["skip_rate"] == pytest.approx(sum(layer["ffn"].skip_rate for layer in found.layers) / 2)
    assert len(found.token_shares["ffn"]) == 2 and len(found.token_shares["ffn"][0]) == 60
    document = found.as_dict(10)
    assert len(document["token_shares"]["attention"][1]) == 10


def test_another_model_or_a_text_without_words_is_refused(folder: Path) -> None:
    save_model_folder(folder / "other", seed=1)
    with pytest.raises(UsageError, match="another model"):
        observe(folder / "ck", ModelSection(name=str(folder / "other")), str(folder / "text.txt"), tokens=8)
    (folder / "short.txt").write_text("a")
    with pytest.raises(UsageError, match="longer one"):
        observe(folder / "ck", ModelSection(name=str(folder / "model")), str(folder / "short.txt"), tokens=8)

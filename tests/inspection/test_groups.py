"""How far channels were regrouped, and what stands in for skipped groups, against slow sums."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiny_models import byte_tokenizer, save_model_folder, shake_routers, tiny_plan
from widecli.inspection.groups import Regrouping, regrouping
from widecli.inspection.observe import Observation, observe
from widecli.inspection.statistics import statistics
from widecli.inspection.views import groups_table
from widecli.model import checkpoint
from widecli.model.backbone import load_backbone
from widecli.model.plan import CompensationPlan, RoutingPlan
from widecli.model.routed import RoutedModel, mask_groups
from widecli.recipe.schema import ModelSection
from widecli.report.tables import markdown

TEXT = "The old fox sees seven stones near the cold river. " * 4
TOKENS = 40


def test_channels_as_stored_have_not_moved() -> None:
    assert regrouping(torch.arange(64), 4) == Regrouping(moved=0.0, together=1.0)


def test_whole_groups_that_change_places_keep_their_pairs() -> None:
    assert regrouping(torch.arange(64).view(4, 16).flip(0).flatten(), 4) == Regrouping(moved=1.0, together=1.0)


@given(seed=st.integers(0, 99), groups=st.sampled_from([2, 4, 8]))
def test_shares_equal_a_count_pair_by_pair(seed: int, groups: int) -> None:
    order = torch.randperm(32, generator=torch.Generator().manual_seed(seed))
    size = 32 // groups
    now = {int(channel): place // size for place, channel in enumerate(order)}
    pairs = [(a, b) for a in range(32) for b in range(a) if a // size == b // size]
    found = regrouping(order, groups)
    assert found.moved == pytest.approx(sum(now[c] != c // size for c in range(32)) / 32)
    assert found.together == pytest.approx(sum(now[a] == now[b] for a, b in pairs) / len(pairs))


def save(folder: Path, plan: RoutingPlan, family: str = "llama") -> RoutedModel:
    """A checkpoint in `ck` with random routers and compensation, its channels reversed where they are regrouped."""
    save_model_folder(folder / "model", family)
    (folder / "text.txt").write_text(TEXT)
    backbone = load_backbone(ModelSection(name=str(folder / "model")))
    routed = RoutedModel.attach(backbone.model, plan)
    shake_routers(routed)
    order = torch.arange(63, -1, -1, dtype=torch.int32).repeat(2, 1)
    order[1] = order[1].roll(7)
    clustered = plan.grouping == "clustered"
    routed.regroup(order if clustered else None)
    config = checkpoint.CheckpointConfig(backbone.identity, plan, 3, "abcdef12", {})
    checkpoint.save(
        folder / "ck",
        routed.routers,
        config,
        "{}",
        compensations=routed.compensations,
        order=order if clustered else None,
    )
    return routed


def see(folder: Path) -> Observation:
    model = ModelSection(name=str(folder / "model"))
    return observe(folder / "ck", model, str(folder / "text.txt"), tokens=TOKENS)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("held", [CompensationPlan(rank=3), CompensationPlan(rank=0), CompensationPlan(False, 3)])
def test_norms_and_what_is_given_back_are_those_of_the_residuals(
    tmp_path: Path, held: CompensationPlan, family: str
) -> None:
    routed = save(tmp_path, tiny_plan(grouping="clustered", compensation=held), family)
    ids = byte_tokenizer()(TEXT, return_tensors="pt", add_special_tokens=False).input_ids[:, :TOKENS]
    # what layer 0's FFN adds, by the model itself: routed, without compensation, and dense on the same input
    layer = routed.decoder_layers()[0].mlp.down_proj
    seen: dict[str, torch.Tensor] = {}
    layer.register_forward_pre_hook(lambda m, args: seen.update(hidden=args[0]), prepend=True)
    layer.register_forward_hook(lambda m, args, out: seen.update(after=out))
    decision = routed.decisions[0, "ffn"].router
    decision.register_forward_hook(lambda m, args, out: seen.update(logits=out))
    with torch.no_grad():
        routed.backbone(ids)
        mask = seen["logits"][..., 0] >= seen["logits"][..., 1]
        executed = mask_groups(seen["hidden"], mask) @ layer.weight.T
        lost = mask_groups(seen["hidden"], ~mask) @ layer.weight.T
    stand_in = seen["after"] - executed
    found = see(tmp_path)
    got = found.substitutions[0, "ffn"]
    rms = lambda x: float(x.double().square().sum(-1).mean().sqrt())  # noqa: E731
    assert got.executed == pytest.approx(rms(executed), rel=1e-4)
    assert got.skipped == pytest.approx(rms(lost), rel=1e-4)
    assert got.recovered == pytest.approx(1 - (rms(lost - stand_in) / rms(lost)) ** 2, rel=1e-3)
    assert (got.mean is None, got.bypass is None) == (not held.mean, not held.rank)
    if held.mean and not held.rank:
        assert got.mean == pytest.approx(rms(stand_in), rel=1e-4)
    if held.rank and not held.mean:
        assert got.bypass == pytest.approx(rms(stand_in), rel=1e-4)


def test_both_are_in_the_document_and_in_the_table(tmp_path: Path) -> None:
    save(tmp_path, tiny_plan(grouping="clustered", compensation=CompensationPlan(rank=3)))
    found = statistics(see(tmp_path))
    document = found.as_dict(10)
    assert [layer["moved"] for layer in document["grouping"]] == [1.0, pytest.approx(found.regroupings[1].moved)]  # type: ignore[union-attr]
    assert document["grouping"][0]["together"] == 1.0 > document["grouping"][1]["together"]
    assert document["compensation"][1]["ffn"].keys() == asdict(found.substitutions[1]["ffn"]).keys()
    text = markdown(groups_table(found))
    assert "| layer | channels moved, % | pairs kept, % | attention runs |" in text
    assert "FFN given back, % |" in text and "| 0 | 100.0 | 100.0 |" in text


def test_a_checkpoint_from_before_has_neither(tmp_path: Path) -> None:
    save(tmp_path, tiny_plan())
    found = statistics(see(tmp_path))
    document = found.as_dict(10)
    assert document["grouping"] is None and document["compensation"] is None
    assert groups_table(found).rows == ()


def test_only_what_a_plan_has_has_columns(tmp_path: Path) -> None:
    save(tmp_path / "a", tiny_plan(grouping="clustered"))
    keys = [column.key for column in groups_table(statistics(see(tmp_path / "a"))).columns]
    assert keys == ["layer", "moved", "together"]
    save(tmp_path / "b", tiny_plan(mode="token", compensation=CompensationPlan(rank=0)))
    keys = [column.key for column in groups_table(statistics(see(tmp_path / "b"))).columns]
    assert "moved" not in keys and "ffn mean" in keys and "ffn bypass" not in keys

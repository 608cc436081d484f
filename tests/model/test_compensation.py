from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_models import FAMILIES, random_ids, tiny_model, tiny_plan, tiny_routed
from widecli.errors import UsageError
from widecli.model.compensation import Compensation
from widecli.model.plan import CompensationPlan, PartName
from widecli.model.routed import RoutedModel, mask_groups

BOTH = CompensationPlan(mean=True, rank=3)


def test_what_is_added_equals_a_loop_over_groups() -> None:
    made = Compensation(8, 4, CompensationPlan(mean=True, rank=2))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    n = torch.randn(5, 8, generator=generator)
    mask = torch.rand(5, 4, generator=generator) < 0.5
    mask[0] = True
    assert made.mean is not None and made.down is not None and made.up is not None
    added = made(mask, made.reduced(n), torch.float32)
    for t in range(5):
        wanted = torch.zeros(8)
        for g in range(4):
            if not mask[t, g]:
                wanted += made.mean[g]
        share = float((~mask[t]).float().mean())
        wanted += share * (made.up @ (made.down @ n[t]))
        torch.testing.assert_close(added[t], wanted, rtol=1e-5, atol=1e-5)
    assert not added[0].any(), "a token that skips nothing gets the dense result"
    torch.testing.assert_close(made(mask.float(), made.reduced(n), torch.float32), added)


@pytest.mark.parametrize("plan", [CompensationPlan(True, 0), CompensationPlan(False, 3), BOTH])
def test_it_starts_as_nothing(plan: CompensationPlan) -> None:
    plain, compensated = tiny_routed(), RoutedModel.attach(tiny_model(), tiny_plan(compensation=plan), seed=0)
    compensated.routers.load_state_dict(plain.routers.state_dict())
    ids = random_ids(2, 9)
    with torch.no_grad():
        assert torch.equal(plain.backbone(input_ids=ids).logits, compensated.backbone(input_ids=ids).logits)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["wide", "token", "layer"])
def test_a_routed_pass_adds_it_behind_both_projections(family: str, mode: str) -> None:
    """Against hooks written anew: what o_proj and down_proj gave, plus the formula on what the norms gave."""
    routed = tiny_routed(family, mode=mode, compensation=BOTH)
    found: dict[tuple[int, PartName, str], Tensor] = {}
    handles: list[Any] = []
    for (index, part), decision in routed.decisions.items():
        norm, output = routed.part_modules(routed.decoder_layers()[index], part)

        def keep_norm(_: Any, args: Any, n: Tensor, key: Any = (index, part)) -> None:
            found[(*key, "n")] = n

        def keep_hidden(_: Any, args: Any, key: Any = (index, part)) -> None:
            found[(*key, "h")] = args[0]

        def keep_output(_: Any, args: Any, y: Tensor, key: Any = (index, part), decision: Any = decision) -> None:
            found[(*key, "y")], found[(*key, "m")] = y, decision.mask

        handles.append(norm.register_forward_hook(keep_norm))
        handles.append(output.register_forward_pre_hook(keep_hidden, prepend=True))
        handles.append(output.register_forward_hook(keep_output))
    with torch.no_grad():
        routed.decoder(input_ids=random_ids(2, 7))
    for index, part in routed.decisions:
        _, output = routed.part_modules(routed.decoder_layers()[index], part)
        mask, hidden = found[index, part, "m"], found[index, part, "h"]
        compensation: Any = routed.compensations[str(index)][part]  # type: ignore[index]
        skipped = (~mask).float()
        wanted = F.linear(mask_groups(hidden, mask), output.weight, output.bias) + skipped @ compensation.mean
        reduced = found[index, part, "n"] @ compensation.down.T @ compensation.up.T
        wanted = wanted + skipped.mean(-1, keepdim=True) * reduced
        torch.testing.assert_close(found[index, part, "y"], wanted, rtol=1e-4, atol=1e-4)
        assert skipped.any(), "nothing was skipped, so nothing was tested"


def test_dense_passes_have_none_and_a_detached_model_is_as_it_was() -> None:
    model = tiny_model()
    ids = random_ids(2, 7)
    with torch.no_grad():
        before = model(input_ids=ids).logits
    routed = tiny_routed(compensation=BOTH)
    model = routed.backbone
    with torch.no_grad():
        with routed.dense():
            assert torch.equal(model(input_ids=ids).logits, before)
        assert not torch.allclose(model(input_ids=ids).logits, before)
    routed.detach()
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, before)
    assert not any("wide_substitute" in m.__dict__ for m in model.modules())


def test_a_padded_batch_equals_its_sequences_alone() -> None:
    routed = tiny_routed(compensation=BOTH)
    short, long = random_ids(1, 5, seed=1), random_ids(1, 9, seed=2)
    ids = torch.cat([F.pad(short, (4, 0)), long])
    valid = torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
    with torch.no_grad():
        both = routed.backbone(input_ids=ids, attention_mask=valid).logits  # type: ignore[operator]
        alone = routed.backbone(input_ids=short).logits  # type: ignore[operator]
    torch.testing.assert_close(both[0, 4:], alone[0], rtol=1e-4, atol=1e-4)


def test_the_mask_has_a_gradient_through_what_stands_in() -> None:
    """Skipping a group whose mean is what it adds costs nothing: the probe's gradient must say so."""
    routed = tiny_routed(compensation=CompensationPlan(True, 0))
    ids = random_ids(1, 6)
    with routed.probing(open_gates=True), torch.enable_grad():
        routed.backbone(input_ids=ids).logits.square().sum().backward()  # type: ignore[operator]
        with_means = [d.probe.grad.clone() for d in routed.decisions.values()]  # type: ignore[union-attr]
    with torch.no_grad():
        for parameter in routed.compensations.parameters():
            parameter.zero_()
    with routed.probing(open_gates=True), torch.enable_grad():
        routed.backbone(input_ids=ids).logits.square().sum().backward()  # type: ignore[operator]
        without = [d.probe.grad.clone() for d in routed.decisions.values()]  # type: ignore[union-attr]
    assert all(not torch.allclose(a, b) for a, b in zip(with_means, without, strict=True))


@pytest.mark.parametrize("rank", [33, -1])
def test_a_rank_that_does_not_fit_is_refused(rank: int) -> None:
    with pytest.raises(UsageError, match=f"compensation.rank={rank} must lie between 0 and the hidden size 32"):
        RoutedModel.attach(tiny_model(), tiny_plan(compensation=CompensationPlan(True, rank)))


def test_plans_say_it_and_old_ones_read_as_without() -> None:
    plan = tiny_plan(compensation=BOTH, grouping="clustered")
    data = plan.to_json()
    assert type(plan).from_json(data) == plan
    assert "compensation" not in tiny_plan().to_json() and "grouping" not in tiny_plan().to_json()
    assert type(plan).from_json(tiny_plan().to_json()) == tiny_plan()

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_models import random_ids, shake_routers, tiny_model, tiny_plan, tiny_routed
from widecli.model.compensation_fit import fit_compensations, set_means
from widecli.model.plan import CompensationPlan
from widecli.model.regroup import channel_statistics
from widecli.model.routed import RoutedModel, mask_groups
from widecli.model.warm_start import contribution

BATCHES = [(random_ids(4, 24, seed=i), None) for i in range(6)]


def lacking(routed: RoutedModel, index: int, part: Any) -> tuple[Tensor, Tensor]:
    """(what the skipped groups of a part would have added, what its compensation adds instead) on routed passes."""
    decision, substitute = routed.decisions[index, part], routed.substitutes[index, part]
    _, output = routed.part_modules(routed.decoder_layers()[index], part)
    wanted, added = [], []

    def look(module: Any, args: Any) -> None:
        mask = decision.mask
        assert mask is not None
        wanted.append(F.linear(mask_groups(args[0], ~mask), module.weight))
        added.append(substitute.compensation(mask, substitute.reduced, torch.float32))

    handle = output.register_forward_pre_hook(look, prepend=True)
    with torch.no_grad():
        for ids, _ in BATCHES:
            routed.decoder(input_ids=ids)
    handle.remove()
    return torch.cat(wanted).flatten(0, 1), torch.cat(added).flatten(0, 1)


def test_means_are_what_groups_add_on_average() -> None:
    routed = tiny_routed(compensation=CompensationPlan(True, 0))
    set_means(routed, channel_statistics(routed, BATCHES).means)
    for (index, part), substitute in routed.substitutes.items():
        _, output = routed.part_modules(routed.decoder_layers()[index], part)
        hidden: list[Tensor] = []
        handle = output.register_forward_pre_hook(lambda _, a, hidden=hidden: hidden.append(a[0]), prepend=True)
        with torch.no_grad(), routed.dense():
            for ids, _ in BATCHES:
                routed.decoder(input_ids=ids)
        handle.remove()
        mean = torch.cat(hidden).flatten(0, 1).mean(0)
        groups = substitute.compensation.groups
        for g in range(groups):
            only = torch.zeros(1, groups, dtype=torch.bool)
            only[0, g] = True
            wanted = F.linear(mask_groups(mean[None], only), output.weight)[0]
            torch.testing.assert_close(substitute.compensation.mean[g], wanted, rtol=1e-4, atol=1e-5)  # type: ignore[index]


@pytest.mark.parametrize("plan", [CompensationPlan(True, 0), CompensationPlan(False, 4), CompensationPlan(True, 4)])
def test_the_fit_explains_part_of_what_lacks(plan: CompensationPlan) -> None:
    routed = RoutedModel.attach(tiny_model(), tiny_plan(compensation=plan), seed=0)
    for parameter in routed.compensations.parameters():
        parameter.requires_grad_(False)
    shake_routers(routed)
    for parameter in routed.compensations.parameters():
        parameter.zero_()
    fit_compensations(routed, BATCHES)
    for index, part in ((0, "attention"), (0, "ffn")):  # later layers read what earlier compensation changed
        wanted, added = lacking(routed, index, part)
        before, after = wanted.square().sum(), (wanted - added).square().sum()
        assert after < 0.97 * before, (index, part)


def test_a_group_that_nobody_skips_keeps_its_mean() -> None:
    routed = tiny_routed(compensation=CompensationPlan(True, 2))
    with torch.no_grad():
        for decision in routed.decisions.values():
            decision.router.up.bias[0] += 1e4  # everybody runs the first group
        for substitute in routed.substitutes.values():
            substitute.compensation.mean[0] = 3.0  # type: ignore[index]
    fit_compensations(routed, BATCHES)
    for substitute in routed.substitutes.values():
        assert bool((substitute.compensation.mean[0] == 3.0).all())  # type: ignore[index]
        assert all(bool(p.isfinite().all()) for p in substitute.compensation.parameters())


@pytest.mark.parametrize("size", [2, 16])
def test_contributions_beyond_the_mean_equal_a_loop(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(5, 3 * size, generator=generator), torch.randn(8, 3 * size, generator=generator)
    mean = torch.randn(3, 8, generator=generator)
    found = contribution(hidden, weight, 3, mean)
    for t in range(5):
        for g in range(3):
            part = slice(g * size, (g + 1) * size)
            wanted = (weight[:, part] @ hidden[t, part] - mean[g]).square().sum()
            torch.testing.assert_close(found[t, g], wanted, rtol=1e-3, atol=1e-3)

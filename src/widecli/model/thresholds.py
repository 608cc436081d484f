"""Shifts of the routers' margins that make routed passes skip what was asked for, found by search on text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from widecli.model.budget import Budget
from widecli.model.cost import overhead_flops, part_flops, part_savings
from widecli.model.gate import argmax_gate, margins
from widecli.model.plan import PARTS, PartName
from widecli.model.routed import Decision, RoutedModel

Batch = tuple[Tensor, Tensor | None]
"""Input ids [B, T] and validity mask [B, T], or None without padding."""

Margins = Mapping[Decision, Tensor]
"""z of each decision on some tokens, [n, N]."""

Solver = Callable[[Margins], dict[Decision, float]]
"""From margins to what has to be taken off them, a number for each decision that may move."""

_MOST_STRETCH = 4.0


@contextmanager
def hooked(
    routed: RoutedModel, on_input: Callable[..., None], on_output: Callable[..., None] | None = None
) -> Iterator[None]:
    """Call `on_input(decision, x)` where a router reads and `on_output(decision, part, h, W)` where masks apply."""
    handles = []
    for (index, part), decision in routed.decisions.items():
        norm, output = routed.part_modules(routed.decoder_layers()[index], part)
        if part == "attention" or not routed.layers[index].shared:

            def read(_: nn.Module, args: tuple[Tensor, ...], decision: Decision = decision) -> None:
                on_input(decision, args[0])

            handles.append(norm.register_forward_pre_hook(read))
        if on_output is not None:

            def write(
                module: nn.Linear, args: tuple[Tensor, ...], decision: Decision = decision, part: PartName = part
            ) -> None:
                on_output(decision, part, args[0], module.weight)

            # before the mask: what a skipped group would have contributed counts too
            handles.append(output.register_forward_pre_hook(write, prepend=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def rows(x: Tensor, valid: Tensor | None) -> Tensor:
    """x [B, T, K] -> the rows of real tokens [n, K]."""
    return x.flatten(0, 1) if valid is None else x[valid.bool()]


@torch.no_grad()
def collect_margins(
    routed: RoutedModel, batches: Sequence[Batch], under_routing: bool = True
) -> dict[Decision, Tensor]:
    """Each router's margins [n, N] on the real tokens of a text, with the model routed or dense."""
    found: dict[Decision, list[Tensor]] = {}
    valid: list[Tensor | None] = [None]

    def on_input(decision: Decision, x: Tensor) -> None:
        found.setdefault(decision, []).append(margins(decision.router(rows(x, valid[0]))))

    with hooked(routed, on_input):
        for ids, mask in batches:
            valid[0] = mask
            with nullcontext() if under_routing else routed.dense():
                routed.decoder(input_ids=ids, attention_mask=mask, use_cache=False)
    return {decision: torch.cat(parts) for decision, parts in found.items()}


def skipped_share(z: Tensor) -> float:
    """Share of groups that a decision skips at margins z [n, N]."""
    return 1 - float(argmax_gate(z).float().mean())


@torch.no_grad()
def meet_budget(routed: RoutedModel, batches: Sequence[Batch], budget: Budget, passes: int = 4) -> None:
    """Shift the routers as they are until they skip what the budget asks for on this text, and change nothing else."""
    sample = batches[: max(1, len(batches) // 2)]  # a threshold needs fewer tokens than a regression
    meet(routed, sample, for_budget(routed, budget), passes=passes)


@torch.no_grad()
def meet(
    routed: RoutedModel,
    batches: Sequence[Batch],
    solve: Solver,
    *,
    passes: int,
    unrouted: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> dict[Decision, float]:
    """Shift the routers' biases until routed passes skip what `solve` aims at; returns what came off the margins.

    What the present margins promise falls short, always: once more is skipped, the margins of later layers rise. So
    each move is stretched by how far the last one fell short of its promise. `unrouted`: the routers cannot route yet,
    so the first look is at the dense model.
    """
    total = dict.fromkeys(routed.decisions.values(), 0.0)
    promised: dict[Decision, float] = {}
    before: dict[Decision, float] = {}
    stretch = dict.fromkeys(total, 1.0)
    for i in range(passes):
        say(f"thresholds, pass {i + 1} of {passes}")
        shifts = solve(collect_margins(routed, batches, under_routing=not unrouted or i > 0))
        for decision, shift in shifts.items():
            moved = before.get(decision, 0.0)
            if i > (1 if unrouted else 0) and moved * shift > 0:
                # the last move should have left no shift at all; what is left tells how much of it was eaten
                eaten = min(0.75, shift / promised[decision])
                stretch[decision] = min(_MOST_STRETCH, stretch[decision] / (1 - eaten))
            elif moved * shift < 0:
                stretch[decision] = 1.0  # went too far
            promised[decision] = shift
            before[decision] = step = shift * stretch[decision]
            decision.router.up.bias[0::2] -= step / 2
            decision.router.up.bias[1::2] += step / 2
            total[decision] += step
    return total


def for_budget(routed: RoutedModel, budget: Budget) -> Solver:
    """Aims at a budget: one shift for all decisions, one a part or one a layer, as the budget's kind says."""
    shape, compensation, context = routed.shape, routed.plan.compensation, budget.context_tokens
    prunable = len(routed.layers) * sum(part_flops(shape, p, context) for p in PARTS)
    overhead = overhead_flops(shape, routed.plan.rank, routed.layers, compensation) / prunable
    routed_parts = [p for p in PARTS if any(key[1] == p for key in routed.decisions)]

    def weights(decision: Decision) -> float:
        parts = routed.parts_of(decision)
        if budget.kind == "flops":
            groups = decision.router.groups
            return sum(part_savings(shape, p, groups, context, compensation) for p in parts) / prunable
        return len(parts) / (len(routed_parts) * len(routed.layers))

    def solve(z: Margins) -> dict[Decision, float]:
        result: dict[Decision, float] = {}
        if budget.kind == "parts":
            for part in routed_parts:
                chosen = {d: 1 / len(routed.layers) for (_, p), d in routed.decisions.items() if p == part}
                result |= common_shift(z, chosen, budget.target(part) or 0.0)
            return result
        if budget.kind == "uniform":
            for index in range(len(routed.layers)):
                here = list(dict.fromkeys(d for (i, _), d in routed.decisions.items() if i == index))
                result |= common_shift(z, {d: 1 / len(here) for d in here}, budget.sparsity)
            return result
        target = budget.sparsity + overhead if budget.kind == "flops" else budget.sparsity
        return common_shift(z, {d: weights(d) for d in z}, target)

    return solve


def common_shift(z: Margins, weights: Mapping[Decision, float], target: float) -> dict[Decision, float]:
    """Bisect the one shift at which the weighted share that decisions skip is `target`."""
    if not weights:
        return {}
    low = min(float(z[d].min()) for d in weights) - 1.0
    high = max(float(z[d].max()) for d in weights) + 1.0
    if target > 0:
        for _ in range(40):
            middle = (low + high) / 2
            share = sum(w * skipped_share(z[d] - middle) for d, w in weights.items())
            low, high = (middle, high) if share < target else (low, middle)
    return dict.fromkeys(weights, low)

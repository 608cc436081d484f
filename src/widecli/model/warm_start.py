"""The closed-form start of the routers: from a few passes over text, without a gradient step.

A router is a linear map of rank r, so "predict how much each group matters for this token" has a closed form:

1. Run the text and note, for each layer, part, token t and group g, the contribution
   `c = ||W[:, g] h[t, g]||^2` that group g adds to the residual (W = o_proj or down_proj), relative to the residual
   itself and to the group's cost: `score = log c - log ||x[t]||^2 - log cost[g]`.
2. Ridge regression of the scores on the router's features with a bias, cut to rank r (reduced-rank regression: keep the
   top right-singular directions of the fitted values).
3. One threshold for all layers and parts such that the share of scores below it meets the budget; the execute logit is
   the score above the threshold, the skip logit its negative.

Skipping changes the residual that later routers read. So the statistics are taken again with the layers routed
(`rounds`), and thresholds are set on scores seen under routing (`threshold_passes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from widecli.model.budget import Budget
from widecli.model.cost import part_flops, part_parameters
from widecli.model.plan import PARTS, PartName
from widecli.model.routed import Decision, RoutedModel
from widecli.model.router import Router

Batch = tuple[Tensor, Tensor | None]  # input ids [B, T] and validity mask [B, T], or None without padding
_TINY = 1e-20  # contributions of dead groups: keeps their log finite


@dataclass(frozen=True)
class WarmStart:
    """Settings of the closed form. `scale` multiplies the logits: the larger, the more decided the start."""

    rounds: int = 2
    threshold_passes: int = 2
    ridge: float = 1e-3
    scale: float = 1.0


@dataclass
class _Moments:
    """Second moments of one router's regression, fp64: features with a bias column against scores."""

    xx: Tensor
    xs: Tensor

    @classmethod
    def zeros(cls, features: int, groups: int, device: torch.device) -> _Moments:
        options: dict[str, Any] = {"dtype": torch.float64, "device": device}
        return cls(torch.zeros(features + 1, features + 1, **options), torch.zeros(features + 1, groups, **options))

    def add(self, features: Tensor, scores: Tensor) -> None:
        x = torch.cat([features, features.new_ones(features.shape[0], 1)], 1).double()
        self.xx += x.T @ x
        self.xs += x.T @ scores.double()


def reduced_rank_regression(xx: Tensor, xs: Tensor, rank: int, ridge: float) -> tuple[Tensor, Tensor]:
    """Best rank-limited linear fit from second moments.

    xx [D, D] and xs [D, N] are `X^T X` and `X^T S`; `ridge` is relative to the mean diagonal of xx. Returns
    `left` [D, k] and `right` [N, k] with k = min(rank, N, D); predictions are `X @ left @ right.T`.
    """
    penalty = ridge * xx.diagonal().mean() * torch.eye(len(xx), dtype=xx.dtype, device=xx.device)
    full = torch.linalg.solve(xx + penalty, xs)
    fitted = full.T @ xx @ full  # Gram matrix of the fitted values: its eigenvectors are their right singular vectors
    k = min(rank, *xs.shape)
    right = torch.linalg.eigh((fitted + fitted.T) / 2).eigenvectors[:, -k:]
    return full @ right, right


def contribution(hidden: Tensor, weight: Tensor, groups: int) -> Tensor:
    """`||W[:, g] h[t, g]||^2` for every token and group: hidden [T, K], weight [D, K] -> fp32 [T, N].

    Narrow groups go through their K/N-wide Gram matrix, so that no D-wide intermediate per group exists.
    """
    tokens, width = hidden.shape
    size = width // groups
    h = hidden.float().view(tokens, groups, size).transpose(0, 1)
    w = weight.float().T.reshape(groups, size, -1)
    if size >= weight.shape[0]:
        return (h @ w).square().sum(-1).T
    return ((h @ (w @ w.transpose(1, 2))) * h).sum(-1).T.clamp_min(0)


def closed_form(
    routed: RoutedModel,
    batches: Sequence[Batch],
    budget: Budget,
    settings: WarmStart | None = None,
    progress: Callable[[str], None] | None = None,
) -> None:
    """Set every router from `batches` (at most a few 10k tokens), so that they meet `budget` on that text."""
    settings = settings or WarmStart()
    say = progress or (lambda _: None)
    thresholds = dict.fromkeys(routed.decisions.values(), 0.0)
    with torch.no_grad():
        for round_index in range(settings.rounds):
            say(f"statistics, pass {round_index + 1} of {settings.rounds}")
            moments = _collect(routed, batches, under_routing=round_index > 0)
            for decision, m in moments.items():
                _set_scores(decision.router, m, settings, thresholds[decision])
            for i in range(settings.threshold_passes):
                say(f"thresholds, pass {i + 1} of {settings.threshold_passes}")
                # without any threshold yet the routers cannot route, so the first look is at the dense model
                logits = _logits(routed, batches, under_routing=round_index + i > 0)
                for decision, shift in _thresholds(routed, logits, budget).items():
                    decision.router.up.bias[0::2] -= shift
                    decision.router.up.bias[1::2] += shift
                    thresholds[decision] += shift / settings.scale


def _set_scores(router: Router, moments: _Moments, settings: WarmStart, threshold: float) -> None:
    """Execute logit = (predicted score - threshold) * scale, skip logit = its negative."""
    left, right = reduced_rank_regression(moments.xx, moments.xs, router.down.out_features, settings.ridge)
    k = left.shape[1]
    for parameter in router.parameters():
        parameter.zero_()
    router.down.weight[:k] = left[:-1].T.float()
    router.down.bias[:k] = left[-1].float()
    up = right.float() * settings.scale
    router.up.weight[0::2, :k] = up
    router.up.weight[1::2, :k] = -up
    router.up.bias[0::2] = -threshold * settings.scale
    router.up.bias[1::2] = threshold * settings.scale


def _log_cost(routed: RoutedModel, decision: Decision) -> float:
    """log of one group's parameters (of both parts when one decision serves them)."""
    parts = routed.parts_of(decision)
    total = sum(part_parameters(routed.shape, p) for p in parts)
    return math.log(total / decision.router.groups)


@contextmanager
def _hooked(
    routed: RoutedModel, on_input: Callable[..., None], on_output: Callable[..., None] | None
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


def _run(routed: RoutedModel, batches: Iterable[Batch], under_routing: bool, valid: list[Tensor | None]) -> None:
    for ids, mask in batches:
        valid[0] = mask
        if under_routing:
            routed.decoder(input_ids=ids, attention_mask=mask, use_cache=False)
        else:
            with routed.dense():
                routed.decoder(input_ids=ids, attention_mask=mask, use_cache=False)


def _rows(x: Tensor, valid: Tensor | None) -> Tensor:
    """x [B, T, K] -> the rows of real tokens [n, K]."""
    return x.flatten(0, 1) if valid is None else x[valid.bool()]


def _collect(routed: RoutedModel, batches: Sequence[Batch], under_routing: bool) -> dict[Decision, _Moments]:
    moments: dict[Decision, _Moments] = {}
    inputs: dict[Decision, Tensor] = {}
    pending: dict[Decision, Tensor] = {}
    valid: list[Tensor | None] = [None]

    def on_input(decision: Decision, x: Tensor) -> None:
        inputs[decision] = _rows(x, valid[0]).float()

    def on_output(decision: Decision, part: PartName, hidden: Tensor, weight: Tensor) -> None:
        added = contribution(_rows(hidden, valid[0]), weight, decision.router.groups)
        parts = routed.parts_of(decision)
        if part != parts[-1]:  # one decision for both parts: wait for the second contribution
            pending[decision] = added
            return
        if decision in pending:
            added = added + pending.pop(decision)
        x = inputs.pop(decision)
        scores = (added.double() + _TINY).log() - (x.double().square().sum(-1, keepdim=True) + _TINY).log()
        features = decision.router.features(x)
        if decision not in moments:
            moments[decision] = _Moments.zeros(features.shape[1], decision.router.groups, features.device)
        moments[decision].add(features, scores - _log_cost(routed, decision))

    with _hooked(routed, on_input, on_output):
        _run(routed, batches, under_routing, valid)
    return moments


def _logits(routed: RoutedModel, batches: Sequence[Batch], under_routing: bool) -> dict[Decision, Tensor]:
    """Each router's present execute logits [n, N] on a sample of the text."""
    found: dict[Decision, list[Tensor]] = {}
    valid: list[Tensor | None] = [None]

    def on_input(decision: Decision, x: Tensor) -> None:
        logits = decision.router(_rows(x, valid[0]))
        found.setdefault(decision, []).append(logits[..., 0])

    sample = batches[: max(1, len(batches) // 2)]  # a threshold needs fewer tokens than a regression
    with _hooked(routed, on_input, None):
        _run(routed, sample, under_routing, valid)
    return {decision: torch.cat(parts) for decision, parts in found.items()}


def _thresholds(routed: RoutedModel, scores: dict[Decision, Tensor], budget: Budget) -> dict[Decision, float]:
    """Shifts, in the units of `scores`, at which the budget is met: one for all, one a part or one a layer."""
    context = budget.context_tokens
    cost = {p: part_flops(routed.shape, p, context) for p in PARTS}
    routed_parts = [p for p in PARTS if any(key[1] == p for key in routed.decisions)]

    def weights(decision: Decision) -> float:
        parts = routed.parts_of(decision)
        if budget.kind == "flops":
            return sum(cost[p] for p in parts) / (sum(cost.values()) * len(routed.layers))
        return len(parts) / (len(routed_parts) * len(routed.layers))

    if budget.kind == "parts":
        result: dict[Decision, float] = {}
        for part in routed_parts:
            chosen = {d: 1.0 for (_, p), d in routed.decisions.items() if p == part}
            result |= _solve(scores, {d: 1 / len(chosen) for d in chosen}, budget.target(part) or 0.0)
        return result
    if budget.kind == "uniform":
        result = {}
        for index in range(len(routed.layers)):
            chosen_here = list(dict.fromkeys(d for (i, _), d in routed.decisions.items() if i == index))
            result |= _solve(scores, {d: 1 / len(chosen_here) for d in chosen_here}, budget.sparsity)
        return result
    return _solve(scores, {d: weights(d) for d in scores}, budget.sparsity)


def _solve(scores: dict[Decision, Tensor], weights: dict[Decision, float], target: float) -> dict[Decision, float]:
    """Bisect the common threshold at which the weighted share of scores below it is `target`."""
    if not weights:
        return {}
    low = min(float(scores[d].min()) for d in weights) - 1.0
    high = max(float(scores[d].max()) for d in weights) + 1.0
    if target > 0:
        for _ in range(40):
            middle = (low + high) / 2
            share = sum(w * float((scores[d] < middle).float().mean()) for d, w in weights.items())
            low, high = (middle, high) if share < target else (low, middle)
    return dict.fromkeys(weights, low)

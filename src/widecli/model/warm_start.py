"""The closed-form start of the routers: from a few passes over text, without a gradient step.

A router is a linear map of rank r, so "predict how much each group matters for this token" has a closed form:

1. Run the text and score each group g of each layer and part for each token t, two ways:
   - magnitude: `log ||W[:, g] h[t, g] - M[g]||^2 - log ||x[t]||^2`, what the group adds to the residual beyond the
     mean that would stand in for it (0 without compensation), relative to it (W = o_proj or down_proj);
   - first order: `log (dLoss / dmask[t, g])^2`, the squared change of the language-model loss if the group is taken
     out, to first order. One backward pass gives it for all groups, whatever happens in later layers.
   Both minus the log of the group's cost, mixed with `first_order_weight`.
2. Ridge regression of the scores on the router's features with a bias, cut to rank r (reduced-rank regression: keep the
   top right-singular directions of the fitted values).
3. One threshold for all layers and parts such that the share of scores below it meets the budget; the execute logit is
   the score above the threshold, the skip logit its negative.

Skipping changes the residual that later routers read. So statistics are taken again with the layers routed (`rounds`),
and thresholds are searched on what routed passes really skip (`threshold_passes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from widecli.errors import UsageError
from widecli.model.budget import Budget
from widecli.model.cost import part_parameters
from widecli.model.loss import next_token_loss
from widecli.model.plan import PartName
from widecli.model.routed import Decision, RoutedModel
from widecli.model.router import Router
from widecli.model.thresholds import Batch, for_budget, hooked, meet, rows

FEW_TOKENS = 32768
_TINY = 1e-20  # contributions of dead groups: keeps their log finite
_TINY_GRADIENT = 1e-14  # squared; below what bf16 passes resolve


@dataclass(frozen=True)
class WarmStart:
    """Settings of the closed form.

    `budget_share`: the start skips this share of the budget and training closes the gap: a start that already meets a
    large budget is a broken model, and training from it ends worse (measured). 1 for a start that is the result.
    `scale` multiplies the logits: the larger, the more decided the start.
    """

    rounds: int = 2
    threshold_passes: int = 4
    budget_share: float = 0.5
    first_order_weight: float = 1.0
    ridge: float = 1e-3
    scale: float = 1.0

    @classmethod
    def for_tokens(cls, tokens: int, budget_share: float) -> WarmStart:
        """What serves best with that much text.

        First-order scores are noisy: with 8k tokens and one round they start SmolLM2 at a perplexity of 2470 where the
        even mix starts at 79 (S = 0.25), and with 65k tokens and two rounds they are ahead of everything else tried.
        """
        if tokens < FEW_TOKENS:
            return cls(rounds=1, threshold_passes=3, first_order_weight=0.5, budget_share=budget_share)
        return cls(budget_share=budget_share)


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
    # relative to the mean: a few channels of the residual stream are a hundred times larger than the rest
    penalty = ridge * xx.diagonal().mean() * torch.eye(len(xx), dtype=xx.dtype, device=xx.device)
    full = torch.linalg.solve(xx + penalty, xs)
    fitted = full.T @ xx @ full  # Gram matrix of the fitted values: its eigenvectors are their right singular vectors
    k = min(rank, *xs.shape)
    right = torch.linalg.eigh((fitted + fitted.T) / 2).eigenvectors[:, -k:]
    return full @ right, right


def contribution(hidden: Tensor, weight: Tensor, groups: int, mean: Tensor | None = None) -> Tensor:
    """`||W[:, g] h[t, g] - mean[g]||^2` for every token and group: hidden [T, K], weight [D, K] -> fp32 [T, N].

    `mean` [N, D] is what stands in for a skipped group; None = nothing, and running it is worth all that it adds.
    Narrow groups go through their K/N-wide Gram matrix, so that no D-wide intermediate per group exists.
    """
    tokens, width = hidden.shape
    size = width // groups
    h = hidden.float().view(tokens, groups, size).transpose(0, 1)
    w = weight.float().T.reshape(groups, size, -1)
    if size >= weight.shape[0]:
        added = h @ w
        return (added if mean is None else added - mean.float().unsqueeze(1)).square().sum(-1).T
    squares = ((h @ (w @ w.transpose(1, 2))) * h).sum(-1)
    if mean is not None:  # ||a - m||^2 = ||a||^2 - 2 a m + ||m||^2, again without a
        along = (h @ torch.einsum("nkd,nd->nk", w, mean.float()).unsqueeze(-1)).squeeze(-1)
        squares = squares - 2 * along + mean.float().square().sum(-1, keepdim=True)
    return squares.T.clamp_min(0)


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
    budget = budget.scaled(settings.budget_share)
    # In log cost and log worth one threshold for all groups is the optimum of a knapsack by worth per parameter;
    # a budget of several targets gives each part or layer its own.
    thresholds = dict.fromkeys(routed.decisions.values(), 0.0)
    sample = batches[: max(1, len(batches) // 2)]  # a threshold needs fewer tokens than a regression
    solve = for_budget(routed, budget)
    for index in range(settings.rounds):
        say(f"statistics, pass {index + 1} of {settings.rounds}")
        moments = _collect(routed, batches, settings.first_order_weight, under_routing=index > 0)
        _refuse_what_is_not_finite(routed, moments)
        with torch.no_grad():
            for decision, m in moments.items():
                _set_scores(decision.router, m, settings, thresholds[decision])
        moved = meet(routed, sample, solve, passes=settings.threshold_passes, unrouted=index == 0, say=say)
        for decision, shift in moved.items():
            thresholds[decision] += shift / 2 / settings.scale  # half of a margin is the execute logit


def _refuse_what_is_not_finite(routed: RoutedModel, moments: dict[Decision, _Moments]) -> None:
    """Raise UsageError naming the first layer whose residual stream or scores are NaN or infinite."""
    for (index, part), decision in routed.decisions.items():
        m = moments[decision]
        if not bool(m.xx.isfinite().all() & m.xs.isfinite().all()):
            raise UsageError(
                f"the model gives NaN or infinity on this text (first seen at the {part} of layer {index}); check its "
                f"weights, or try model.dtype=float32"
            )


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


def _collect(
    routed: RoutedModel, batches: Sequence[Batch], first_order_weight: float, under_routing: bool
) -> dict[Decision, _Moments]:
    """Moments of features against scores over all batches; `under_routing`: with the present routers deciding."""
    moments: dict[Decision, _Moments] = {}
    inputs: dict[Decision, Tensor] = {}
    added: dict[Decision, Tensor] = {}
    means = {
        (s.decision, part): s.compensation.mean.detach()
        for (_, part), s in routed.substitutes.items()
        if s.compensation.mean is not None
    }

    def on_input(decision: Decision, x: Tensor) -> None:
        inputs[decision] = x.detach()

    def on_output(decision: Decision, part: PartName, hidden: Tensor, weight: Tensor) -> None:
        if first_order_weight < 1:
            mean = means.get((decision, part))
            flat = contribution(hidden.detach().flatten(0, 1), weight, decision.router.groups, mean)
            part_added = flat.view(*hidden.shape[:2], -1)
            # one decision for both parts: what both add counts
            added[decision] = added[decision] + part_added if decision in added else part_added

    for ids, valid in batches:
        with torch.enable_grad(), hooked(routed, on_input, on_output), routed.probing(open_gates=not under_routing):
            hidden = routed.decoder(input_ids=ids, attention_mask=valid, use_cache=False).last_hidden_state
            if first_order_weight > 0:
                torch.autograd.backward(next_token_loss(hidden, routed.lm_head.weight, ids, valid))
            for decision, x in inputs.items():
                x = rows(x, valid).float()
                scores = x.new_zeros(len(x), decision.router.groups, dtype=torch.float64)
                if first_order_weight < 1:
                    # relative to the residual stream, whose norm grows from layer to layer
                    magnitude = (rows(added.pop(decision), valid).double() + _TINY).log()
                    relative = magnitude - (x.double().square().sum(-1, keepdim=True) + _TINY).log()
                    scores += (1 - first_order_weight) * relative
                if first_order_weight > 0:
                    assert decision.probe is not None and decision.probe.grad is not None
                    gradient = rows(decision.probe.grad, valid).double()
                    scores += first_order_weight * (gradient.square() + _TINY_GRADIENT).log()
                features = decision.router.features(x)
                if decision not in moments:
                    moments[decision] = _Moments.zeros(features.shape[1], decision.router.groups, features.device)
                moments[decision].add(features, scores - _log_cost(routed, decision))
        inputs.clear()
    return moments

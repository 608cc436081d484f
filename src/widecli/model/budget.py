"""How much to skip, as a differentiable distance between what a pass skipped and what the user asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from widecli.errors import UsageError
from widecli.model.cost import overhead_flops, part_flops, part_savings
from widecli.model.plan import PARTS, ModelShape, PartName, RoutingPlan
from widecli.model.trace import RoutingTrace

if TYPE_CHECKING:
    from widecli.recipe.schema import BudgetSection

BudgetKind = Literal["rate", "parts", "uniform", "flops"]


@dataclass(frozen=True)
class Budget:
    """Targets and the weight of their loss term; `context_tokens` sets the cost of attention for `flops`, which is net.

    `start_share` and `ramp_ratio` say how the target rises during training (`train.schedules.budget_share`).
    """

    kind: BudgetKind
    sparsity: float
    attention: float | None = None
    ffn: float | None = None
    weight: float = 20.0
    context_tokens: int = 1024
    start_share: float = 0.5
    ramp_ratio: float = 0.0

    @classmethod
    def from_section(cls, section: BudgetSection, plan: RoutingPlan, shape: ModelShape, context_tokens: int) -> Budget:
        """Build the budget and check that the plan routes what it constrains. Raises UsageError."""
        budget = cls(**section.model_dump(), context_tokens=context_tokens)
        layers = plan.layers(shape)
        for part in PARTS:
            if budget.kind == "parts" and budget.target(part) is not None and not any(x.groups(part) for x in layers):
                raise UsageError(f"budget.{part} is set, but the plan does not route the {part} part")
        if not any(x.groups(p) for x in layers for p in PARTS):
            raise UsageError("the plan routes nothing: every layer is overridden to parts=none")
        if plan.mode == "layer" and budget.kind == "parts":
            raise UsageError("routing.mode=layer takes one decision for both parts; budget.kind=parts cannot hold")
        return budget

    def scaled(self, share: float) -> Budget:
        """The same budget with every target multiplied by `share`."""
        attention = None if self.attention is None else self.attention * share
        ffn = None if self.ffn is None else self.ffn * share
        return replace(self, sparsity=self.sparsity * share, attention=attention, ffn=ffn)

    def target(self, part: PartName) -> float | None:
        """Target of one part (kind = parts)."""
        return self.attention if part == "attention" else self.ffn

    def distance(self, trace: RoutingTrace) -> Tensor:
        """Mean absolute distance to the targets, a 0-d tensor with gradient; unweighted."""
        parts = trace.routed_parts()
        if self.kind == "parts":
            gaps = [
                (trace.layer_rates(p).mean() - target).abs() for p in parts if (target := self.target(p)) is not None
            ]
            return torch.stack(gaps).mean()
        # Absolute, as in the paper: the pull towards the target does not fade as the target comes near.
        if self.kind == "uniform":
            return (self._layer_means(trace) - self.sparsity).abs().mean()
        if self.kind == "flops":
            return (self._flops_share(trace) - self.sparsity).abs()
        return (torch.stack([trace.layer_rates(p).mean() for p in parts]).mean() - self.sparsity).abs()

    def loss(self, trace: RoutingTrace) -> Tensor:
        """`weight * distance`, the term added to the language-model loss."""
        return self.weight * self.distance(trace)

    @staticmethod
    def _layer_means(trace: RoutingTrace) -> Tensor:
        """Mean skip rate of each layer over the parts it routes; layers that route nothing are left out."""
        total = sum((trace.layer_rates(p) for p in trace.routed_parts()), start=torch.zeros(()))
        counts = [sum(1 for p in PARTS if x.groups(p)) for x in trace.layers]
        return torch.stack([total[i] / n for i, n in enumerate(counts) if n])

    def _flops_share(self, trace: RoutingTrace) -> Tensor:
        """As `cost.flops_skipped` counts the prunable share, net, with the gradient of the skip rates."""
        shape, layers, compensation = trace.shape, trace.layers, trace.compensation
        saved = sum(
            ((trace.layer_rates(part) * self._savings(trace, part)).sum() for part in trace.routed_parts()),
            start=torch.zeros(()),
        )
        prunable = len(layers) * sum(part_flops(shape, part, self.context_tokens) for part in PARTS)
        return (saved - overhead_flops(shape, trace.rank, layers, compensation)) / prunable

    def _savings(self, trace: RoutingTrace, part: PartName) -> Tensor:
        """FLOPs that each layer is spared when it skips a whole part [L]."""
        rates = trace.layer_rates(part)
        savings = [
            part_savings(trace.shape, part, layer.groups(part), self.context_tokens, trace.compensation)
            for layer in trace.layers
        ]
        return torch.tensor(savings, dtype=rates.dtype, device=rates.device)

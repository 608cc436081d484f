"""What a forward pass decided, padding excluded: the one source of skip rates, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from widecli.model.cost import FlopsSkipped, flops_skipped
from widecli.model.plan import PARTS, CompensationPlan, LayerPlan, ModelShape, PartName


@dataclass(frozen=True)
class SkipRate:
    """Shares of groups skipped; None for a part that is not routed. `mean`: plain mean of the routed parts."""

    attention: float | None
    ffn: float | None
    mean: float


class RoutingTrace:
    """Sums of executed decisions over the forward passes it was handed to.

    Sums keep their gradient, so one trace of one training pass is what the budget loss reads; evaluation accumulates
    many passes under `torch.no_grad`. Layers that an override leaves dense count as skipping nothing.
    """

    def __init__(
        self,
        shape: ModelShape,
        rank: int,
        layers: Sequence[LayerPlan],
        keep_masks: bool = False,
        compensation: CompensationPlan | None = None,
    ) -> None:
        self.shape = shape
        self.rank = rank
        self.layers = tuple(layers)
        self.compensation = compensation
        self.masks: dict[tuple[int, PartName], list[Tensor]] | None = {} if keep_masks else None
        self._executed: dict[tuple[int, PartName], Tensor] = {}
        self._tokens: Tensor | int = 0

    def add_pass(self, masks: dict[tuple[int, PartName], Tensor], valid: Tensor | None) -> None:
        """Take one forward pass: masks [B, T, N] by layer and part, `valid` [B, T] bool or None (no padding)."""
        if not masks:
            return
        first = next(iter(masks.values()))
        self._tokens = self._tokens + (first.shape[0] * first.shape[1] if valid is None else valid.sum())
        for key, mask in masks.items():
            weight = mask.float() if valid is None else mask.float() * valid.unsqueeze(-1)
            executed = weight.sum((0, 1))
            previous = self._executed.get(key)
            # fp64 across passes: an evaluation adds millions of tokens, past the integers fp32 can hold
            self._executed[key] = executed if previous is None else previous.double() + executed
            if self.masks is not None:
                kept = mask.detach().bool()
                self.masks.setdefault(key, []).append(kept[valid] if valid is not None else kept.flatten(0, 1))

    def add_counts(self, executed: dict[tuple[int, PartName], Tensor], tokens: int) -> None:
        """Take what was counted elsewhere: how often each group ran [N], by layer and part, over `tokens` tokens."""
        self._tokens = self._tokens + tokens
        for key, count in executed.items():
            previous = self._executed.get(key)
            self._executed[key] = count.double() if previous is None else previous.double() + count

    def summed(self, total: Callable[[Tensor], Tensor]) -> RoutingTrace:
        """One pass of a step, of all processes together: `total` adds a vector up over them, with its gradient."""
        counts = [self._executed[key] for key in self._keys()]
        tokens = torch.as_tensor(self._tokens, dtype=counts[0].dtype, device=counts[0].device)
        return self._with_sums(total(torch.cat([*counts, tokens.reshape(1)])))

    def gathered(self, total: Callable[[Tensor], Tensor]) -> RoutingTrace:
        """What all processes saw of an evaluation, without gradient, on the CPU; one may have seen nothing."""
        counts = [
            self._executed[key].detach().double().cpu() if self._executed else torch.zeros(groups, dtype=torch.float64)
            for key, groups in self._keys().items()
        ]
        whole = self._with_sums(total(torch.cat([*counts, torch.tensor([float(self._tokens)], dtype=torch.float64)])))
        if not whole.tokens:
            raise RuntimeError("the trace has seen no forward pass")
        return whole

    def _keys(self) -> dict[tuple[int, PartName], int]:
        """Groups by layer and part: what a whole pass counts."""
        return {(i, p): layer.groups(p) for i, layer in enumerate(self.layers) for p in PARTS if layer.groups(p)}

    def _with_sums(self, flat: Tensor) -> RoutingTrace:
        keys = self._keys()
        *counts, tokens = torch.split(flat, [*keys.values(), 1])
        whole = RoutingTrace(self.shape, self.rank, self.layers, compensation=self.compensation)
        whole._executed = dict(zip(keys, counts, strict=True))
        whole._tokens = tokens.reshape(())
        return whole

    @property
    def tokens(self) -> int:
        """Tokens seen, padding excluded."""
        return int(self._tokens)

    def layer_rates(self, part: PartName) -> Tensor:
        """Skip rate of each layer [L] for one part, with gradient; 0 where the layer is not routed there."""
        if not self._executed:
            raise RuntimeError("the trace has seen no forward pass")
        any_sum = next(iter(self._executed.values()))
        rates = []
        for index, layer in enumerate(self.layers):
            groups = layer.groups(part)
            if groups == 0:
                rates.append(any_sum.new_zeros(()))
            else:
                rates.append(1 - self._executed[index, part].sum() / (self._tokens * groups))
        return torch.stack([r.to(any_sum.dtype) for r in rates])

    def group_rates(self, part: PartName) -> list[list[float]]:
        """Skip rate of each group of each layer; an empty list where the layer is not routed there."""
        return [
            (1 - self._executed[i, part].double() / self._tokens).tolist() if layer.groups(part) else []
            for i, layer in enumerate(self.layers)
        ]

    def routed_parts(self) -> tuple[PartName, ...]:
        """Parts that at least one layer routes."""
        return tuple(p for p in PARTS if any(layer.groups(p) for layer in self.layers))

    @torch.no_grad()
    def skip_rate(self) -> SkipRate:
        """Mean over layers for each part, and their plain mean (the paper's skip rate)."""
        means = {p: float(self.layer_rates(p).double().mean()) for p in self.routed_parts()}
        return SkipRate(means.get("attention"), means.get("ffn"), sum(means.values()) / len(means))

    @torch.no_grad()
    def flops_skipped(self, context_tokens: int) -> FlopsSkipped:
        """Net shares of FLOPs skipped at a context length."""
        attention, ffn = (self.layer_rates(p).double().tolist() for p in PARTS)
        return flops_skipped(
            self.shape, self.rank, self.layers, attention, ffn, context_tokens, compensation=self.compensation
        )

    @torch.no_grad()
    def summary(self, context_tokens: int) -> dict[str, Any]:
        """`skip_rate`, `flops_skipped` and per-layer skip rates as plain data for a summary."""
        rate, flops = self.skip_rate(), self.flops_skipped(context_tokens)
        return {
            "skip_rate": {"attention": rate.attention, "ffn": rate.ffn, "mean": rate.mean},
            "flops_skipped": {
                "prunable": flops.prunable,
                "prunable_gross": flops.prunable_gross,
                "total": flops.total,
                "context_tokens": flops.context_tokens,
            },
            "layers": {p: self.layer_rates(p).double().tolist() for p in self.routed_parts()},
        }

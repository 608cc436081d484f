"""How much was skipped: sums on the device, read only when somebody asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from widecli.model.plan import LayerPlan, ModelShape, PartName, RoutingPlan
from widecli.model.trace import RoutingTrace


class SkipCounter:
    """Executed groups of all decisions, side by side in one vector; a few small kernels a step, no host sync.

    `decisions` maps layer and part to (first group, groups) in the order in which a step takes the decisions; in layer
    mode both parts of a layer name the same groups.
    """

    def __init__(
        self, plan: RoutingPlan, shape: ModelShape, decisions: Mapping[tuple[int, PartName], tuple[int, int]]
    ) -> None:
        self._plan = plan
        self._shape = shape
        self._layers: Sequence[LayerPlan] = plan.layers(shape)
        self._decisions = decisions
        self._groups = max(begin + count for begin, count in decisions.values())

    def new_sums(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(executed [all groups], tokens []), int64, zero."""
        return (
            torch.zeros(self._groups, dtype=torch.int64, device=device),
            torch.zeros((), dtype=torch.int64, device=device),
        )

    def trace(self, executed: Tensor, tokens: Tensor) -> RoutingTrace:
        """The sums as a trace, which knows the rates; waits for the device."""
        trace = RoutingTrace(self._shape, self._plan.rank, self._layers, compensation=self._plan.compensation)
        counts = executed.cpu()
        trace.add_counts(
            {key: counts[begin : begin + count] for key, (begin, count) in self._decisions.items()}, int(tokens)
        )
        return trace

"""What stands in for skipped groups, as the operators take it: cast and packed once, where a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import wide_kernels as wk
from widecli.engine.weights import Norm
from widecli.model.compensation import Compensation


@dataclass(frozen=True)
class StandIn:
    """One part's compensation: `standing` [D, P] is means and B side by side.

    What the bypass reads comes with the norm (`bypass_of`), its result with the part's output projection: neither takes
    a launch of its own in a decode step.
    """

    standing: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, compensation: Compensation, dtype: torch.dtype, device: torch.device) -> StandIn:
        """Cast to `dtype`."""
        mean, up = (None if t is None else t.detach().to(device) for t in (compensation.mean, compensation.up))
        return cls(wk.stand_in_weight(mean, up, compensation.groups, dtype))

    def beside(self, reduced: Tensor | None) -> wk.StandIn:
        """For rows of which the bypass has read `reduced`."""
        return wk.StandIn(self.standing, reduced)


@torch.no_grad()
def bypass_of(compensation: Compensation, norm: Norm, device: torch.device) -> Tensor | None:
    """A [r, D] with the norm's weight in it, in the dtype of that norm; None where there is no bypass."""
    if compensation.down is None:
        return None
    down = compensation.down.detach().to(device)
    return (down * norm.weight.to(down.dtype)).to(norm.weight.dtype).contiguous()

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
    """One part's compensation: `standing` [D, P] is means and B side by side, `bypass` A with the norm's weight in it.

    What the bypass reads comes with the norm, its result with the part's output projection: neither takes a launch.
    """

    standing: Tensor
    bypass: Tensor | None

    @classmethod
    @torch.no_grad()
    def of(cls, compensation: Compensation, norm: Norm, device: torch.device) -> StandIn:
        """In the dtype of the part's norm."""
        dtype = norm.weight.dtype
        mean, up, down = (
            None if tensor is None else tensor.detach().to(device)
            for tensor in (compensation.mean, compensation.up, compensation.down)
        )
        bypass = None if down is None else (down * norm.weight.to(down.dtype)).to(dtype).contiguous()
        return cls(wk.stand_in_weight(mean, up, compensation.groups, dtype), bypass)

    def beside(self, reduced: Tensor | None) -> wk.StandIn:
        """For rows of which the bypass has read `reduced`."""
        return wk.StandIn(self.standing, reduced)

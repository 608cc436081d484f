"""The router: a rank-r linear map from the residual stream to two logits a group."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from widecli.model.plan import Tap

NORM_EPS = 1e-6


class Router(nn.Module):
    """`logits = up(down(x))`, D -> r -> 2 N, no nonlinearity between; class 0 = execute, class 1 = skip.

    Weights and arithmetic are fp32 whatever the backbone's dtype: bf16 would round small updates away and make
    ties common. Source: WIDE, section on the router.
    """

    def __init__(self, hidden_size: int, groups: int, rank: int, tap: Tap = "residual") -> None:
        super().__init__()
        self.groups = groups
        self.tap = tap
        self.down = nn.Linear(hidden_size, rank, dtype=torch.float32)
        self.up = nn.Linear(rank, 2 * groups, dtype=torch.float32)

    def reset(self, generator: torch.Generator) -> None:
        """Random start: Kaiming-uniform weights (gain 1), zero biases, drawn on the CPU from `generator`."""
        for linear in (self.down, self.up):
            bound = (3.0 / linear.in_features) ** 0.5
            values = torch.rand(linear.weight.shape, generator=generator) * (2 * bound) - bound
            with torch.no_grad():
                linear.weight.copy_(values)
                linear.bias.zero_()

    def features(self, x: Tensor) -> Tensor:
        """What the router reads: fp32 `x`, RMS-normalised (without a weight) when the tap says so."""
        x = x.float()
        if self.tap == "normalised":
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS)
        return x

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., D] to logits [..., N, 2] in fp32, outside any autocast."""
        with torch.autocast(x.device.type, enabled=False):
            logits: Tensor = self.up(self.down(self.features(x)))
            return logits.view(*logits.shape[:-1], self.groups, 2)

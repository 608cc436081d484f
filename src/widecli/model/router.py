"""The router: a rank-r linear map from the residual stream to two logits a group."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from widecli.model.plan import Tap

NORM_EPS = 1e-6


def plain_state(routers: nn.Module) -> dict[str, Tensor]:
    """The state of all routers below `routers` as a checkpoint holds it: on bare features, on the CPU."""
    state = {key: value.detach() for key, value in routers.state_dict().items()}
    for name, module in routers.named_modules():
        if isinstance(module, Router):
            state[f"{name}.down.weight"] = module.plain_down_weight()
    return {key: value.cpu().contiguous() for key, value in state.items()}


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
        self.register_buffer("feature_scale", torch.ones(hidden_size), persistent=False)
        self.feature_scale: Tensor
        self.is_scaled = False

    @torch.no_grad()
    def rescale(self, scale: Tensor | None) -> None:
        """Train `down` on features divided by `scale` [D] (None = as they are); the function stays the same.

        The residual's channels differ a hundredfold and more, and AdamW moves every weight by about the learning rate.
        On SmolLM2 scaling did not pay: bare features train as well at a third of the learning rate.
        Scales are rounded to powers of two: rescaling is then exact, and a checkpoint holds plain weights.
        """
        new = torch.ones_like(self.feature_scale) if scale is None else torch.exp2(torch.log2(scale).round())
        self.down.weight.mul_(new / self.feature_scale)
        self.feature_scale.copy_(new)
        self.is_scaled = scale is not None

    def plain_down_weight(self) -> Tensor:
        """`down.weight` as it acts on bare features, exactly."""
        return self.down.weight.detach() / self.feature_scale

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
            features = self.features(x)
            if self.is_scaled:
                features = features / self.feature_scale
            logits: Tensor = self.up(self.down(features))
            return logits.view(*logits.shape[:-1], self.groups, 2)

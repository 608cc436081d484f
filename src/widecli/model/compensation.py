"""What a skipped group leaves behind: its mean, and a low-rank stand-in for the rest.

A part (attention or FFN) adds `W (m * h)` to the residual stream, m [N] its mask group by group. Skipped groups add
nothing, though what they add on average is known, and much of the rest can be told from the part's own input n. So a
compensated part adds

    W (m * h)  +  (1 - m) M  +  u B A n

M [N, D] is one vector a group, A [r, D] and B [D, r] a bypass of rank r, n the input behind the part's norm, and
u = mean(1 - m) the share that the token skips: a token that skips nothing gets the dense result. At Llama-3.1-8B's
shapes with G = 128 and r = 32 both together cost 0.4 % of the FFN's FLOPs and weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from widecli.model.plan import PARTS, CompensationPlan, ModelShape, PartName, RoutingPlan


class Compensation(nn.Module):
    """One part's compensation. `mean` [N, D], `down` [r, D] (A) and `up` [D, r] (B), fp32; None where it is off.

    Fresh from `reset` it adds nothing: means and B are zero. Weights are fp32 and computed with in the dtype of what
    they are added to.
    """

    def __init__(self, hidden_size: int, groups: int, plan: CompensationPlan) -> None:
        super().__init__()
        self.groups = groups
        self.rank = plan.rank
        self.mean = nn.Parameter(torch.zeros(groups, hidden_size)) if plan.mean else None
        self.down = nn.Parameter(torch.zeros(plan.rank, hidden_size)) if plan.rank else None
        self.up = nn.Parameter(torch.zeros(hidden_size, plan.rank)) if plan.rank else None

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """A normal with variance 1 / D, drawn on the CPU from `generator`; everything else zero."""
        for parameter in self.parameters():
            parameter.zero_()
        if self.down is not None:
            drawn = torch.randn(self.down.shape, generator=generator)
            self.down.copy_(drawn / self.down.shape[1] ** 0.5)

    def reduced(self, normalised: Tensor) -> Tensor | None:
        """A n: the part's normed input [..., D] -> [..., r]; None without a bypass."""
        return None if self.down is None else F.linear(normalised, self.down.to(normalised.dtype))

    def forward(self, mask: Tensor, reduced: Tensor | None, dtype: torch.dtype) -> Tensor:
        """(1 - m) M + u B A n in `dtype`: mask [..., N] (bool, or 0 and 1), reduced A n [..., r] -> [..., D]."""
        skipped = (~mask).to(dtype) if mask.dtype == torch.bool else (1 - mask).to(dtype)
        total: Tensor | None = None
        if self.mean is not None:
            total = skipped @ self.mean.to(dtype)
        if self.up is not None:
            assert reduced is not None
            share = skipped.mean(-1, keepdim=True)
            bypass = F.linear(reduced.to(dtype) * share, self.up.to(dtype))
            total = bypass if total is None else total + bypass
        assert total is not None
        return total


def build_compensations(plan: RoutingPlan, shape: ModelShape, seed: int = 0) -> nn.ModuleDict:
    """A plan's compensations with their random start, keyed `"<layer>"` and then by part; empty where it has none.

    In layer mode, where both parts share a decision, each part has its own.
    """
    made = nn.ModuleDict()
    if plan.compensation is None:
        return made
    generator = torch.Generator().manual_seed(seed)
    for index, layer in enumerate(plan.layers(shape)):
        parts = nn.ModuleDict()
        for part in PARTS:
            if layer.groups(part):
                parts[part] = Compensation(shape.hidden_size, layer.groups(part), plan.compensation)
                parts[part].reset(generator)  # type: ignore[operator]
        if len(parts):
            made[str(index)] = parts
    return made


def each_compensation(compensations: nn.ModuleDict) -> Mapping[tuple[int, PartName], Compensation]:
    """The compensations by layer and part."""
    found: dict[tuple[int, PartName], Compensation] = {}
    for index, parts in compensations.items():
        assert isinstance(parts, nn.ModuleDict)
        for part in PARTS:
            if part in parts:
                compensation = parts[part]
                assert isinstance(compensation, Compensation)
                found[int(index), part] = compensation
    return found

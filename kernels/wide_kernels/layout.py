"""From a mask to what the operators walk: for each group, the rows that execute it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from wide_kernels.checks import mask_sizes, same_device, same_size
from wide_kernels.dispatch import Problem, choose
from wide_kernels.errors import UnsupportedError


@dataclass(frozen=True, eq=False)  # tensors have no one truth value: a layout equals itself
class RouteLayout:
    """A decision and, for each group, its rows; made by `route_layout`, reused by every operator that shares it.

    `mask` is bool [T, N_G]; `index` int32 [N_G, T] is, for each group, a permutation of the rows: first the `count[g]`
    rows that execute it, ascending, then the ones that skip it, ascending. So a kernel writes every output exactly
    once: results for the first part, zeros for the rest. `count` is int32 [N_G].
    """

    mask: Tensor
    index: Tensor
    count: Tensor

    @property
    def rows(self) -> int:
        """T, the number of tokens of all sequences together."""
        return self.mask.shape[0]

    @property
    def groups(self) -> int:
        """N_G."""
        return self.mask.shape[1]


def route_layout(mask: Tensor, *, backend: str = "auto") -> RouteLayout:
    """Sort a decision once for all operators: mask bool [T, N_G] -> RouteLayout; no host sync, fixed shapes."""
    chosen = choose(route_layout_problem(mask), backend)
    mask = mask.contiguous()
    index, count = torch.ops.wide_kernels.route_layout(mask, chosen)
    return RouteLayout(mask, index, count)


def route_layout_problem(mask: Tensor) -> Problem:
    """The facts that decide the backend of `route_layout`; raises UnsupportedError for what is no mask."""
    mask_sizes("route_layout", mask)
    return Problem("route_layout", mask.device, torch.float32)


def decision(op: str, first: Tensor, layout: RouteLayout | None, mask: Tensor | None, always: int = 0) -> Tensor:
    """The mask of the call, [rows of `first`, N_G]: the layout's, or the one given instead of a layout.

    `always` more groups, which every row executes, may follow those of a mask; it may then be empty.
    """
    if (layout is None) == (mask is None):
        raise UnsupportedError(
            f"{op}: give either a layout or mask=, {'not both' if mask is not None else 'one of them'}"
        )
    if layout is not None and not isinstance(layout, RouteLayout):
        raise UnsupportedError(f"{op}: the layout must be a RouteLayout, got {type(layout).__name__}; see route_layout")
    if not isinstance(always, int) or always < 0:
        raise UnsupportedError(f"{op}: always is how many groups come behind those of mask=, got {always!r}")
    if always and layout is not None:
        raise UnsupportedError(f"{op}: always={always} goes with mask=, not with a layout, which has all groups")
    chosen = layout.mask if layout is not None else mask
    assert chosen is not None  # exactly one of the two is there
    rows, _ = mask_sizes(op, chosen, least=0 if always else 1)
    same_device(op, first, "the mask", chosen)
    same_size(op, "the mask's number of rows", rows, first.shape[0])
    return chosen


def extended(mask: Tensor, always: int) -> Tensor:
    """The mask with the groups behind it that every row executes."""
    return F.pad(mask, (0, always), value=True) if always else mask


def sorted_rows(layout: RouteLayout | None) -> tuple[Tensor | None, Tensor | None]:
    """(index, count) of a layout, for the operators' registered forms."""
    return (None, None) if layout is None else (layout.index, layout.count)


def compaction_reference(mask: Tensor) -> tuple[Tensor, Tensor]:
    """(index, count) of a mask by a stable sort of each column."""
    order = torch.sort((~mask).t().to(torch.uint8), dim=1, stable=True).indices
    return order.to(torch.int32).contiguous(), mask.sum(0, dtype=torch.int32)


@torch.library.custom_op(
    "wide_kernels::route_layout", mutates_args=(), schema="(Tensor mask, str backend) -> (Tensor, Tensor)"
)
def _route_layout(mask: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    if backend == "triton":
        from wide_kernels.compaction import compact

        return compact(mask)
    return compaction_reference(mask)


@_route_layout.register_fake
def _(mask: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    rows, groups = mask.shape
    return mask.new_empty(groups, rows, dtype=torch.int32), mask.new_empty(groups, dtype=torch.int32)

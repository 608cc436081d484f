"""What a dense model would call instead, and the gather-scatter form that needs no kernel of its own."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from wide_kernels.layout import RouteLayout


@triton.jit
def silu_mul_kernel(gate, up, size, BLOCK: tl.constexpr):
    """gate = silu(gate) * up, in place."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    known = entry < size
    g = tl.load(gate + entry, mask=known, other=0.0).to(tl.float32)
    u = tl.load(up + entry, mask=known, other=0.0).to(tl.float32)
    tl.store(gate + entry, (g * tl.sigmoid(g) * u).to(gate.dtype.element_ty), mask=known)


def fused_gated_mlp_up(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
    """Two library products and one fused activation kernel: the best that a dense model does."""
    gate, up = F.linear(x, w_gate), F.linear(x, w_up)
    silu_mul_kernel[(triton.cdiv(gate.numel(), 2048),)](gate, up, gate.numel(), 2048)
    return gate


def gather_scatter_mn(x: Tensor, weight: Tensor, layout: RouteLayout, counts: list[int]) -> Tensor:
    """A library product a group, of gathered rows; `counts` are known on the host."""
    groups = layout.groups
    width = weight.shape[0] // groups
    y = x.new_zeros(x.shape[0], weight.shape[0])
    for g in range(groups):
        rows = layout.index[g, : counts[g]].long()
        y[:, g * width : (g + 1) * width].index_copy_(0, rows, x[rows] @ weight[g * width : (g + 1) * width].t())
    return y


def gather_scatter_k(h: Tensor, weight: Tensor, layout: RouteLayout, counts: list[int]) -> Tensor:
    """A library product a group, of gathered rows, added to the output rows."""
    groups = layout.groups
    width = weight.shape[1] // groups
    y = h.new_zeros(h.shape[0], weight.shape[0])
    for g in range(groups):
        rows = layout.index[g, : counts[g]].long()
        part = slice(g * width, (g + 1) * width)
        y.index_add_(0, rows, h[rows, part] @ weight[:, part].t())
    return y


def executed_pairs(layout: RouteLayout, counts: list[int]) -> tuple[Tensor, Tensor]:
    """(row, group) of every executed pair, group by group."""
    rows = torch.cat([layout.index[g, :count] for g, count in enumerate(counts)]).long()
    groups = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return rows, groups.to(rows.device)


def gather_all_mn(x: Tensor, weight: Tensor, pairs: tuple[Tensor, Tensor], counts: list[int]) -> Tensor:
    """Gather the inputs of all groups at once, a library product a group, scatter: the form without any kernel."""
    width = weight.shape[0] // len(counts)
    pieces = zip(x[pairs[0]].split(counts), weight.split(width), strict=True)
    results = torch.cat([piece @ part.t() for piece, part in pieces])
    y = x.new_zeros(x.shape[0], len(counts), width)
    y[pairs] = results
    return y.view(x.shape[0], -1)


def gather_all_k(h: Tensor, weight: Tensor, pairs: tuple[Tensor, Tensor], counts: list[int]) -> Tensor:
    """Gather the inputs of all groups at once, a library product a group, add all results to the output rows."""
    width = weight.shape[1] // len(counts)
    gathered = h.view(h.shape[0], len(counts), width)[pairs]
    pieces = zip(gathered.split(counts), weight.split(width, dim=1), strict=True)
    results = torch.cat([piece @ part.t() for piece, part in pieces])
    return h.new_zeros(h.shape[0], weight.shape[0]).index_add_(0, pairs[0], results)

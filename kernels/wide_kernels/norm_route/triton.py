"""Triton: one read of the residual stream gives its norm, its normalised values and the router's decision."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wide_kernels.dispatch import on_device_of
from wide_kernels.tuning.tiles import padded_rows

FEW_ROWS = 512  # up to here the rows alone make too few programs: cut D as well, at the price of a second launch
BLOCK_D = 128
BLOCK_G = 64


@triton.jit
def decide(hidden, b1, w2, b2, decided, row, inside, first, N_G, R: tl.constexpr, RP: tl.constexpr, BG: tl.constexpr):
    """Store z >= 0 for BG groups, z = execute logit - skip logit, from hidden = w1 x [BM, RP] without its bias."""
    rank = tl.arange(0, RP)
    hidden += tl.load(b1 + rank, mask=rank < R, other=0.0)[None, :]
    group = first + tl.arange(0, BG)
    known = group < N_G
    weights = w2 + (2 * group)[None, :] * R + rank[:, None]
    square = (rank < R)[:, None] & known[None, :]
    difference = tl.load(weights, mask=square, other=0.0) - tl.load(weights + R, mask=square, other=0.0)
    bias = tl.load(b2 + 2 * group, mask=known, other=0.0) - tl.load(b2 + 2 * group + 1, mask=known, other=0.0)
    z = tl.dot(hidden, difference, input_precision="ieee") + bias[None, :]
    target = decided + row[:, None].to(tl.int64) * N_G + group[None, :]
    tl.store(target, (z >= 0).to(tl.uint8), mask=inside[:, None] & known[None, :])


@triton.jit
def normalised(x, weight, scale, dtype: tl.constexpr):
    """Llama's order of roundings: scaled and rounded, then times the weight and rounded."""
    return ((x.to(tl.float32) * scale[:, None]).to(dtype).to(tl.float32) * weight.to(tl.float32)[None, :]).to(dtype)


@triton.jit(do_not_specialize=["rows"])
def rows_kernel(
    x,
    norm_weight,
    w1,
    b1,
    w2,
    b2,
    out,
    decided,
    rows,
    eps,
    D: tl.constexpr,
    R: tl.constexpr,
    N_G: tl.constexpr,
    PRECISION: tl.constexpr,
    RP: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BG: tl.constexpr,
):
    """BM whole rows; the second walk over them finds them in L2."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = row < rows
    rank = tl.arange(0, RP)
    offset = row[:, None].to(tl.int64) * D
    hidden = tl.zeros((BM, RP), tl.float32)
    squares = tl.zeros((BM,), tl.float32)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        tile = tl.load(x + offset + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        down = tl.load(w1 + rank[None, :] * D + d[:, None], mask=(rank < R)[None, :] & (d < D)[:, None], other=0.0)
        squares += tl.sum(tile * tile, 1)
        hidden = tl.dot(tile, down, hidden, input_precision=PRECISION)
    scale = tl.rsqrt(squares / D + eps)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        known = inside[:, None] & (d < D)[None, :]
        tile = tl.load(x + offset + d[None, :], mask=known, other=0.0)
        weight = tl.load(norm_weight + d, mask=d < D, other=0.0)
        tl.store(out + offset + d[None, :], normalised(tile, weight, scale, out.dtype.element_ty), mask=known)
    for first in range(0, N_G, BG):
        decide(hidden, b1, w2, b2, decided, row, inside, first, N_G, R, RP, BG)


@triton.jit(do_not_specialize=["rows"])
def partial_kernel(
    x,
    w1,
    squares,
    hidden,
    rows,
    D: tl.constexpr,
    R: tl.constexpr,
    PRECISION: tl.constexpr,
    RP: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    """One chunk of D: squares[chunk, row] and hidden[chunk, row, RP]."""
    chunk = tl.program_id(0)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    inside = row < rows
    rank = tl.arange(0, RP)
    d = chunk * BD + tl.arange(0, BD)
    known = inside[:, None] & (d < D)[None, :]
    tile = tl.load(x + row[:, None].to(tl.int64) * D + d[None, :], mask=known, other=0.0).to(tl.float32)
    down = tl.load(w1 + rank[None, :] * D + d[:, None], mask=(rank < R)[None, :] & (d < D)[:, None], other=0.0)
    part = tl.dot(tile, down, input_precision=PRECISION)
    tl.store(squares + chunk * rows + row, tl.sum(tile * tile, 1), mask=inside)
    tl.store(hidden + (chunk * rows + row)[:, None] * RP + rank[None, :], part, mask=inside[:, None])


@triton.jit(do_not_specialize=["rows"])
def finish_kernel(
    x,
    norm_weight,
    b1,
    w2,
    b2,
    squares,
    hidden,
    out,
    decided,
    rows,
    eps,
    D: tl.constexpr,
    R: tl.constexpr,
    N_G: tl.constexpr,
    RP: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BG: tl.constexpr,
):
    """One chunk of D of the normalised rows, or one chunk of groups of the decision."""
    chunks: tl.constexpr = (D + BD - 1) // BD
    chunk = tl.program_id(0)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    inside = row < rows
    if chunk < chunks:
        total = tl.zeros((BM,), tl.float32)
        for c in range(0, chunks):
            total += tl.load(squares + c * rows + row, mask=inside, other=0.0)
        scale = tl.rsqrt(total / D + eps)
        d = chunk * BD + tl.arange(0, BD)
        known = inside[:, None] & (d < D)[None, :]
        offset = row[:, None].to(tl.int64) * D + d[None, :]
        tile = tl.load(x + offset, mask=known, other=0.0)
        weight = tl.load(norm_weight + d, mask=d < D, other=0.0)
        tl.store(out + offset, normalised(tile, weight, scale, out.dtype.element_ty), mask=known)
    else:
        rank = tl.arange(0, RP)
        whole = tl.zeros((BM, RP), tl.float32)
        for c in range(0, chunks):
            part = hidden + (c * rows + row)[:, None] * RP + rank[None, :]
            whole += tl.load(part, mask=inside[:, None], other=0.0)
        decide(whole, b1, w2, b2, decided, row, inside, (chunk - chunks) * BG, N_G, R, RP, BG)


def norm_and_decide(
    x: Tensor, norm_weight: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`norm_route` for a contiguous x [T, D]."""
    rows, size = x.shape
    rank, groups = w1.shape[0], w2.shape[0] // 2
    out = torch.empty_like(x)
    decided = torch.empty(rows, groups, dtype=torch.uint8, device=x.device)
    if rows == 0:
        return out, decided.view(torch.bool)
    padded = padded_rows(rank)
    # Three tf32 products are as good as fp32 for 16-bit x, which one tf32 holds exactly, and run on tensor cores.
    precision = "ieee" if x.dtype is torch.float32 else "tf32x3"
    with on_device_of(x):
        if rows > FEW_ROWS:
            block = 32
            rows_kernel[(triton.cdiv(rows, block),)](
                x, norm_weight, w1, b1, w2, b2, out, decided, rows, eps,
                size, rank, groups, precision, padded, block, 64, BLOCK_G, num_warps=4,
            )  # fmt: skip
        else:
            chunks, tiles = triton.cdiv(size, BLOCK_D), triton.cdiv(rows, 16)
            squares = torch.empty(chunks, rows, dtype=torch.float32, device=x.device)
            hidden = torch.empty(chunks, rows, padded, dtype=torch.float32, device=x.device)
            partial_kernel[(chunks, tiles)](x, w1, squares, hidden, rows, size, rank, precision, padded, 16, BLOCK_D)
            finish_kernel[(chunks + triton.cdiv(groups, BLOCK_G), tiles)](
                x, norm_weight, b1, w2, b2, squares, hidden, out, decided, rows, eps,
                size, rank, groups, padded, 16, BLOCK_D, BLOCK_G,
            )  # fmt: skip
    return out, decided.view(torch.bool)

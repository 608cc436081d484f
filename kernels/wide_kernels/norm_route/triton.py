"""Triton: one read of the residual stream gives its norm, its normalised values and the router's decision.

A program owns a tile of rows times a chunk of D. It stores the tile's share of the sum of squares and of w1 x, waits
for the other chunks of its rows, adds up the shares (in a fixed order, so results repeat bit by bit), normalises the
tile, and decides for its part of the (rows, groups). Tall tiles read w1 seldom; short chunks keep so little in flight
that the second walk over the tile finds it in L2. Where programs cannot wait for each other (Triton's interpreter runs
one after the other; a GPU with very few multiprocessors), the two halves are two launches.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wide_kernels.counters import counters
from wide_kernels.dispatch import multiprocessors, on_device_of
from wide_kernels.meeting import meet
from wide_kernels.norm_route.configs import chunk_config
from wide_kernels.norm_route.reference import TAP_EPS
from wide_kernels.tuning.tiles import padded_rows


@triton.jit
def tf32_parts(w):
    """w as the sum of two numbers that tensor cores read in tf32: the first exactly, the second to 2^-23 of w."""
    bits = w.to(tl.uint32, bitcast=True)
    high = ((bits + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return high, w - high


@triton.jit
def differences(w2, b2, first, N_G, R: tl.constexpr, RP: tl.constexpr, BG: tl.constexpr):
    """Weights [RP, BG] and bias [BG] of z = execute logit - skip logit, for BG groups."""
    rank = tl.arange(0, RP)
    group = first + tl.arange(0, BG)
    weights = w2 + (2 * group)[None, :] * R + rank[:, None]
    known = group < N_G
    square = (rank < R)[:, None] & known[None, :]
    weight = tl.load(weights, mask=square, other=0.0) - tl.load(weights + R, mask=square, other=0.0)
    bias = tl.load(b2 + 2 * group, mask=known, other=0.0) - tl.load(b2 + 2 * group + 1, mask=known, other=0.0)
    return weight, bias


@triton.jit
def sum_of_chunks(partial, row, inside, rows, CHUNKS: tl.constexpr):
    """The sum over all chunks of partial[chunk, row]."""
    total = tl.zeros(row.shape, tl.float32)
    for c in range(0, CHUNKS):
        total += tl.load(partial + c * rows + row, mask=inside, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def decide(
    hidden,
    squares,
    b1,
    weight,
    bias,
    decided,
    row,
    first,
    rows,
    N_G,
    D: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    BG: tl.constexpr,
    CHUNKS: tl.constexpr,
    NORMALISED: tl.constexpr,
    TAP_EPS: tl.constexpr,
):
    """Store z >= 0 for some rows and BG groups."""
    rank = tl.arange(0, RP)
    inside = row < rows
    whole = tl.zeros((row.shape[0], RP), tl.float32)
    for c in range(0, CHUNKS):
        part = hidden + (c * rows + row)[:, None] * RP + rank[None, :]
        whole += tl.load(part, mask=inside[:, None], other=0.0, cache_modifier=".cg")
    if NORMALISED:  # w1 (s x) = s (w1 x)
        whole *= tl.rsqrt(sum_of_chunks(squares, row, inside, rows, CHUNKS) / D + TAP_EPS)[:, None]
    whole += tl.load(b1 + rank, mask=rank < R, other=0.0)[None, :]
    z = tl.dot(whole, weight, input_precision="ieee") + bias[None, :]
    group = first + tl.arange(0, BG)
    target = decided + row[:, None] * N_G + group[None, :]
    tl.store(target, (z >= 0).to(tl.uint8), mask=inside[:, None] & (group < N_G)[None, :])


@triton.jit(do_not_specialize=["rows"])
def chunk_kernel(
    x,
    norm_weight,
    w1,
    b1,
    w2,
    b2,
    squares,
    hidden,
    out,
    decided,
    counter,
    rows,
    eps,
    D: tl.constexpr,
    R: tl.constexpr,
    N_G: tl.constexpr,
    NORMALISED: tl.constexpr,
    TAP_EPS: tl.constexpr,
    PARTS: tl.constexpr,
    HALVES: tl.constexpr,
    RP: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    BG: tl.constexpr,
):
    """One chunk of D of BM rows. HALVES: "first", "second", or "both" with a wait between them."""
    CHUNKS: tl.constexpr = (D + BD - 1) // BD
    chunk = tl.program_id(0)
    first_row = tl.program_id(1).to(tl.int64) * BM
    row = first_row + tl.arange(0, BM)
    inside = row < rows
    k = tl.arange(0, BK)
    offset = row[:, None] * D + (chunk * BD + k)[None, :]
    if HALVES != "second":
        rank = tl.arange(0, RP)
        acc = tl.zeros((BM, RP), tl.float32)
        square = tl.zeros((BM, BK), tl.float32)
        for i in range(0, BD // BK):
            d = chunk * BD + i * BK + k
            known = inside[:, None] & (d < D)[None, :]
            tile = tl.load(x + offset + i * BK, mask=known, other=0.0).to(tl.float32)
            known = (rank < R)[None, :] & (d < D)[:, None]
            down = tl.load(w1 + rank[None, :] * D + d[:, None], mask=known, other=0.0)
            square += tile * tile
            if PARTS == 2:
                high, low = tf32_parts(down)
                acc = tl.dot(tile, high, acc, input_precision="tf32")
                acc = tl.dot(tile, low, acc, input_precision="tf32")
            else:
                acc = tl.dot(tile, down, acc, input_precision="ieee")
        tl.store(squares + chunk * rows + row, tl.sum(square, 1), mask=inside)
        tl.store(hidden + (chunk * rows + row)[:, None] * RP + rank[None, :], acc, mask=inside[:, None])
    # The decision is cut into units of 16 rows and BG groups.
    GROUP_BLOCKS: tl.constexpr = (N_G + BG - 1) // BG
    UNITS: tl.constexpr = (BM // 16) * GROUP_BLOCKS
    weight, bias = differences(w2, b2, (chunk % GROUP_BLOCKS) * BG, N_G, R, RP, BG)  # ahead of the wait
    if HALVES == "both":
        meet(counter + tl.program_id(1), chunk, CHUNKS)
    if HALVES != "first":
        scale = tl.rsqrt(sum_of_chunks(squares, row, inside, rows, CHUNKS) / D + eps)[:, None]
        dtype: tl.constexpr = out.dtype.element_ty
        for i in range(0, BD // BK):
            d = chunk * BD + i * BK + k
            gain = tl.load(norm_weight + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
            # Llama's order of roundings: scaled and rounded, then times the weight and rounded.
            known = inside[:, None] & (d < D)[None, :]
            tile = tl.load(x + offset + i * BK, mask=known, other=0.0)
            value = ((tile.to(tl.float32) * scale).to(dtype).to(tl.float32) * gain).to(dtype)
            tl.store(out + offset + i * BK, value, mask=known)
        for unit in range(chunk, UNITS, CHUNKS):
            first = (unit % GROUP_BLOCKS) * BG
            if unit >= CHUNKS:
                weight, bias = differences(w2, b2, first, N_G, R, RP, BG)
            some = first_row + (unit // GROUP_BLOCKS) * 16 + tl.arange(0, 16)
            decide(
                hidden, squares, b1, weight, bias, decided, some, first, rows,
                N_G, D, R, RP, BG, CHUNKS, NORMALISED, TAP_EPS,
            )  # fmt: skip


def norm_and_decide(
    x: Tensor, norm_weight: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, eps: float, tap: str
) -> tuple[Tensor, Tensor]:
    """`norm_route` for a contiguous x [T, D]."""
    rows, size = x.shape
    rank, groups = w1.shape[0], w2.shape[0] // 2
    out = torch.empty_like(x)
    decided = torch.empty(rows, groups, dtype=torch.uint8, device=x.device)
    if rows == 0:
        return out, decided.view(torch.bool)
    padded = padded_rows(rank)
    # A 16-bit x is exact in tf32, and w1 in two parts of it: two products on tensor cores are as good as fp32.
    parts = 1 if x.dtype is torch.float32 else 2
    with on_device_of(x):
        config = chunk_config(rows, size, x.dtype)
        chunks, tiles = triton.cdiv(size, config["BD"]), triton.cdiv(rows, config["BM"])
        squares = torch.empty(chunks, rows, dtype=torch.float32, device=x.device)
        hidden = torch.empty(chunks, rows, padded, dtype=torch.float32, device=x.device)
        together = x.is_cuda and 1 < chunks <= multiprocessors(x.device)
        counter = counters("meeting", x.device, tiles) if together else squares  # not followed then
        for halves in ("both",) if together else ("first", "second"):
            chunk_kernel[(chunks, tiles)](
                x, norm_weight, w1, b1, w2, b2, squares, hidden, out, decided, counter, rows, eps,
                size, rank, groups, tap == "normalised", TAP_EPS, parts, halves, padded, **config,
            )  # fmt: skip
    return out, decided.view(torch.bool)

"""Triton: the down projection of tiles of patterns, each output element summed by one program and stored once.

The K loop walks the tile's list. A step takes one group or a part of it, or several narrow ones, whose channels are
gathered from `h` and from the weights alike. Rows that skip a group add zeros made in registers: skipped values of `h`
are never read. Sums are in fp32 in a fixed order.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wide_kernels.dispatch import on_device_of
from wide_kernels.gemm_k.configs import pattern_config
from wide_kernels.gemm_mn.triton import banded_tile
from wide_kernels.pattern_layout import HALF_ROWS, TILE_ROWS, PatternLayout


@triton.jit
def running_rows(halves, half, told_apart, bits):
    """Whether each row runs a group of which `halves` tells the halves that do; rows `told_apart` ask their pattern."""
    live = ((halves >> half) & 1) != 0
    return live & (tl.load(bits, mask=live & told_apart, other=1) != 0)


@triton.jit
def listed_product(
    h_rows,
    w_rows,
    listed_groups,
    groups,
    half,
    told_apart,
    bits,
    G: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Rows of `h` times rows of the weights, over all listed groups; what a step reads is looked up one step ahead."""
    acc = tl.zeros((BM, BN), tl.float32)
    if G % BK == 0:
        STEPS: tl.constexpr = G // BK
        depth = tl.arange(0, BK)
        entry = tl.load(listed_groups)
        for step in range(0, groups * STEPS):
            group = entry >> 2
            live = running_rows(entry, half, told_apart, bits + group)
            k = group * G + (step % STEPS) * BK + depth
            entry = tl.load(listed_groups + tl.minimum((step + 1) // STEPS, groups - 1))
            a = tl.load(h_rows[:, None] + k[None, :], mask=live[:, None], other=0.0)
            b = tl.load(w_rows[None, :] + k[:, None])
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    else:
        UNITS: tl.constexpr = BK // 16  # of 16 channels, each in one group
        PER_GROUP: tl.constexpr = G // 16
        units = groups * PER_GROUP
        unit = tl.arange(0, UNITS)
        entry = tl.load(listed_groups + tl.minimum(unit, units - 1) // PER_GROUP)
        for step in range(0, tl.cdiv(units, UNITS)):
            # Past the end the last unit is read again, for no row: weights that nobody here runs stay unread.
            listed = step * UNITS + unit
            group = entry >> 2
            halves = tl.where(listed < units, entry & 3, 0)
            live = running_rows(halves[None, :], half[:, None], told_apart[:, None], bits[:, None] + group[None, :])
            start = group * G + (tl.minimum(listed, units - 1) % PER_GROUP) * 16
            entry = tl.load(listed_groups + tl.minimum(listed + UNITS, units - 1) // PER_GROUP)
            k = tl.reshape(start[:, None] + tl.arange(0, 16)[None, :], (BK,))
            k = tl.max_contiguous(tl.multiple_of(k, 16), 16)
            live = tl.reshape(tl.broadcast_to(live[:, :, None], (BM, UNITS, 16)), (BM, BK))
            live = tl.max_constancy(live, [1, 16])
            a = tl.load(h_rows[:, None] + k[None, :], mask=live, other=0.0)
            b = tl.load(w_rows[None, :] + k[:, None])
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["rows"])
def pattern_kernel(
    h,
    weight,
    residual,
    out,
    ids,
    patterns,
    order,
    lists,
    listed,
    mixed,
    rows,
    stride_h,
    stride_residual,
    N: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    HALF: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
):
    """One tile of sorted rows times BN columns, stored where the rows stand."""
    N_G: tl.constexpr = K // G
    # Row tiles next to each other often have the same patterns.
    tile, column_tile = banded_tile(tl.cdiv(rows, BM), (N + BN - 1) // BN, BAND)
    place = tile * BM + tl.arange(0, BM)
    inside = place < rows
    row = tl.load(order + place, mask=inside, other=0).to(tl.int64)
    column = column_tile * BN + tl.arange(0, BN)
    known = tl.minimum(column, N - 1).to(tl.int64)  # past the end: read the last column, store nothing
    half = (place % BM) // HALF
    told_apart = ((tl.load(mixed + tile) >> half) & 1) != 0
    bits = patterns + tl.load(ids + row).to(tl.int64) * N_G
    listed_groups = lists + tile.to(tl.int64) * N_G
    h_rows, w_rows = h + row * stride_h, weight + known * K
    groups = tl.load(listed + tile)
    acc = tl.zeros((BM, BN), tl.float32)
    if groups > 0:
        acc = listed_product(
            h_rows, w_rows, listed_groups, groups, half, told_apart, bits, G, PRECISION, BM, BN, BK
        )  # fmt: skip
    stored = inside[:, None] & (column < N)[None, :]
    if HAS_RESIDUAL:
        source = residual + row[:, None] * stride_residual + column[None, :]
        acc += tl.load(source, mask=stored, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * N + column[None, :], acc.to(out.dtype.element_ty), mask=stored)


def project(h: Tensor, weight: Tensor, layout: PatternLayout, residual: Tensor | None) -> Tensor:
    """`gemm_k`: h [T, K], weight [N, K], residual [T, N] -> [T, N]."""
    (rows, depth), columns = h.shape, weight.shape[0]
    out = torch.empty(rows, columns, dtype=h.dtype, device=h.device)
    if rows == 0:
        return out
    h = h if h.stride(1) == 1 else h.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    added = out if residual is None else residual  # a pointer that the kernel does not follow
    width = depth // layout.groups
    config = pattern_config(rows, columns, width, h.dtype)
    with on_device_of(h):
        pattern_kernel[(triton.cdiv(rows, TILE_ROWS) * triton.cdiv(columns, config["BN"]),)](
            h, weight, added, out,
            layout.ids, layout.patterns.view(torch.uint8), layout.order, layout.lists, layout.listed, layout.mixed,
            rows, h.stride(0), added.stride(0), columns, depth, width, residual is not None,
            "ieee" if h.dtype is torch.float32 else "tf32", TILE_ROWS, HALF_ROWS, **config,
        )  # fmt: skip
    return out

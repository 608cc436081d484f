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
from wide_kernels.pattern_layout import HALF_ROWS, TILE_ROWS, PatternLayout


@triton.jit
def listed_product(
    acc,
    h,
    weight,
    list_start,
    groups,
    place,
    row,
    column,
    bits,
    stride_h,
    K: tl.constexpr,
    G: tl.constexpr,
    MIXED: tl.constexpr,
    PRECISION: tl.constexpr,
    HALF: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """acc + the tile's rows of `h` times the weights, over all listed groups.

    Where the tile is MIXED, `bits` points each row at its pattern; elsewhere the list says what each half runs.
    """
    half = (place % BM) // HALF
    depth = tl.arange(0, BK)
    last = groups * G - 1
    h_row = h + row[:, None] * stride_h
    w_row = weight + column[None, :] * K
    # What a step reads is looked up one step ahead: its loads wait for nothing.
    if G % BK == 0:
        entry = tl.load(list_start)
        for step in range(0, groups * (G // BK)):
            group = entry >> 2
            k = group * G + (step % (G // BK)) * BK + depth
            live = ((entry >> half) & 1) != 0
            entry = tl.load(list_start + tl.minimum((step + 1) // (G // BK), groups - 1))
            if MIXED:
                live &= tl.load(bits + group, mask=live, other=0) != 0
            a = tl.load(h_row + k[None, :], mask=live[:, None], other=0.0)
            b = tl.load(w_row + k[:, None])
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    else:
        entry = tl.load(list_start + tl.minimum(depth, last) // G)
        for step in range(0, tl.cdiv(groups * G, BK)):
            # Past the end the last channel is read again, for no row: weights that nobody here runs stay unread.
            listed = step * BK + depth
            channel = tl.minimum(listed, (groups * G - 16) + listed % 16)
            group = entry >> 2
            k = tl.max_contiguous(tl.multiple_of(group * G + channel % G, 16), 16)
            halves = tl.where(listed <= last, entry & 3, 0)
            live = ((halves[None, :] >> half[:, None]) & 1) != 0
            entry = tl.load(list_start + tl.minimum(listed + BK, last) // G)
            if MIXED:
                live &= tl.load(bits[:, None] + group[None, :], mask=live, other=0) != 0
            live = tl.max_constancy(live, [1, 16])
            a = tl.load(h_row + k[None, :], mask=live, other=0.0)
            b = tl.load(w_row + k[:, None])
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
    pid = tl.program_id(0)
    row_tiles = tl.cdiv(rows, BM)
    column_tiles: tl.constexpr = (N + BN - 1) // BN
    N_G: tl.constexpr = K // G
    # A band of row tiles, whose patterns are often the same, meets all columns before the next one starts.
    band = pid // (BAND * column_tiles)
    height = tl.minimum(row_tiles - band * BAND, BAND)
    local = pid % (BAND * column_tiles)
    tile = band * BAND + local % height
    place = tile * BM + tl.arange(0, BM)
    inside = place < rows
    row = tl.load(order + place, mask=inside, other=0).to(tl.int64)
    column = (local // height) * BN + tl.arange(0, BN)
    known = tl.minimum(column, N - 1).to(tl.int64)  # past the end: read the last column, store nothing
    bits = patterns + tl.load(ids + row).to(tl.int64) * N_G
    list_start = lists + tile.to(tl.int64) * N_G
    groups = tl.load(listed + tile)
    acc = tl.zeros((BM, BN), tl.float32)
    if groups > 0:
        if tl.load(mixed + tile) == 0:
            acc = listed_product(
                acc, h, weight, list_start, groups, place, row, known, bits, stride_h,
                K, G, False, PRECISION, HALF, BM, BK,
            )  # fmt: skip
        else:
            acc = listed_product(
                acc, h, weight, list_start, groups, place, row, known, bits, stride_h,
                K, G, True, PRECISION, HALF, BM, BK,
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

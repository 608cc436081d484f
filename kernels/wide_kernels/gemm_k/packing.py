"""Triton: operands of the packed GEMM-K: rows by tiles with the channels that the tile runs, weights by channel."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from wide_kernels.gemm_k.configs import CHANNEL_STEP
from wide_kernels.pattern_layout import HALF_ROWS, TILE_ROWS, PatternLayout
from wide_kernels.tuning.tiles import largest_power

BLOCK_ROWS, BLOCK_CHANNELS = 32, 256  # of a program that packs


@dataclass(frozen=True)
class Packed:
    """Rows [tiles x TILE_ROWS, channels] in the order of a PatternLayout, and the lists that say which channels.

    Tile t of the rows holds the channels of its first sum(counts[t]) groups of classed[t], one group behind the other;
    where a row skips a group and from there to the next multiple of CHANNEL_STEP, zeros, and so in rows past the last.
    The channels behind stay unwritten, and in each half of the tile those of whole steps that it does not run.
    """

    rows: Tensor
    classed: Tensor
    counts: Tensor


@triton.jit(do_not_specialize=["rows"])
def pack_kernel(
    h,
    order,
    classed,
    counts,
    ids,
    patterns,
    mixed,
    packed,
    rows,
    stride_h,
    stride_packed,
    G: tl.constexpr,
    N_G: tl.constexpr,
    UNIT: tl.constexpr,
    STEP: tl.constexpr,
    BM: tl.constexpr,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BM rows of a tile and BLOCK of its packed channels, in UNITs that are each inside one group."""
    tile = (tl.program_id(0) // (TILE // BM)).to(tl.int64)
    local = tl.program_id(0) % (TILE // BM) * BM + tl.arange(0, BM)
    listed = tl.load(counts + tile * 3) + tl.load(counts + tile * 3 + 1) + tl.load(counts + tile * 3 + 2)
    start = tl.program_id(1) * BLOCK
    if start < tl.cdiv(listed * G, STEP) * STEP:
        PER_GROUP: tl.constexpr = G // UNIT
        unit = start // UNIT + tl.arange(0, BLOCK // UNIT)
        entry = tl.load(classed + tile * N_G + unit // PER_GROUP, mask=unit < listed * PER_GROUP, other=0)
        place = tile * TILE + local
        row = tl.load(order + place, mask=place < rows, other=0)
        half = local // HALF
        runs = ((entry[None, :] >> half[:, None]) & 1 != 0) & (place < rows)[:, None]
        told_apart = (tl.load(mixed + tile) >> half) & 1 != 0
        chosen = tl.load(ids + row) * N_G
        bits = patterns + chosen[:, None] + (entry >> 2)[None, :]
        runs = runs & (tl.load(bits, mask=runs & told_apart[:, None], other=1) != 0)
        channel = (entry >> 2) * G + unit % PER_GROUP * UNIT
        channel = tl.reshape(channel[:, None] + tl.arange(0, UNIT)[None, :], (BLOCK,))
        channel = tl.max_contiguous(tl.multiple_of(channel, UNIT), UNIT)
        wide = tl.reshape(tl.broadcast_to(runs[:, :, None], (BM, BLOCK // UNIT, UNIT)), (BM, BLOCK))
        wide = tl.max_constancy(wide, [1, UNIT])
        value = tl.load(h + row.to(tl.int64)[:, None] * stride_h + channel[None, :], mask=wide, other=0)
        column = start + tl.arange(0, BLOCK)
        target = packed + place[:, None] * stride_packed + column[None, :]
        tl.store(target, value, mask=(column < stride_packed)[None, :])


def packed_channels(channels: int) -> int:
    """Columns of packed rows for so many channels: whole steps."""
    return -(-channels // CHANNEL_STEP) * CHANNEL_STEP


def pack_rows(h: Tensor, layout: PatternLayout, classed: Tensor, counts: Tensor) -> Packed:
    """h [T, K] packed by the lists of `classed_lists(layout)`; values of skipped groups are not read."""
    rows, channels = h.shape
    h = h if h.stride(1) == 1 else h.contiguous()
    tiles, width = counts.shape[0], channels // layout.groups
    packed = h.new_empty(tiles * TILE_ROWS, packed_channels(channels))
    if rows == 0:
        return Packed(packed, classed, counts)
    grid = (tiles * (TILE_ROWS // BLOCK_ROWS), triton.cdiv(packed.shape[1], BLOCK_CHANNELS))
    pack_kernel[grid](
        h, layout.order, classed, counts, layout.ids, layout.patterns.view(torch.uint8), layout.mixed, packed,
        rows, h.stride(0), packed.stride(0), width, layout.groups, largest_power(width, 64), CHANNEL_STEP,
        BLOCK_ROWS, TILE_ROWS, HALF_ROWS, BLOCK_CHANNELS,
    )  # fmt: skip
    return Packed(packed, classed, counts)


@triton.jit
def transpose_kernel(source, target, rows, columns, stride, BLOCK: tl.constexpr):
    """target[c, r] = source[r, c] of a square block."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(source + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside)
    inside = (column < columns)[:, None] & (row < rows)[None, :]
    tl.store(target + column.to(tl.int64)[:, None] * rows + row[None, :], tl.trans(value), mask=inside)


def transposed(weight: Tensor) -> Tensor:
    """A contiguous copy [K, N] of weight [N, K]; whole lines of memory are read and written."""
    rows, columns = weight.shape
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    out = weight.new_empty(columns, rows)
    transpose_kernel[(triton.cdiv(rows, 64), triton.cdiv(columns, 64))](
        weight, out, rows, columns, weight.stride(0), 64
    )
    return out

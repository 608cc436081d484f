"""Triton: rows sorted by pattern and the group lists of their tiles, in two short launches of a fixed order.

The first counts the ids of each block of rows. In the second some programs each put the rows of a block behind those of
smaller ids and earlier ones of their own; the others each write the list of a tile. A tile's list needs no sorted rows:
the counts alone say at which places of the order a pattern stands, so both kinds start at once.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wide_kernels.dispatch import on_device_of
from wide_kernels.pattern_layout import HALF_ROWS, TILE_ROWS
from wide_kernels.tuning.tiles import padded_rows

FEW_PATTERNS = 256  # up to here blocks of 256 rows; above 512: every program of the second launch adds all counts
BLOCK_ROWS = 256
BLOCK_OTHERS = 32  # rows of its block that every row is compared with at once
BLOCK_PARTS = 16  # blocks whose counts are read at once
BLOCK_PATTERNS = 8  # patterns whose groups are read at once


@triton.jit
def clamped_ids(ids, row, rows, C: tl.constexpr):
    """The ids of some rows; past the end the largest."""
    found = tl.load(ids + row, mask=row < rows, other=C - 1)
    return tl.minimum(tl.maximum(found, 0), C - 1)


@triton.jit(do_not_specialize=["rows"])
def count_kernel(ids, counts, rows, C: tl.constexpr, BINS: tl.constexpr, BLOCK_T: tl.constexpr):
    """counts[block, id] = rows of the block with that id."""
    block = tl.program_id(0)
    found = tl.histogram(clamped_ids(ids, block * BLOCK_T + tl.arange(0, BLOCK_T), rows, C), BINS)
    bins = tl.arange(0, BINS)
    past_end = tl.maximum((block + 1) * BLOCK_T - rows, 0)
    found -= tl.where(bins == C - 1, past_end, 0)
    tl.store(counts + block * C + bins, found, mask=bins < C)


@triton.jit
def added_counts(counts, blocks, block, C: tl.constexpr, BINS: tl.constexpr, BLOCK_P: tl.constexpr):
    """(rows of each id, those of them in blocks before `block`)."""
    bins = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)
    for start in range(0, blocks, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        known = (part < blocks)[:, None] & (bins < C)[None, :]
        value = tl.load(counts + part[:, None] * C + bins[None, :], mask=known, other=0)
        total += tl.sum(value, 0)
        before += tl.sum(tl.where((part < block)[:, None], value, 0), 0)
    return total, before


@triton.jit
def groups_of_half(
    patterns,
    first,
    end,
    begin,
    N_G: tl.constexpr,
    N_G_PADDED: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HALF: tl.constexpr,
):
    """(1 for each group that some of the HALF places from `begin` on runs, how many patterns stand there)."""
    bins = tl.arange(0, BINS)
    meets = (first < end) & (first < begin + HALF) & (end > begin)
    lowest = tl.min(tl.where(meets, bins, BINS), 0)
    highest = tl.max(tl.where(meets, bins, -1), 0)
    group = tl.arange(0, N_G_PADDED)
    runs = tl.zeros((N_G_PADDED,), tl.int32)
    here = meets.to(tl.int32)
    for start in range(lowest, highest + 1, BLOCK_C):
        which = start + tl.arange(0, BLOCK_C)
        stands = (tl.gather(here, tl.minimum(which, BINS - 1), 0) != 0) & (which <= highest)
        entry = patterns + which[:, None] * N_G + group[None, :]
        bits = tl.load(entry, mask=stands[:, None] & (group < N_G)[None, :], other=0)
        runs |= tl.max(bits.to(tl.int32), 0)
    return runs, tl.sum(here, 0)


@triton.jit(do_not_specialize=["rows", "blocks"])
def place_kernel(
    ids,
    patterns,
    counts,
    clamped,
    order,
    lists,
    listed,
    mixed,
    rows,
    blocks,
    C: tl.constexpr,
    N_G: tl.constexpr,
    BINS: tl.constexpr,
    N_G_PADDED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HALF: tl.constexpr,
):
    """Programs below `blocks` place the rows of a block, the others list the groups of a tile."""
    program = tl.program_id(0)
    total, before = added_counts(counts, blocks, program, C, BINS, BLOCK_P)
    end = tl.cumsum(total, 0)
    first = end - total
    if program < blocks:
        position = tl.arange(0, BLOCK_T)
        row = program * BLOCK_T + position
        chosen = clamped_ids(ids, row, rows, C)
        tl.store(clamped + row, chosen, mask=row < rows)
        place = tl.gather(first + before, chosen, 0)
        for start in range(0, BLOCK_T, BLOCK_S):
            other = start + tl.arange(0, BLOCK_S)
            like = clamped_ids(ids, program * BLOCK_T + other, rows, C)[None, :] == chosen[:, None]
            place += tl.sum((like & (other[None, :] < position[:, None])).to(tl.int32), 1)
        tl.store(order + place, row, mask=row < rows)
    else:
        tile = program - blocks
        begin = tile * 2 * HALF
        low, low_patterns = groups_of_half(patterns, first, end, begin, N_G, N_G_PADDED, BINS, BLOCK_C, HALF)
        high, high_patterns = groups_of_half(patterns, first, end, begin + HALF, N_G, N_G_PADDED, BINS, BLOCK_C, HALF)
        halves = low | (high << 1)
        live = (halves != 0).to(tl.int32)
        live_before = tl.cumsum(live, 0) - live
        live_total = tl.sum(live, 0)
        group = tl.arange(0, N_G_PADDED)
        slot = tl.where(halves != 0, live_before, live_total + group - live_before)
        tl.store(lists + tile.to(tl.int64) * N_G + slot, group * 4 + halves, mask=group < N_G)
        tl.store(listed + tile, live_total)
        tl.store(mixed + tile, (low_patterns > 1).to(tl.int32) + 2 * (high_patterns > 1).to(tl.int32))


def sort_by_pattern(ids: Tensor, patterns: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(ids, order, lists, listed, mixed) of contiguous ids [T] and patterns [C, N_G]; see PatternLayout."""
    rows = ids.shape[0]
    count, groups = patterns.shape
    tiles = triton.cdiv(rows, TILE_ROWS)
    clamped, order = torch.empty_like(ids), torch.empty_like(ids)
    lists = ids.new_empty(tiles, groups)
    listed, mixed = ids.new_empty(tiles), ids.new_empty(tiles)
    if rows == 0:
        return clamped, order, lists, listed, mixed
    bins = padded_rows(count)
    block_rows = BLOCK_ROWS if count <= FEW_PATTERNS else 2 * BLOCK_ROWS
    blocks = triton.cdiv(rows, block_rows)
    counts = ids.new_empty(blocks, count)
    with on_device_of(ids):
        count_kernel[(blocks,)](ids, counts, rows, count, bins, block_rows)
        place_kernel[(blocks + tiles,)](
            ids, patterns.view(torch.uint8), counts, clamped, order, lists, listed, mixed, rows, blocks,
            count, groups, bins, triton.next_power_of_2(groups), block_rows, BLOCK_OTHERS,
            BLOCK_PARTS, BLOCK_PATTERNS, HALF_ROWS, num_warps=8,
        )  # fmt: skip
    return clamped, order, lists, listed, mixed

"""Triton: rows sorted by pattern, the group lists of their tiles and the groups' counts, in two short launches.

The first counts the ids of each block of rows. In the second some programs each put the rows of a block behind those of
smaller ids and earlier ones of their own, some each write the list of a tile, and some count for a few groups the rows
that run them. A tile's list needs no sorted rows: the counts alone say at which places of the order a pattern stands,
so all kinds start at once. Orders are fixed, so results repeat. A launch this short waits rather than computes: numbers
that are summed over all threads are packed into one.
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

SMALL_BLOCK, LARGE_BLOCK = 128, 512  # rows
MANY_BLOCKS = 128  # every program of the second launch adds all counts: from here on blocks are larger
FEW_PATTERNS = 256  # and above
COMPARED = 16384  # pairs of rows that are compared at once
ADDED = 8192  # counts that are added at once, and bits of patterns
BLOCK_PATTERNS = 8  # patterns whose groups a tile reads at once


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
def place_rows(
    ids,
    counts,
    clamped,
    order,
    block,
    rows,
    blocks,
    C: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Put the rows of one block where they come in the order."""
    position = tl.arange(0, BLOCK_T)
    row = block * BLOCK_T + position
    chosen = clamped_ids(ids, row, rows, C)
    tl.store(clamped + row, chosen, mask=row < rows)
    earlier = tl.zeros((BLOCK_T,), tl.int32)
    for start in tl.static_range(0, BLOCK_T, BLOCK_S):
        other = start + tl.arange(0, BLOCK_S)
        like = clamped_ids(ids, block * BLOCK_T + other, rows, C)[None, :] == chosen[:, None]
        earlier += tl.sum((like & (other[None, :] < position[:, None])).to(tl.int32), 1)
    total, before = added_counts(counts, blocks, block, C, BINS, BLOCK_P)
    first = tl.cumsum(total, 0) - total
    place = tl.gather(first + before, chosen, 0) + earlier
    tl.store(order + place, row, mask=row < rows)


@triton.jit
def list_groups(
    patterns,
    total,
    lists,
    listed,
    mixed,
    tile,
    rows,
    N_G: tl.constexpr,
    N_G_PADDED: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HALF: tl.constexpr,
):
    """Write the list of one tile."""
    begin = tile * 2 * HALF
    stop = tl.minimum(begin + 2 * HALF, rows)
    end = tl.cumsum(total, 0)
    first = end - total
    low = (total > 0) & (first < begin + HALF) & (end > begin)
    high = (total > 0) & (first < stop) & (end > begin + HALF)
    # A sum of four numbers below 2^16: the patterns before the tile, before its last row, in its halves.
    whole = (end <= begin).to(tl.int64) + ((end < stop).to(tl.int64) << 16)
    whole = tl.sum(whole + (low.to(tl.int64) << 32) + (high.to(tl.int64) << 48), 0)
    lowest = (whole & 0xFFFF).to(tl.int32)
    highest = ((whole >> 16) & 0xFFFF).to(tl.int32)
    several = (((whole >> 32) & 0xFFFF) > 1).to(tl.int32) + 2 * ((whole >> 48) > 1).to(tl.int32)
    tl.store(mixed + tile, several)
    meets = low.to(tl.int32) + (high.to(tl.int32) << 16)
    group = tl.arange(0, N_G_PADDED)
    runs = tl.zeros((N_G_PADDED,), tl.int32)  # how many patterns of each half run a group, packed too
    for start in range(lowest, highest + 1, BLOCK_C):
        which = start + tl.arange(0, BLOCK_C)
        here = tl.where(which <= highest, tl.gather(meets, tl.minimum(which, BINS - 1), 0), 0)
        known = (here != 0)[:, None] & (group < N_G)[None, :]
        bits = tl.load(patterns + which[:, None] * N_G + group[None, :], mask=known, other=0)
        runs += tl.sum(tl.where(bits != 0, here[:, None], 0), 0)
    halves = ((runs & 0xFFFF) != 0).to(tl.int32) + 2 * ((runs >> 16) != 0).to(tl.int32)
    live = (halves != 0).to(tl.int32)
    live_before = tl.cumsum(live, 0) - live
    live_total = tl.sum(live, 0)
    slot = tl.where(halves != 0, live_before, live_total + group - live_before)
    tl.store(lists + tile.to(tl.int64) * N_G + slot, group * 4 + halves, mask=group < N_G)
    tl.store(listed + tile, live_total)


@triton.jit(do_not_specialize=["rows", "blocks", "tiles"])
def place_kernel(
    ids,
    patterns,
    counts,
    clamped,
    order,
    lists,
    listed,
    mixed,
    count,
    rows,
    blocks,
    tiles,
    C: tl.constexpr,
    N_G: tl.constexpr,
    BINS: tl.constexpr,
    N_G_PADDED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HALF: tl.constexpr,
):
    """The first `tiles` programs list the groups of a tile, the next `blocks` place rows, the others count groups."""
    program = tl.program_id(0)
    if program >= tiles and program < tiles + blocks:
        place_rows(
            ids, counts, clamped, order, program - tiles, rows, blocks, C, BINS, BLOCK_T, BLOCK_S, BLOCK_P
        )  # fmt: skip
    else:
        total, _ = added_counts(counts, blocks, 0, C, BINS, BLOCK_P)
        if program < tiles:
            list_groups(
                patterns, total, lists, listed, mixed, program, rows, N_G, N_G_PADDED, BINS, BLOCK_C, HALF
            )  # fmt: skip
        else:
            bins = tl.arange(0, BINS)
            group = (program - tiles - blocks) * BLOCK_G + tl.arange(0, BLOCK_G)
            known = (bins < C)[:, None] & (group < N_G)[None, :]
            bits = tl.load(patterns + bins[:, None] * N_G + group[None, :], mask=known, other=0)
            tl.store(count + group, tl.sum(tl.where(bits != 0, total[:, None], 0), 0), mask=group < N_G)


def block_rows(rows: int, count: int) -> int:
    """Rows of a block: few where that leaves few blocks to add up."""
    block = SMALL_BLOCK if count <= FEW_PATTERNS else LARGE_BLOCK
    while block < LARGE_BLOCK and rows > MANY_BLOCKS * block:
        block *= 2
    return block


def sizes(rows: int, count: int, groups: int) -> dict[str, int]:
    """Compile-time sizes of the second launch."""
    bins, block = padded_rows(count), block_rows(rows, count)
    return {
        "C": count,
        "N_G": groups,
        "BINS": bins,
        "N_G_PADDED": triton.next_power_of_2(groups),
        "BLOCK_T": block,
        "BLOCK_S": min(block, COMPARED // block),
        "BLOCK_P": ADDED // bins,
        "BLOCK_C": BLOCK_PATTERNS,
        "BLOCK_G": ADDED // bins,
        "HALF": HALF_ROWS,
        "num_warps": 8,
    }


def sort_by_pattern(ids: Tensor, patterns: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(ids, order, lists, listed, mixed, count) of contiguous ids [T] and patterns [C, N_G]; see PatternLayout."""
    rows = ids.shape[0]
    count, groups = patterns.shape
    tiles = triton.cdiv(rows, TILE_ROWS)
    clamped, order = torch.empty_like(ids), torch.empty_like(ids)
    lists = ids.new_empty(tiles, groups)
    listed, mixed = ids.new_empty(tiles), ids.new_empty(tiles)
    if rows == 0:
        return clamped, order, lists, listed, mixed, ids.new_zeros(groups)
    executed = ids.new_empty(groups)
    config = sizes(rows, count, groups)
    blocks = triton.cdiv(rows, config["BLOCK_T"])
    counts = ids.new_empty(blocks, count)
    with on_device_of(ids):
        count_kernel[(blocks,)](ids, counts, rows, count, config["BINS"], config["BLOCK_T"])
        place_kernel[(tiles + blocks + triton.cdiv(groups, config["BLOCK_G"]),)](
            ids, patterns.view(torch.uint8), counts, clamped, order, lists, listed, mixed, executed, rows, blocks,
            tiles, **config,
        )  # fmt: skip
    return clamped, order, lists, listed, mixed, executed

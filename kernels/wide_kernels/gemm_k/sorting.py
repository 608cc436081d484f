"""Triton: rows sorted by which groups of a segment they run, so that the rows of a tile agree.

A segment is a run of adjacent groups; a row's pattern there is a few bits. Sorted in Gray-code order, neighbours differ
in few bits, so a tile needs few groups beyond those that its rows run. A counting sort in two short launches, stable:
each block of rows is counted, then sorted by itself and put where its patterns begin.

    mask --> pattern of each row in a segment --> counts of a block (launch 1) --> first place of each pattern
         --> block sorted by itself (launch 2) --> order, patterns, groups that each tile needs
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from wide_kernels.dispatch import on_device_of
from wide_kernels.gemm_k.segments import TILE_ROWS
from wide_kernels.tuning.tiles import padded_rows

BLOCK_ROWS = 1024
BLOCK_PARTS = 16


@triton.jit
def either(a, b):
    """Bitwise or, for reductions."""
    return a | b


@triton.jit
def gray_ranks(mask, row, rows, segment, N_G: tl.constexpr, S: tl.constexpr):
    """Place of each row's pattern in Gray-code order; 2^S for rows past the end."""
    pattern = tl.zeros(row.shape, tl.int32)
    inside = row < rows
    for j in tl.static_range(S):
        group = row * 0 + segment * S + j
        bit = tl.load(mask + row.to(tl.int64) * N_G + group, mask=inside & (group < N_G), other=0)
        pattern |= bit.to(tl.int32) << j
    rank = pattern ^ (pattern >> 1)
    rank ^= rank >> 2
    rank ^= rank >> 4
    return tl.where(inside, rank, 1 << S)


@triton.jit(do_not_specialize=["rows", "blocks"])
def count_kernel(mask, counts, rows, blocks, N_G: tl.constexpr, S: tl.constexpr, BLOCK_T: tl.constexpr):
    """counts[segment, block, rank] = rows of the block with that rank."""
    block = tl.program_id(0)
    segment = tl.program_id(1)
    row = block * BLOCK_T + tl.arange(0, BLOCK_T)
    rank = gray_ranks(mask, row, rows, segment, N_G, S)
    found = tl.histogram(rank, 2 << S)  # the upper half counts rows past the end
    bins = tl.arange(0, 2 << S)
    tl.store(counts + (segment * blocks + block) * (1 << S) + bins, found, mask=bins < (1 << S))


@triton.jit(do_not_specialize=["rows", "blocks", "tiles"])
def place_kernel(
    mask,
    counts,
    order,
    patterns,
    needed,
    rows,
    blocks,
    tiles,
    N_G: tl.constexpr,
    S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HALF: tl.constexpr,
):
    """Put each row behind all rows of lower rank and those of its rank in earlier blocks or before it in its own.

    And find what each half of the block's tiles of sorted rows needs: the patterns whose range of places meets it.
    """
    block = tl.program_id(0)
    segment = tl.program_id(1)
    bins = tl.arange(0, 1 << S)
    total = tl.zeros((1 << S,), tl.int32)
    before = tl.zeros((1 << S,), tl.int32)
    for start in range(0, blocks, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        entry = counts + (segment * blocks + part)[:, None] * (1 << S) + bins[None, :]
        value = tl.load(entry, mask=(part < blocks)[:, None], other=0)
        total += tl.sum(value, 0)
        before += tl.sum(tl.where((part < block)[:, None], value, 0), 0)
    own = tl.load(counts + (segment * blocks + block) * (1 << S) + bins)
    end = tl.cumsum(total, 0)
    first = end - total
    # Sorted rows of a block: all those of a rank follow each other, so their places do.
    shift = first + before - (tl.cumsum(own, 0) - own)
    row = block * BLOCK_T + tl.arange(0, BLOCK_T)
    rank = gray_ranks(mask, row, rows, segment, N_G, S)
    position = tl.arange(0, BLOCK_T)
    key = tl.sort(rank * BLOCK_T + position)
    rank = key // BLOCK_T
    inside = rank < (1 << S)
    row = block * BLOCK_T + key % BLOCK_T
    place = position + tl.gather(shift, tl.minimum(rank, (1 << S) - 1), 0)
    target = segment.to(tl.int64) * rows + place
    tl.store(order + target, row, mask=inside)
    tl.store(patterns + target, rank ^ (rank >> 1), mask=inside)
    for half in tl.static_range(BLOCK_T // HALF):
        begin = block * BLOCK_T + half * HALF
        meets = (total > 0) & (first < begin + HALF) & (end > begin)
        union = tl.reduce(tl.where(meets, bins ^ (bins >> 1), 0), 0, either)
        index = block * (BLOCK_T // HALF) + half
        tl.store(needed + segment * tiles * 2 + index, union, mask=index < tiles * 2)


@dataclass(frozen=True)
class SortedPatterns:
    """`order` int32 [segments, T]: rows in Gray order; `patterns`: their bits; `length`: groups in a segment.

    `needed` int32 [segments, tiles of TILE_ROWS, 2]: the bits of all rows in each half of a tile.
    """

    order: Tensor
    patterns: Tensor
    needed: Tensor
    length: int

    @property
    def segments(self) -> int:
        """How many segments the groups are cut into."""
        return self.order.shape[0]


def sort_patterns(mask: Tensor, length: int) -> SortedPatterns:
    """Sort the rows of a contiguous bool mask [T, N_G], T > 0, segment by segment; `length` is at most 8."""
    rows, groups = mask.shape
    segments = triton.cdiv(groups, length)
    block_rows = max(TILE_ROWS, min(BLOCK_ROWS, padded_rows(rows)))
    blocks, tiles = triton.cdiv(rows, block_rows), triton.cdiv(rows, TILE_ROWS)
    counts = torch.empty(segments, blocks, 1 << length, dtype=torch.int32, device=mask.device)
    order = torch.empty(segments, rows, dtype=torch.int32, device=mask.device)
    patterns = torch.empty_like(order)
    needed = torch.empty(segments, tiles, 2, dtype=torch.int32, device=mask.device)
    flags, grid = mask.view(torch.uint8), (blocks, segments)
    with on_device_of(mask):
        count_kernel[grid](flags, counts, rows, blocks, groups, length, block_rows)
        place_kernel[grid](
            flags, counts, order, patterns, needed, rows, blocks, tiles,
            groups, length, block_rows, BLOCK_PARTS, TILE_ROWS // 2, num_warps=8,
        )  # fmt: skip
    return SortedPatterns(order, patterns, needed, length)

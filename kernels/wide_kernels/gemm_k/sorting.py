"""Triton: rows sorted by which groups of a segment they run, so that the rows of a tile agree.

A segment is a run of adjacent groups; a row's pattern there is a few bits. Sorted in Gray-code order, neighbours differ
in few bits, so a tile needs few groups beyond those that its rows run. A counting sort: three short launches, stable.
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

SCAN = 4096


@triton.jit
def either(a, b):
    """Bitwise or, for reductions."""
    return a | b


@triton.jit
def row_patterns(mask, row, rows, segment, N_G: tl.constexpr, S: tl.constexpr):
    """(pattern, Gray rank) of each row in a segment; the rank of rows past the end is -1."""
    pattern = tl.zeros(row.shape, tl.int32)
    inside = row < rows
    for j in tl.static_range(S):
        group = row * 0 + segment * S + j
        bit = tl.load(mask + row.to(tl.int64) * N_G + group, mask=inside & (group < N_G), other=0)
        pattern |= bit.to(tl.int32) << j
    rank = pattern ^ (pattern >> 1)
    rank ^= rank >> 2
    rank ^= rank >> 4
    return pattern, tl.where(inside, rank, -1)


@triton.jit(do_not_specialize=["rows", "blocks"])
def count_kernel(mask, counts, rows, blocks, N_G: tl.constexpr, S: tl.constexpr, BLOCK_T: tl.constexpr):
    """counts[segment, rank, block] = rows of the block with that rank."""
    block = tl.program_id(0)
    segment = tl.program_id(1)
    row = block * BLOCK_T + tl.arange(0, BLOCK_T)
    _, rank = row_patterns(mask, row, rows, segment, N_G, S)
    bins = tl.arange(0, 1 << S)
    hits = (rank[:, None] == bins[None, :]).to(tl.int32)
    target = counts + (segment.to(tl.int64) * (1 << S) + bins) * blocks + block
    tl.store(target, tl.sum(hits, 0))


@triton.jit(do_not_specialize=["size"])
def scan_kernel(counts, size, BLOCK: tl.constexpr):
    """Counts of one segment become the place of the first row, in rank-major order (an exclusive sum)."""
    counts += tl.program_id(0).to(tl.int64) * size
    carry = tl.zeros((1,), tl.int32)
    for start in range(0, size, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        value = tl.load(counts + entry, mask=entry < size, other=0)
        tl.store(counts + entry, carry + tl.cumsum(value, 0) - value, mask=entry < size)
        carry += tl.sum(value, 0)


@triton.jit(do_not_specialize=["rows", "blocks"])
def place_kernel(
    mask,
    first,
    order,
    patterns,
    needed,
    rows,
    blocks,
    N_G: tl.constexpr,
    S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HALF: tl.constexpr,
):
    """Put each row where its rank and its block begin, plus the rows of the same rank before it in the block.

    And find what the block-th tile of sorted rows needs, half by half: the patterns whose range of places meets it.
    """
    block = tl.program_id(0)
    segment = tl.program_id(1)
    row = block * BLOCK_T + tl.arange(0, BLOCK_T)
    pattern, rank = row_patterns(mask, row, rows, segment, N_G, S)
    local = tl.arange(0, BLOCK_T)
    before = (rank[:, None] == rank[None, :]) & (local[None, :] < local[:, None])
    place = tl.load(first + (segment.to(tl.int64) * (1 << S) + rank) * blocks + block, mask=row < rows, other=0)
    place += tl.sum(before.to(tl.int32), 1)
    base = segment.to(tl.int64) * rows
    tl.store(order + base + place, row, mask=row < rows)
    tl.store(patterns + base + place, pattern, mask=row < rows)
    bins = tl.arange(0, 1 << S)
    start = tl.load(first + (segment.to(tl.int64) * (1 << S) + bins) * blocks)
    ahead = first + (segment.to(tl.int64) * (1 << S) + bins + 1) * blocks
    end = tl.load(ahead, mask=bins < (1 << S) - 1, other=0)
    end = tl.where(bins < (1 << S) - 1, end, rows)
    for half in tl.static_range(2):
        begin = (block * 2 + half) * HALF
        meets = (start < end) & (start < begin + HALF) & (end > begin)
        union = tl.reduce(tl.where(meets, bins ^ (bins >> 1), 0), 0, either)
        tl.store(needed + (segment * blocks + block) * 2 + half, union)


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
    block_rows = min(TILE_ROWS, padded_rows(rows))
    blocks = triton.cdiv(rows, block_rows)
    size = blocks << length
    counts = torch.empty(segments, size, dtype=torch.int32, device=mask.device)
    order = torch.empty(segments, rows, dtype=torch.int32, device=mask.device)
    patterns = torch.empty_like(order)
    needed = torch.empty(segments, blocks, 2, dtype=torch.int32, device=mask.device)
    flags = mask.view(torch.uint8)
    with on_device_of(mask):
        count_kernel[(blocks, segments)](flags, counts, rows, blocks, groups, length, block_rows, num_warps=8)
        scan_kernel[(segments,)](counts, size, min(SCAN, padded_rows(size)), num_warps=8)
        place_kernel[(blocks, segments)](
            flags,
            counts,
            order,
            patterns,
            needed,
            rows,
            blocks,
            groups,
            length,
            block_rows,
            TILE_ROWS // 2,
            num_warps=8,
        )
    return SortedPatterns(order, patterns, needed, length)

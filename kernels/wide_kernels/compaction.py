"""Triton: a mask's columns compacted in two short launches, without a sort and in a fixed order.

The first counts the executing rows of each block of rows; the second adds up the counts of the blocks before it and
puts each row of its block in its place: executing rows in front, skipping rows behind, both ascending.

    mask --> count of each block (launch 1) --> counts before it --> place of each row (launch 2) --> index, counts
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wide_kernels.dispatch import on_device_of

BLOCK_ROWS = 256
BLOCK_GROUPS = 16
BLOCK_PARTS = 64


@triton.jit(do_not_specialize=["rows"])
def count_kernel(mask, parts, rows, N_G: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr):
    """parts[block, group] = executing rows of the block."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    inside = (row < rows)[:, None] & (group < N_G)[None, :]
    live = tl.load(mask + row[:, None] * N_G + group[None, :], mask=inside, other=0).to(tl.int32)
    tl.store(parts + tl.program_id(0).to(tl.int64) * N_G + group, tl.sum(live, 0), mask=group < N_G)


@triton.jit(do_not_specialize=["rows", "blocks"])
def place_kernel(
    mask,
    parts,
    index,
    count,
    rows,
    blocks,
    N_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """index[group, place] = row."""
    block = tl.program_id(0)
    row = block.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    known = group < N_G
    before = tl.zeros((BLOCK_G,), tl.int32)
    total = tl.zeros((BLOCK_G,), tl.int32)
    for start in range(0, blocks, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        value = tl.load(
            parts + part[:, None].to(tl.int64) * N_G + group[None, :],
            mask=(part < blocks)[:, None] & known[None, :],
            other=0,
        )
        total += tl.sum(value, 0)
        before += tl.sum(tl.where((part < block)[:, None], value, 0), 0)
    inside = (row < rows)[:, None] & known[None, :]
    live = tl.load(mask + row[:, None] * N_G + group[None, :], mask=inside, other=0).to(tl.int32)
    live_before = before[None, :] + tl.cumsum(live, 0) - live
    place = tl.where(live != 0, live_before, total[None, :] + row[:, None] - live_before)
    where = index + group[None, :].to(tl.int64) * rows + place
    tl.store(where, (row[:, None] + group[None, :] * 0).to(tl.int32), mask=inside)
    if block == 0:
        tl.store(count + group, total, mask=known)


def compact(mask: Tensor) -> tuple[Tensor, Tensor]:
    """(index, count) of a contiguous bool mask [T, N_G]; see RouteLayout."""
    rows, groups = mask.shape
    index = torch.empty(groups, rows, dtype=torch.int32, device=mask.device)
    if rows == 0:
        return index, torch.zeros(groups, dtype=torch.int32, device=mask.device)
    count = torch.empty(groups, dtype=torch.int32, device=mask.device)
    blocks = triton.cdiv(rows, BLOCK_ROWS)
    parts = torch.empty(blocks, groups, dtype=torch.int32, device=mask.device)
    grid = (blocks, triton.cdiv(groups, BLOCK_GROUPS))
    flags = mask.view(torch.uint8)
    with on_device_of(mask):
        count_kernel[grid](flags, parts, rows, groups, BLOCK_ROWS, BLOCK_GROUPS)
        place_kernel[grid](flags, parts, index, count, rows, blocks, groups, BLOCK_ROWS, BLOCK_GROUPS, BLOCK_PARTS)
    return index, count

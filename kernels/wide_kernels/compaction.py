"""Triton: a mask's columns compacted in one launch, without a sort and in a fixed order.

A program owns a block of rows times some groups. It counts the executing rows of its block, waits for the other blocks
of its groups, adds up the counts of the blocks before it, and puts each row in its place: executing rows in front,
skipping rows behind, both ascending. Where programs cannot wait for each other (Triton's interpreter, more blocks than
a GPU surely holds at once), the two halves are two launches.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wide_kernels.dispatch import on_device_of
from wide_kernels.meeting import counters, meet, processors
from wide_kernels.tuning.table import forced

PARTS = 64
LONG = 4096


@triton.jit(do_not_specialize=["rows", "blocks"])
def place_kernel(
    mask,
    parts,
    index,
    count,
    counter,
    rows,
    blocks,
    N_G: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PARTS: tl.constexpr,
):
    """index[group, place] = row. HALVES: "first", "second", or "both" with a wait between them."""
    block = tl.program_id(0)
    row = block.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    known = group < N_G
    flags = tl.load(mask + row[:, None] * N_G + group[None, :], mask=(row < rows)[:, None] & known[None, :], other=0)
    live = tl.trans(flags).to(tl.int32)
    if HALVES != "second":
        tl.store(parts + block.to(tl.int64) * N_G + group, tl.sum(live, 1), mask=known)
    ahead = tl.cumsum(live, 1) - live
    if HALVES == "both":
        if blocks > 1:
            meet(counter + tl.program_id(1), block, blocks)
        else:
            tl.debug_barrier()
    if HALVES != "first":
        before = tl.zeros((BLOCK_G,), tl.int32)
        total = tl.zeros((BLOCK_G,), tl.int32)
        for start in range(0, blocks, PARTS):
            part = start + tl.arange(0, PARTS)
            value = tl.load(
                parts + part[:, None].to(tl.int64) * N_G + group[None, :],
                mask=(part < blocks)[:, None] & known[None, :],
                other=0,
                cache_modifier=".cg",
            )
            total += tl.sum(value, 0)
            before += tl.sum(tl.where((part < block)[:, None], value, 0), 0)
        if block == 0:
            tl.store(count + group, total, mask=known)
        ahead += before[:, None]
        number = row.to(tl.int32)[None, :]
        place = tl.where(live != 0, ahead, total[:, None] + number - ahead)
        # In one dimension neighbouring threads take neighbouring rows of a group: they write neighbouring places.
        entry = tl.arange(0, BLOCK_G * BLOCK_T)
        group = tl.program_id(1) * BLOCK_G + entry // BLOCK_T
        number = block * BLOCK_T + entry % BLOCK_T
        target = index + group.to(tl.int64) * rows + tl.reshape(place, (BLOCK_G * BLOCK_T,))
        tl.store(target, number, mask=(group < N_G) & (number < rows))


def layout_config(rows: int, groups: int) -> dict[str, int]:
    """A block reads whole 32-byte sectors of the mask; 16384 rows of 112 groups make 128 blocks, one a processor."""
    wide = min(32, max(16, triton.next_power_of_2(groups)))
    tall = {"BLOCK_T": 512, "num_warps": 16} if rows > LONG else {"BLOCK_T": 128, "num_warps": 8}
    return {"BLOCK_G": wide, **tall} | forced("route_layout")


def compact(mask: Tensor) -> tuple[Tensor, Tensor]:
    """(index, count) of a contiguous bool mask [T, N_G]; see RouteLayout."""
    rows, groups = mask.shape
    index = torch.empty(groups, rows, dtype=torch.int32, device=mask.device)
    if rows == 0:
        return index, torch.zeros(groups, dtype=torch.int32, device=mask.device)
    count = torch.empty(groups, dtype=torch.int32, device=mask.device)
    config = layout_config(rows, groups)
    blocks, columns = triton.cdiv(rows, config["BLOCK_T"]), triton.cdiv(groups, config["BLOCK_G"])
    parts = torch.empty(blocks, groups, dtype=torch.int32, device=mask.device)
    together = mask.is_cuda and blocks <= processors(mask.get_device())
    with on_device_of(mask):
        counter = counters(mask.device, columns) if together else parts  # not followed then
        for halves in ("both",) if together else ("first", "second"):
            place_kernel[(blocks, columns)](
                mask.view(torch.uint8), parts, index, count, counter, rows, blocks, groups, halves,
                PARTS=PARTS, **config,
            )  # fmt: skip
    return index, count

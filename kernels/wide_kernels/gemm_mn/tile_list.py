"""Triton: which tiles a persistent GEMM-MN kernel computes and which it only zeroes, listed on the device.

`tiles` is int32 [1 + slots, 2]. Row 0 holds the number of live tiles. Then come the live tiles and after them the dead
ones, as pairs (row tile * column tiles + column tile, rows that execute the group). Both lists run in bands: BAND row
tiles meet all columns before the next ones start, so that their gathered rows stay in L2. Every program knows where its
band begins: the live tiles before it are a sum over the groups.

    counts of each group --> live tiles of each (band, group) --> sums before them --> places in `tiles`
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["rows"])
def list_kernel(
    count,
    tiles,
    rows,
    N_G: tl.constexpr,
    N_G_PADDED: tl.constexpr,
    PER_GROUP: tl.constexpr,
    BM: tl.constexpr,
    BAND: tl.constexpr,
):
    """List the tiles of one band; a group has PER_GROUP column tiles."""
    first = tl.program_id(0) * BAND
    height = tl.minimum(tl.cdiv(rows, BM) - first, BAND)
    group = tl.arange(0, N_G_PADDED)
    known = group < N_G
    executed = tl.load(count + group, mask=known, other=0)
    live = tl.cdiv(executed, BM)
    total = tl.sum(live, 0) * PER_GROUP
    live_before = tl.sum(tl.minimum(live, first), 0) * PER_GROUP
    live_here = tl.minimum(tl.maximum(live - first, 0), height)
    dead_here = tl.where(known, height - live_here, 0)
    live_at = live_before + (tl.cumsum(live_here, 0) - live_here) * PER_GROUP
    dead_at = total + first * N_G * PER_GROUP - live_before + (tl.cumsum(dead_here, 0) - dead_here) * PER_GROUP
    for column in range(PER_GROUP):
        for local in range(BAND):
            is_live = local < live_here
            in_live = live_at + column * live_here + local
            in_dead = dead_at + column * dead_here + local - live_here
            slot = tiles + 2 * (1 + tl.where(is_live, in_live, in_dead))
            tile = (first + local) * (N_G * PER_GROUP) + group * PER_GROUP + column
            tl.store(slot, tile, mask=local < live_here + dead_here)
            tl.store(slot + 1, executed, mask=local < live_here + dead_here)
    if first == 0:
        tl.store(tiles, total)


def tile_list(count: Tensor, rows: int, per_group: int, BM: int, BAND: int) -> Tensor:
    """The tiles [1 + slots, 2] of `rows` rows in tiles of BM, for groups that `count` [N_G] rows execute."""
    groups = count.shape[0]
    row_tiles = triton.cdiv(rows, BM)
    tiles = torch.empty(1 + row_tiles * groups * per_group, 2, dtype=torch.int32, device=count.device)
    list_kernel[(triton.cdiv(row_tiles, BAND),)](
        count, tiles, rows, groups, triton.next_power_of_2(groups), per_group, BM, BAND
    )
    return tiles

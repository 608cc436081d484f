"""Triton: the groups of each tile in the order in which the Gluon kernels take them.

The two halves of a tile run different groups where patterns meet. Groups that both run come first, then those of the
lower half alone, then those of the upper half alone, then those of neither: a piece of work on several narrow groups
side by side is then nearly always for both halves, or for one of them while the other need not multiply.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wide_kernels.pattern_layout import PatternLayout


@triton.jit
def class_kernel(lists, classed, counts, N_G: tl.constexpr, N_G_PADDED: tl.constexpr):
    """The list of one tile by class, and the sizes of the first three classes."""
    tile = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, N_G_PADDED)
    entry = tl.load(lists + tile * N_G + slot, mask=slot < N_G, other=0)
    halves = entry & 3
    shift = (16 * tl.where(halves == 0, 3, halves % 3)).to(tl.int64)  # the class: both, lower, upper, none
    # Four sums below 2^16 in one.
    one = tl.where(slot < N_G, tl.full(slot.shape, 1, tl.int64) << shift, 0)
    sizes = tl.sum(one, 0)
    begins = (sizes << 16) + (sizes << 32) + (sizes << 48)
    place = ((begins + tl.cumsum(one, 0) - one) >> shift) & 0xFFFF
    for turn in tl.static_range(3):
        tl.store(counts + tile * 3 + turn, ((sizes >> (16 * turn)) & 0xFFFF).to(tl.int32))
    tl.store(classed + tile * N_G + place, entry, mask=slot < N_G)


def classed_lists(layout: PatternLayout) -> tuple[Tensor, Tensor]:
    """(`layout.lists` by class, int32 [tiles, 3]: groups of both halves, of the lower alone, of the upper alone)."""
    tiles, groups = layout.lists.shape
    classed = torch.empty_like(layout.lists)
    counts = layout.lists.new_empty(tiles, 3)
    class_kernel[(tiles,)](layout.lists, classed, counts, groups, triton.next_power_of_2(groups))
    return classed, counts


@triton.jit(do_not_specialize=["tiles"])
def rank_kernel(counts, ranked, tiles, BLOCK: tl.constexpr):
    """Put one tile where it comes by cost: what only one half runs takes nearly as long as what both do."""
    tile = tl.program_id(0)
    entry = counts + tile * 3
    cost = 4 * tl.load(entry) + 3 * (tl.load(entry + 1) + tl.load(entry + 2))
    rank = 0
    for start in range(0, tiles, BLOCK):
        other = start + tl.arange(0, BLOCK)
        known = other < tiles
        entries = counts + other * 3
        alone = tl.load(entries + 1, mask=known, other=0) + tl.load(entries + 2, mask=known, other=0)
        other_cost = 4 * tl.load(entries, mask=known, other=0) + 3 * alone
        earlier = (other_cost > cost) | ((other_cost == cost) & (other < tile))
        rank += tl.sum((earlier & known).to(tl.int32), 0)
    tl.store(ranked + rank, tile)


def ranked_tiles(counts: Tensor) -> Tensor:
    """Numbers of the tiles, int32 [tiles], those that take longest first."""
    tiles = counts.shape[0]
    ranked = counts.new_empty(tiles)
    rank_kernel[(tiles,)](counts, ranked, tiles, 128)
    return ranked

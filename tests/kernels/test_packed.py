"""The packed operand of the down projection: what stands where, and that its steps add up to the product."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from wide_kernels.gemm_k.configs import CHANNEL_STEP
from wide_kernels.gemm_k.packing import Packed, pack_rows, transposed
from wide_kernels.gemm_k.reference import gemm_k_reference
from wide_kernels.pattern_classes import classed_lists
from wide_kernels.pattern_layout import HALF_ROWS, TILE_ROWS, PatternLayout, pattern_layout

# (rows, patterns, groups, width): tiles of many patterns, ragged ends, groups that are no whole steps
SIZES = ((300, 5, 7, 16), (140, 30, 3, 80), (129, 2, 5, 64), (257, 1, 2, 48), (130, 3, 1, 192))


def packed_rows(rows: int, patterns: int, groups: int, width: int, device: str) -> tuple[PatternLayout, Tensor, Packed]:
    """Group 0 runs nowhere and the first pattern runs nothing; h is NaN where it may not be read."""
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.rand(patterns, groups, generator=generator) < 0.5
    chosen[0], chosen[1:, -1] = False, True
    ids = torch.randint(0, patterns, (rows,), generator=generator, dtype=torch.int32)
    layout = pattern_layout(ids.to(device), chosen.to(device), backend="torch")
    h = torch.randn(rows, groups, width, generator=generator).to(device)
    h[~layout.mask] = math.nan
    h = h.view(rows, groups * width)
    return layout, h, pack_rows(h, layout, *classed_lists(layout))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_tile_holds_its_listed_groups_and_zeros_up_to_a_whole_step(
    sizes: tuple[int, int, int, int], device: str
) -> None:
    rows, _, _, width = sizes
    layout, h, packed = packed_rows(*sizes, device)
    tiles = packed.counts.shape[0]
    assert packed.rows.shape[0] == tiles * TILE_ROWS
    mask = layout.mask
    for place in range(tiles * TILE_ROWS):
        tile = place // TILE_ROWS
        listed = int(packed.counts[tile].sum())
        expected = torch.zeros(-(-listed * width // CHANNEL_STEP) * CHANNEL_STEP, device=h.device)
        if place < rows:
            row = int(layout.order[place])
            for slot, entry in enumerate(packed.classed[tile, :listed].tolist()):
                if mask[row, entry >> 2]:
                    group = slice((entry >> 2) * width, ((entry >> 2) + 1) * width)
                    expected[slot * width : (slot + 1) * width] = h[row, group]
        assert torch.equal(packed.rows[place, : len(expected)], expected)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_steps_that_a_half_does_not_pass_over_add_up_to_its_rows(
    sizes: tuple[int, int, int, int], device: str
) -> None:
    """The walk of the kernel for Hopper, in plain Python."""
    rows, _, groups, width = sizes
    layout, h, packed = packed_rows(*sizes, device)
    weight = torch.randn(24, groups * width, generator=torch.Generator().manual_seed(1)).to(device)
    depth = math.gcd(width, CHANNEL_STEP)
    parts, pieces_of = CHANNEL_STEP // depth, width // depth
    y = torch.zeros(rows, 24, device=device)
    for tile, (both, lower, upper) in enumerate(packed.counts.tolist()):
        both, low = both * pieces_of, (both + lower) * pieces_of
        pieces = low + upper * pieces_of
        for step in range(-(-pieces // parts)):
            listed = range(step * parts, (step + 1) * parts)
            # a half takes part where one of the pieces is its own
            halves = [
                any(piece < low for piece in listed),
                any(piece < both or low <= piece < pieces for piece in listed),
            ]
            channels: list[int] = []
            for piece in listed:
                inside = min(piece, pieces - 1)
                first = (int(packed.classed[tile, inside // pieces_of]) >> 2) * width + inside % pieces_of * depth
                channels += range(first, first + depth)
            for half, runs in enumerate(halves):
                begin = tile * TILE_ROWS + half * HALF_ROWS
                here = range(begin, min(begin + HALF_ROWS, rows))
                if runs and here:
                    operand = packed.rows[begin : here.stop, step * CHANNEL_STEP : (step + 1) * CHANNEL_STEP]
                    y[layout.order[begin : here.stop].long()] += operand @ weight[:, channels].t()
    torch.testing.assert_close(y, gemm_k_reference(h, weight, layout.mask, None), rtol=1e-5, atol=1e-4)


def test_a_weight_is_transposed_exactly(device: str) -> None:
    weight = torch.randn(80, 208, generator=torch.Generator().manual_seed(1)).to(device)
    assert torch.equal(transposed(weight), weight.t())
    assert transposed(weight).is_contiguous()
    assert torch.equal(transposed(weight[:, 16:]), weight[:, 16:].t())

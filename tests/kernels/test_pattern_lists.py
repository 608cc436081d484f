"""The order in which the Hopper kernels for patterns take groups, tiles and chunks, against plain Python."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from wide_kernels.gemm_mn.pattern_list import chunk_list
from wide_kernels.pattern_classes import classed_lists, ranked_tiles
from wide_kernels.pattern_layout import PatternLayout, pattern_layout

LAYOUTS = ((300, 5, 7), (530, 40, 9), (130, 200, 16), (128, 1, 1))


@cache
def lists_of(rows: int, patterns: int, groups: int) -> tuple[PatternLayout, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, patterns, (rows,), generator=generator, dtype=torch.int32)
    layout = pattern_layout(ids, torch.rand(patterns, groups, generator=generator) < 0.5, backend="torch")
    return layout, *classed_lists(layout)


@pytest.mark.parametrize(("rows", "patterns", "groups"), LAYOUTS)
def test_groups_come_by_the_halves_that_run_them(rows: int, patterns: int, groups: int) -> None:
    layout, classed, counts = lists_of(rows, patterns, groups)
    for tile in range(classed.shape[0]):
        entries = layout.lists[tile].tolist()
        expected = [sorted(e for e in entries if e % 4 == halves) for halves in (3, 1, 2, 0)]
        assert classed[tile].tolist() == [entry for part in expected for entry in part]
        assert counts[tile].tolist() == [len(part) for part in expected[:3]]


@pytest.mark.parametrize(("rows", "patterns", "groups"), LAYOUTS)
def test_long_tiles_come_first(rows: int, patterns: int, groups: int) -> None:
    _, _, counts = lists_of(rows, patterns, groups)
    cost = (4 * counts[:, 0] + 3 * (counts[:, 1] + counts[:, 2])).tolist()
    assert ranked_tiles(counts).tolist() == sorted(range(len(cost)), key=lambda tile: (-cost[tile], tile))


@pytest.mark.parametrize(("pieces", "slots", "band"), [(1, 1, 2), (3, 8, 4), (2, 1, 1)])
@pytest.mark.parametrize(("rows", "patterns", "groups"), LAYOUTS)
def test_chunks_come_in_bands_by_their_first_column(
    rows: int, patterns: int, groups: int, pieces: int, slots: int, band: int
) -> None:
    _, classed, counts = lists_of(rows, patterns, groups)
    tiles = classed.shape[0]
    per_tile = -(-groups * pieces // slots)
    live, dead = [], []
    for tile in range(tiles):
        entries = classed[tile].repeat_interleave(pieces).tolist()
        for chunk in range(per_tile):
            first = chunk * slots
            halves = 0
            for entry in entries[first : first + slots]:
                halves |= entry % 4
            column = entries[first] // 4 * pieces + first % pieces
            (live if halves else dead).append((tile // band, column, tile, [tile * per_tile + chunk, halves]))
    found = chunk_list(classed, counts, pieces, slots, band).tolist()
    assert found[0][0] == len(live)
    assert found[1 : 1 + len(live)] == [work for *_, work in sorted(live)]
    assert sorted(found[1 + len(live) :]) == sorted(work for *_, work in dead)

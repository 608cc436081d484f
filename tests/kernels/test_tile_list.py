"""The list of tiles that a persistent kernel walks: every tile once, live ones first, in bands."""

from __future__ import annotations

import pytest
import torch

from wide_kernels.gemm_mn.tile_list import tile_list


@pytest.mark.parametrize("counts", [[0, 0, 0], [300, 300, 300], [1, 300, 65], [64, 0, 129]], ids=str)
@pytest.mark.parametrize(("per_group", "band"), [(1, 8), (2, 2)])
def test_live_tiles_come_first_and_both_parts_run_in_bands(
    counts: list[int], per_group: int, band: int, device: str
) -> None:
    rows, block, columns = 300, 64, 3 * per_group
    listed = tile_list(torch.tensor(counts, dtype=torch.int32, device=device), rows, per_group, block, band).tolist()
    order = [
        (row_tile, column)
        for first in range(0, 5, band)
        for column in range(columns)
        for row_tile in range(first, min(first + band, 5))
    ]
    live = [row_tile * block < counts[column // per_group] for row_tile, column in order]
    expected = [tile for tile, lives in zip(order, live, strict=True) if lives]
    expected += [tile for tile, lives in zip(order, live, strict=True) if not lives]
    assert listed[0][0] == sum(live)
    assert listed[1:] == [[row * columns + column, counts[column // per_group]] for row, column in expected]

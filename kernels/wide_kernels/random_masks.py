"""Random masks to measure with."""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = (5**0.5 - 1) / 2
SQRT_2 = 2**0.5


def random_masks(
    shape: tuple[int, ...], sparsity: float, number: int, generator: torch.Generator | None, device: torch.device
) -> Tensor:
    """A mask bool [rows, N], each row of which skips that share of its groups; which ones, chance decides.

    Chance does not decide how many: a share of one row's few groups would miss the one asked for by several percent.
    Where it is no whole number of groups rows differ by one, so that the mean over rows, and over the masks of several
    `number`s, comes out right (multiples of irrational numbers are spread evenly between 0 and 1).
    """
    rows, groups = shape
    row = torch.arange(rows, dtype=torch.float64, device=device)
    skipped = (sparsity * groups + (0.5 + number * GOLDEN + row * SQRT_2) % 1).floor()
    order = torch.rand(shape, generator=generator, device=device).argsort(-1)
    executed = torch.arange(groups, device=device) >= skipped[:, None]
    return torch.empty(shape, dtype=torch.bool, device=device).scatter_(-1, order, executed)

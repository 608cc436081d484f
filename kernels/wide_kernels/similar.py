"""A numbering of patterns in which neighbours are alike, so that a tile of two patterns runs few groups more."""

from __future__ import annotations

import torch
from torch import Tensor

from wide_kernels.checks import shape_of
from wide_kernels.errors import UnsupportedError

SWEEPS = 8


def similar_order(patterns: Tensor) -> Tensor:
    """Permutation int64 [C] that chains similar patterns bool [C, N_G]: `patterns[similar_order(patterns)]`.

    A short open path by Hamming distance: nearest neighbours from the pattern of fewest groups on, then 2-opt. On the
    host; meant for once at load. Renumber the patterns and whatever scores them alike.
    """
    if patterns.dtype is not torch.bool:
        raise UnsupportedError(f"similar_order: patterns must be bool (True = execute), got {patterns.dtype}")
    count, _ = shape_of("similar_order", "patterns", patterns, "C N_G")
    if count == 0:
        return torch.zeros(0, dtype=torch.int64, device=patterns.device)
    bits = patterns.detach().cpu().double()
    sizes = bits.sum(1)
    distance = sizes[:, None] + sizes[None, :] - 2 * bits @ bits.t()
    path = _shortened(_chained(distance, int(sizes.argmin())), distance)
    return path.to(patterns.device)


def _chained(distance: Tensor, first: int) -> Tensor:
    """From each pattern to the nearest that is left."""
    left = torch.zeros(distance.shape[0], dtype=torch.float64)
    path = [first]
    for _ in range(distance.shape[0] - 1):
        left[path[-1]] = torch.inf
        path.append(int((distance[path[-1]] + left).argmin()))
    return torch.tensor(path)


def _shortened(path: Tensor, distance: Tensor) -> Tensor:
    """2-opt: reverse the run whose reversal shortens the path most, for each beginning, until none does."""
    count = path.shape[0]
    # An end beyond the path, at distance 0 of everything, makes both its ends free.
    distance = torch.nn.functional.pad(distance, (0, 1, 0, 1))
    end = torch.tensor([count])
    path = torch.cat([end, path, end])
    for _ in range(SWEEPS):
        changed = False
        for start in range(1, count):
            last = torch.arange(start + 1, count + 1)
            before, begin = path[start - 1], path[start]
            joined = distance[before, path[last]] + distance[begin, path[last + 1]]
            gain = distance[before, begin] + distance[path[last], path[last + 1]] - joined
            best = int(gain.argmax())
            if gain[best] > 0:
                stop = start + 1 + best
                path[start : stop + 1] = path[start : stop + 1].flip(0)
                changed = True
        if not changed:
            break
    return path[1:-1]

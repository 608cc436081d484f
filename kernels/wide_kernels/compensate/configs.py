"""Tile shapes of `compensate`."""

from __future__ import annotations

import torch

from wide_kernels.dispatch import is_hopper
from wide_kernels.tuning.lookup import overlapped, tuned
from wide_kernels.tuning.tiles import padded_rows

OVERLAPPED_ROWS = 1024  # start while the launch before them ends


def tile_config(rows: int, columns: int, width: int, dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """The product is shallow (`width` columns of the weight): tiles wait for the residual stream, so that it pays to
    have three of them on a multiprocessor. Steps of 32, not 64, leave them the registers.
    """
    config = {"BM": 64, "BN": 128, "BK": 32, "num_warps": 8, "num_stages": 2}
    config["PDL"] = int(rows <= OVERLAPPED_ROWS and is_hopper(device))
    config |= tuned("compensate", rows, width, dtype)
    config["BM"] = min(config["BM"], padded_rows(rows))
    config["BN"] = min(config["BN"], padded_rows(columns))
    config["BK"] = min(config["BK"], padded_rows(width))
    return overlapped(config)

"""Tile shapes of `compensate`."""

from __future__ import annotations

import torch

from wide_kernels.dispatch import is_hopper
from wide_kernels.tuning.lookup import overlapped, tuned
from wide_kernels.tuning.tiles import padded_rows

LEFT_ROWS, LEFT_COLUMNS = 16, 256  # of the left operand, that a program makes
WALKING_ROWS = 4096  # from here on rows alone make programs enough to keep every multiprocessor busy
WIDEST_WALK = 256  # columns of the left operand that fit into registers
NARROW = 64  # columns of it that leave room for long steps along the output


def left_config(width: int, device: torch.device) -> dict[str, int]:
    """Of the launch that writes the left operand's `width` columns."""
    columns = min(LEFT_COLUMNS, padded_rows(width))
    return overlapped({"BM": LEFT_ROWS, "BP": columns, "num_warps": 4, "PDL": int(is_hopper(device))})


def tile_config(rows: int, columns: int, width: int, dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """`width`: columns of the left operand. 32 of them a step: 144 (112 groups, rank 32) then leave a tenth unused."""
    config = {"BM": 128, "BN": 128, "BK": 32, "num_warps": 4, "num_stages": 3}
    if dtype is torch.float32:
        config |= {"BM": 64, "num_warps": 8, "num_stages": 2}
    config |= {"PDL": int(is_hopper(device))} | tuned("compensate", rows, width, dtype)
    config["BM"] = min(config["BM"], padded_rows(rows))
    config["BN"] = min(config["BN"], padded_rows(columns))
    config["BK"] = min(config["BK"], padded_rows(width))
    return overlapped(config)


def walk_config(rows: int, columns: int, width: int, dtype: torch.dtype, device: torch.device) -> dict[str, int] | None:
    """For very many rows; None where tiles serve better. 16384 rows of 4096 columns, H200: 100 us against 130 in tiles
    at a width of 144, 73 against 101 at one of 48; a copy takes 66.
    """
    if rows < WALKING_ROWS or width > WIDEST_WALK or dtype is torch.float32:
        return None
    config = {"BM": 128, "BN": 64, "SPAN": 1024, "num_warps": 8, "STAGES": 2}
    if width <= NARROW:
        config = {"BM": 64, "BN": 128, "SPAN": 1024, "num_warps": 4, "STAGES": 3}
    config |= {"PDL": int(is_hopper(device))} | tuned("compensate_walk", rows, width, dtype)
    config["FIRST"] = 1 << (width.bit_length() - 1)
    config["REST"] = 0 if config["FIRST"] == width else padded_rows(width - config["FIRST"])
    return overlapped(config)

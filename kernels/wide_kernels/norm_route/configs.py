"""Tile shapes of `norm_route`."""

from __future__ import annotations

import torch

from wide_kernels.dispatch import is_hopper
from wide_kernels.tuning.lookup import overlapped, tuned
from wide_kernels.tuning.tiles import padded_rows

ENOUGH_PROGRAMS = 128  # about one a multiprocessor of an H100; the rule only has to be near
CHUNKS = (512, 256, 128)
PIECE = 64
NORMALISED_AT_ONCE = 16384  # elements; many are under way at one time

PACKED_RANK = 32  # of a router whose pieces fit beside a bypass into the registers of one product
FEW_ROWS = 8  # rows that are served one by one: more read w1 too often
_ROW_TILE = 8192  # values that a program of a row holds at one time, of w1; of all chunks' sums with zeros twice that


def chunk_config(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """Rows and columns of a tile: large ones read w1 seldom, small ones occupy the GPU when there are few rows.

    Among the chunk lengths the one that pads D least counts, then the longest. D stands for the width of a group in the
    key of what the tuner found. With TOGETHER = 0 the norm waits for a launch of its own instead of for its neighbours.
    """
    block = 64
    lengths = sorted(CHUNKS, key=lambda length: (-(-size // length) * length, -length))
    length = lengths[0]

    def programs() -> int:
        return -(-rows // block) * -(-size // length)

    while programs() < ENOUGH_PROGRAMS and length > 128:
        length //= 2
    while programs() < ENOUGH_PROGRAMS and block > 16:
        block //= 2
    config = {"BM": block, "BD": length, "BK": PIECE, "BG": 16 if block == 16 else 64, "num_warps": 4, "num_stages": 3}
    config |= {"TOGETHER": 1, "PDL": int(is_hopper(device))} | tuned("norm_route", rows, size, dtype)
    return overlapped({"BN": min(config["BD"], max(PIECE, NORMALISED_AT_ONCE // config["BM"]))} | config)


def row_config(rows: int, size: int, rank: int, dtype: torch.dtype, device: torch.device) -> dict[str, int] | None:
    """For a few rows: each is cut into chunks of BD; None where tiles of rows serve better.

    `rank`: of the router or the bypass, the larger, padded.
    """
    if rows > FEW_ROWS:
        return None
    config = {"BD": min(128, _ROW_TILE // rank), "BG": 16, "num_warps": 4, "TOGETHER": 1, "PDL": int(is_hopper(device))}
    config |= tuned("norm_row", rows, size, dtype)
    chunks = padded_rows(-(-size // config["BD"]))
    if config["BD"] < 16 or chunks * rank > _ROW_TILE:
        return None
    return overlapped(config | {"CP": chunks})

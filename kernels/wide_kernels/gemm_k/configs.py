"""Tile shapes of the GEMM-K kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from wide_kernels.gemm_k.segments import TILE_ROWS, segment_length
from wide_kernels.tuning.lookup import tuned
from wide_kernels.tuning.tiles import largest_power, padded_rows

CHANNEL_STEP = 64  # of the kernel for Hopper: 128 bytes, a swizzled row in shared memory
FEW_ROWS = 128  # up to here the mask is read as it is; above, rows sorted by pattern are faster
FEW_FIXED_ROWS = 512  # the same for sums in a fixed order: a launch a segment costs more than some rows too many
MANY_ROWS = 512  # from here on segments are long enough for few roundings, and scattering fp32 costs most of the time
SLAB_BYTES = 32 << 20  # of the output: what stays in a 50 MB L2 beside the operands; scattering there is twice as fast
HOPPER_SLAB_BYTES = 16 << 20  # its kernel runs at the speed at which L2 feeds it, so the operands get more of it
HOPPER_CHANNELS = 2048  # in a segment: multiplying them hides the scatter; more only make tiles less alike


def tile_config(rows: int, columns: int, width: int, dtype: torch.dtype) -> dict[str, int]:
    """For many rows. A step of the K loop must divide the group, so narrow groups get shallow steps."""
    single = dtype is torch.float32
    config = {"BM": 128, "BN": 128 if single else 256, "BK": 32 if single else 64, "num_warps": 8, "num_stages": 3}
    config |= tuned("gemm_k", rows, width, dtype)
    config["BM"] = min(config["BM"], padded_rows(rows))
    config["BN"] = min(config["BN"], padded_rows(columns))
    config["BK"] = largest_power(width, config["BK"])
    return config


def hopper_config(rows: int, columns: int, width: int) -> dict[str, int]:
    """For many rows on Hopper: STAGES x (128 + BN) x 128 bytes and BUFFERS x 128 x BN of its 227 KB of shared memory.

    Registers of a thread: three warpgroups share 64 K, the first multiplying one takes what the others leave.
    """
    config = {"BN": 256, "STAGES": 4, "BUFFERS": 1}
    config |= {"MULTIPLY_REGISTERS": 192, "MOVE_REGISTERS": 120}
    config |= tuned("hopper_k", rows, width, torch.bfloat16)
    config["BN"] = min(config["BN"], max(64, padded_rows(columns)))
    return config


@dataclass(frozen=True)
class Order:
    """`segment`: groups whose rows are sorted together and scattered once; `slab_bytes` of the output are finished
    before the next ones start."""

    segment: int
    slab_bytes: int


def tile_order(rows: int, groups: int, width: int, dtype: torch.dtype, hopper: bool = False) -> Order:
    """In which order tiles come; Hopper's kernel takes half a tile's rows by themselves."""
    found = tuned("gemm_k_order", rows, width, dtype)
    if hopper:
        segment = min(segment_length(rows, groups, TILE_ROWS // 2), max(1, HOPPER_CHANNELS // width))
    else:
        segment = segment_length(rows, groups)
    slab = HOPPER_SLAB_BYTES if hopper else SLAB_BYTES
    return Order(found.get("S", segment), found.get("SLAB_MB", slab >> 20) << 20)


def slab_columns(rows: int, columns: int, item_bytes: int, column_tile: int, slab_bytes: int) -> int:
    """Columns of the output in a slab, a multiple of the column tile."""
    tiles = max(1, slab_bytes // (rows * item_bytes * column_tile))
    return min(tiles * column_tile, -(-columns // column_tile) * column_tile)

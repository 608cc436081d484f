"""Tile shapes of the GEMM-MN kernels. Shared memory: STAGES x (BM + BN, + BN gated) x BK x bytes."""

from __future__ import annotations

import torch

from wide_kernels.tuning.lookup import tuned
from wide_kernels.tuning.tiles import largest_power, padded_rows

HOPPER_DEPTH = 64  # K of a ring stage in Gluon's kernel: rows of 128 bytes, the widest swizzle
FEW_ROWS = 128  # up to here the mask is read as it is; above, tiles of gathered rows are faster
_RING_BYTES = 221 << 10  # of Hopper's 227 KB; the rest is for barriers and for turning results round


def hopper_config(rows: int, width: int, gated: bool, dtype: torch.dtype) -> dict[str, int]:
    """For Gluon's kernel, 128 accumulators a consumer thread: tiles of 256 x 128, or 128 x 256 (gate and up side by
    side, or a wide group). 3 x 128 threads share 64 K registers: 168 each, given from the producers to the consumers.
    """
    found = tuned("hopper_gated" if gated else "hopper_mn", rows, width, dtype)
    config = {"BN": largest_power(width, found.get("BN", 128 if gated else 256))}
    accumulated = config["BN"] * (2 if gated else 1)
    config = {"BM": 256 if accumulated <= 128 and rows > 1024 else 128, "BK": HOPPER_DEPTH, "BAND": 8} | config
    config |= {"CONSUMER_REGISTERS": 216, "PRODUCER_REGISTERS": 72, "num_warps": 4, "maxnreg": 168}
    config["STAGES"] = min(_RING_BYTES // ((config["BM"] + accumulated) * HOPPER_DEPTH * 2), 8)
    return {**config, **found, "BN": config["BN"]}


def hopper_refusal(rows: int, depth: int, elements: int) -> dict[str, str]:
    """As Problem.refused, what Gluon's kernel does not take: few rows, a ragged K, an x beyond its int32 units."""
    if rows <= FEW_ROWS:
        return {"gluon": f"it needs more than {FEW_ROWS} rows"}
    if depth % HOPPER_DEPTH:
        return {"gluon": f"K must be a multiple of {HOPPER_DEPTH}, got {depth}"}
    if elements >= 1 << 34:
        return {"gluon": "x must have fewer than 2^34 elements"}
    return {}


def tile_config(rows: int, depth: int, width: int, gated: bool, dtype: torch.dtype) -> dict[str, int]:
    """For many rows: a column tile must divide the group, so narrow groups get narrow tiles."""
    wide = largest_power(width, 128)
    config = {"BM": 128, "BN": wide, "BK": 64, "BAND": 8, "num_warps": 8 if gated or wide > 64 else 4, "num_stages": 3}
    config |= tuned("gated_mlp_up" if gated else "gemm_mn", rows, width, dtype)
    config["BN"] = largest_power(width, config["BN"])
    config["BM"] = min(config["BM"], padded_rows(rows))
    if dtype is torch.float32:  # twice the shared memory
        config["BK"] //= 2
    config["BK"] = min(config["BK"], padded_rows(depth))
    return config

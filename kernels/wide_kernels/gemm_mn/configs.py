"""Tile shapes of the Triton GEMM-MN kernels. Shared memory: STAGES x (BM + BN, + BN gated) x BK x bytes."""

from __future__ import annotations

import torch

from wide_kernels.tuning.table import forced
from wide_kernels.tuning.tiles import largest_power, padded_rows


def tile_config(rows: int, depth: int, width: int, gated: bool, dtype: torch.dtype) -> dict[str, int]:
    """For many rows: a column tile must divide the group, so narrow groups get narrow tiles."""
    wide = largest_power(width, 128)
    config = {"BM": 128, "BN": wide, "BK": 64, "BAND": 8, "num_warps": 8 if gated or wide > 64 else 4, "num_stages": 3}
    config |= forced("gated_mlp_up" if gated else "gemm_mn", width)
    config["BM"] = min(config["BM"], padded_rows(rows))
    return _fit(config, depth, dtype)


def _fit(config: dict[str, int], depth: int, dtype: torch.dtype) -> dict[str, int]:
    """fp32 takes twice the shared memory; a shallow product needs no deeper tile than itself."""
    if dtype is torch.float32:
        config["BK"] //= 2
    config["BK"] = min(config["BK"], padded_rows(depth))
    return config

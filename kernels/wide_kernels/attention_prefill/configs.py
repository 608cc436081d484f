"""Tile shapes of the prefill kernels. Shared memory: BM x d of queries and STAGES x 2 x BN x d of keys and values."""

from __future__ import annotations

import math

import torch

from wide_kernels.tuning.table import forced
from wide_kernels.tuning.tiles import largest_power, padded_rows


def packed_heads(group_heads: int, shared_heads: int, limit: int = 64) -> int:
    """How many query heads become rows of one tile: neighbours that share both their group and their KV head."""
    return largest_power(math.gcd(group_heads, shared_heads), limit)


def tile_config(tokens: int, group_heads: int, shared_heads: int, size: int, dtype: torch.dtype) -> dict[str, int]:
    """PACK heads x BM / PACK tokens a tile, BN keys a step.

    Packing costs nothing and makes a tile span fewer positions: less of it lies across the causal border.
    """
    config = {"BM": 128, "BN": 64, "PACK": 4, "num_warps": 8, "num_stages": 3}
    if size > 128:  # the accumulators fill the registers
        config |= {"BN": 32, "num_stages": 2}
    if dtype is torch.float32:
        config |= {"BM": 64, "BN": 32, "num_warps": 4 if size <= 64 else 8, "num_stages": 2}
    config |= forced("attention_prefill")
    config["PACK"] = packed_heads(group_heads, shared_heads, config["PACK"])
    config["BM"] = max(16, min(config["BM"], padded_rows(tokens) * config["PACK"]))
    if config["BM"] <= 64:
        config["num_warps"] = min(config["num_warps"], 4)
    return config


def hopper_config(tokens: int, group_heads: int, shared_heads: int, size: int) -> dict[str, int]:
    """128 rows; two buffers of 128 keys and values of 128 channels fill most of the shared memory.

    Short prompts spend much of their time at the causal border, where narrower blocks waste less.
    """
    config = {"BN": 128, "PACK": 4, "STAGES": 2} if tokens > 4096 else {"BN": 64, "PACK": 4, "STAGES": 3}
    config |= forced("attention_prefill_hopper")
    config["PACK"] = packed_heads(group_heads, shared_heads, config["PACK"])
    return config

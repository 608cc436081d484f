"""Shapes of the decode kernels. Shared memory: STAGES x 2 x BN x d of keys and values."""

from __future__ import annotations

import torch

from wide_kernels.dispatch import multiprocessors
from wide_kernels.tuning.table import forced

MAX_PAIRS = 4096  # (sequence, KV head) pairs that one launch sorts in registers


def decode_config(size: int, dtype: torch.dtype, device: torch.device, blocks_of: int) -> dict[str, int]:
    """BN keys a step, PROGRAMS over the whole device; `blocks_of` is the number of keys of all pairs together.

    Enough bytes must be in flight: about 100 KB a processor. Two programs a processor overlap their first loads and
    their last products.
    """
    config = {"BN": 64, "EACH": 2, "num_warps": 4, "num_stages": 3}
    if size > 128 or dtype is torch.float32:
        config["BN"] = 32
    if size > 128 and dtype is torch.float32:
        config["BN"] = 16
    if config["BN"] == 64 and blocks_of < 64 * config["EACH"] * multiprocessors(device):
        config["BN"] = 32  # else some would have nothing to do
    config |= forced("attention_decode")
    programs = config.pop("EACH") * multiprocessors(device)
    return config | {"PROGRAMS": max(1, min(programs, -(-blocks_of // config["BN"])))}


def hopper_config(device: torch.device) -> dict[str, int]:
    """PROGRAMS over the whole device, EACH of them a processor; KEYS a warp and step, of which STAGES are in memory.

    Every program must be resident, since they wait for each other. SLOTS: at most as many share one pair.
    """
    config = {"EACH": 1, "num_warps": 4, "KEYS": 16, "STAGES": 6} | forced("hopper_decode")
    programs = config.pop("EACH") * multiprocessors(device)
    return config | {"PROGRAMS": programs, "SLOTS": min(128, 1 << (programs - 1).bit_length())}

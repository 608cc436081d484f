"""The static KV cache: [B, capacity, H_k, d] a layer, whole whatever the tokens skipped."""

from __future__ import annotations

from pathlib import Path

import torch

from widecli.errors import UsageError
from widecli.model.plan import ModelShape

_GIB = 1024**3
_LEFT_FOR_THE_REST = 0.9  # of the free memory: activations and graphs need some too


class KVCache:
    """Keys and values of every layer. Sequence b's token at position p lies in slot p: prompts are padded on the right.

    So positions are slots, no padding is ever visible to a real token (it comes later), a dense prefill is plainly
    causal, which the fastest library calls want, and the slots of the padding are overwritten by what is generated.
    """

    def __init__(self, shape: ModelShape, batch: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.batch = batch
        self.capacity = capacity
        size = (batch, capacity, shape.num_key_value_heads, shape.head_dim)
        # zeros, not empty: unseen slots meet a weight of 0, and 0 x NaN is NaN
        self.k = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_hidden_layers)]
        self.v = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_hidden_layers)]
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.first_slots = capacity * torch.arange(batch, device=device)  # in the flat view [B * capacity, H_k, d]
        self.everything = torch.ones(batch, 1, dtype=torch.bool, device=device)  # the mask of a dense step
        self.nothing = self.everything[:1, :0]  # of one row whose groups are none


def cache_bytes(shape: ModelShape, batch: int, capacity: int, dtype: torch.dtype) -> int:
    """Bytes of such a cache."""
    per_token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * dtype.itemsize
    return batch * capacity * per_token


def check_memory(shape: ModelShape, batch: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise UsageError when the cache does not fit in the device's free memory, with the largest that does."""
    free = free_bytes(device)
    needed = cache_bytes(shape, batch, capacity, dtype)
    if free is None or needed <= free * _LEFT_FOR_THE_REST:
        return
    tokens = int(free * _LEFT_FOR_THE_REST) // cache_bytes(shape, 1, 1, dtype)
    fits = [f"{tokens // batch} tokens for each of {batch} sequences"] if tokens >= batch else []
    if batch > 1 and tokens >= capacity:
        fits.insert(0, f"{tokens // capacity} sequences of {capacity} tokens")
    raise UsageError(
        f"a cache for {batch} sequences of {capacity} tokens needs {needed / _GIB:.1f} GiB and {free / _GIB:.1f} GiB "
        f"are free on {device}; the largest that fits: {' or '.join(fits) or 'none'}"
    )


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device; None where the system does not tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # what the allocator holds without using it serves the cache as well
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    available = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if available is None else int(available) * 1024

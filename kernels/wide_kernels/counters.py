"""Counters in device memory that a kernel leaves as it needs to find them: no launch is spent on clearing.

Two launches at the same time must not share them. Launches of one stream come one after the other, so each stream has
its own, for each use; a launch that is captured into a CUDA graph gets some that nothing else ever uses, because a
graph may be replayed beside anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

CAPTURED = 1 << 20  # counters set aside for captured launches of one device: 4 MB
EAGER = 4096  # at first, for a use and stream

_of_stream: dict[tuple[str, str, int | None, int], Tensor] = {}
_for_graphs: dict[int, tuple[Tensor, int]] = {}  # and how many are taken


def counters(use: str, device: torch.device, size: int) -> Tensor:
    """At least `size` int32 on `device`, zero at first; `use` names the kernels that agree on how to leave them."""
    if device.type != "cuda":
        return _stream_counters(use, device, size, 0)
    index = torch.cuda.current_device() if device.index is None else device.index
    if torch.cuda.is_current_stream_capturing():
        return _captured_counters(index, device, size)
    if index not in _for_graphs:  # memory for graphs must be there and cleared before a capture begins
        _for_graphs[index] = (torch.zeros(CAPTURED, dtype=torch.int32, device=device), 0)
        torch.cuda.synchronize(index)  # once: graphs that run on other streams read it
    return _stream_counters(use, device, size, torch.cuda.current_stream(index).cuda_stream)


def _stream_counters(use: str, device: torch.device, size: int, stream: int) -> Tensor:
    key = (use, device.type, device.index, stream)
    found = _of_stream.get(key)
    if found is None or found.numel() < size:
        found = _of_stream[key] = torch.zeros(max(EAGER, size), dtype=torch.int32, device=device)
    return found


def _captured_counters(index: int, device: torch.device, size: int) -> Tensor:
    slab, taken = _for_graphs.get(index, (None, 0))
    if slab is None or taken + size > CAPTURED:  # no call came before the capture: the graph clears its own each time
        return torch.zeros(size, dtype=torch.int32, device=device)
    _for_graphs[index] = (slab, taken + size)
    return slab[taken : taken + size]

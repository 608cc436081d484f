"""Counters that are zero between launches: the programs of a kernel count themselves, the last one resets.

Two launches at the same time must not share them. Launches of one stream come one after the other, so each stream has
its own; a launch that is captured into a CUDA graph gets some that nothing else ever uses, because a graph may be
replayed beside anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

CAPTURED = 1 << 20  # counters set aside for captured launches of one device: 4 MB

_of_stream: dict[tuple[str, int | None, int], Tensor] = {}
_for_graphs: dict[int, tuple[Tensor, int]] = {}  # and how many are taken


def arrival_counters(device: torch.device, size: int) -> Tensor:
    """At least `size` int32 zeros on `device`, the current one, for a kernel that leaves them zero."""
    if device.type != "cuda":
        return _stream_counters(device, size, 0)
    if torch.cuda.is_current_stream_capturing():
        return _captured_counters(device, size)
    index = device.index or 0
    if index not in _for_graphs:  # memory for graphs must be there and cleared before a capture begins
        _for_graphs[index] = (torch.zeros(CAPTURED, dtype=torch.int32, device=device), 0)
        torch.cuda.current_stream(device).synchronize()
    return _stream_counters(device, size, torch.cuda.current_stream(device).cuda_stream)


def _stream_counters(device: torch.device, size: int, stream: int) -> Tensor:
    key = (device.type, device.index, stream)
    found = _of_stream.get(key)
    if found is None or found.numel() < size:
        found = _of_stream[key] = torch.zeros(max(1024, 1 << (size - 1).bit_length()), dtype=torch.int32, device=device)
    return found


def _captured_counters(device: torch.device, size: int) -> Tensor:
    slab, taken = _for_graphs.get(device.index or 0, (None, 0))
    if slab is None or taken + size > CAPTURED:  # no call came before the capture: the graph clears its own each time
        return torch.zeros(size, dtype=torch.int32, device=device)
    _for_graphs[device.index or 0] = (slab, taken + size)
    return slab[taken : taken + size]

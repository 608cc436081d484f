"""Counters in device memory that a kernel leaves as it needs to find them: no launch is spent on clearing.

Two launches at the same time must not share them. Launches of one stream come one after the other, so each stream has
its own, for each use; what is captured into a CUDA graph gets some that nothing else ever uses, because a graph may be
replayed beside anything. Launches captured on one stream into one graph come one after the other again and share them,
where the driver tells captures apart.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

CAPTURED = 1 << 20  # counters set aside for a use's captured launches on one device, at least: 4 MB
CAPTURED_LAUNCHES = 128  # and for as many launches as the first, which suffices for a graph of a whole model
EAGER = 4096  # at first, for a use and stream

_of_stream: dict[tuple[str, str, int | None, int], Tensor] = {}
_for_graphs: dict[tuple[str, int], tuple[Tensor, int]] = {}  # and how many are taken
_of_capture: dict[tuple[str, int], tuple[tuple[int, int], Tensor]] = {}  # the last capture and stream that took some


def counters(use: str, device: torch.device, size: int) -> Tensor:
    """At least `size` int32 on `device`, zero at first; `use` names the kernels that agree on how to leave them."""
    if device.type != "cuda":
        return _stream_counters(use, device, size, 0)
    index = torch.cuda.current_device() if device.index is None else device.index
    if torch.cuda.is_current_stream_capturing():
        return _captured_counters(use, index, device, size)
    if (use, index) not in _for_graphs:  # memory for graphs must be there and cleared before a capture begins
        aside = max(CAPTURED, CAPTURED_LAUNCHES * size)
        _for_graphs[use, index] = (torch.zeros(aside, dtype=torch.int32, device=device), 0)
        torch.cuda.synchronize(index)  # once: graphs that run on other streams read it
    return _stream_counters(use, device, size, torch.cuda.current_stream(index).cuda_stream)


def _stream_counters(use: str, device: torch.device, size: int, stream: int) -> Tensor:
    key = (use, device.type, device.index, stream)
    found = _of_stream.get(key)
    if found is None or found.numel() < size:
        found = _of_stream[key] = torch.zeros(max(EAGER, size), dtype=torch.int32, device=device)
    return found


def _captured_counters(use: str, index: int, device: torch.device, size: int) -> Tensor:
    stream = torch.cuda.current_stream(index).cuda_stream
    capture = capture_number(stream)
    place, found = _of_capture.get((use, index), (None, None))
    if capture is not None and found is not None and place == (capture, stream) and found.numel() >= size:
        return found
    slab, taken = _for_graphs.get((use, index), (None, 0))
    if slab is None or taken + size > slab.numel():  # no call came before the capture: the graph clears its own
        return torch.zeros(size, dtype=torch.int32, device=device)
    _for_graphs[use, index] = (slab, taken + size)
    found = slab[taken : taken + size]
    if capture is not None:
        _of_capture[use, index] = ((capture, stream), found)
    return found


def capture_number(stream: int) -> int | None:
    """What distinguishes the capture under way on a stream from all others of this process; None if nobody says."""
    ask = _driver_call()
    if ask is None:
        return None
    status, number = ctypes.c_int(), ctypes.c_uint64()
    failed = ask(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number))
    return None if failed or status.value != 1 else number.value


@cache
def _driver_call() -> Callable[..., int] | None:
    """cuStreamGetCaptureInfo in its first form, which PyTorch does not hand on."""
    try:
        found: Callable[..., int] = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo
    except (OSError, AttributeError):
        return None
    return found

"""Programs of one launch that wait for each other, instead of a second launch.

A counter is one int32. Each program adds 1, the first one as much as is missing to 2^31: when all have come, the top
bit has changed and the others are zero again, so a counter is never cleared and may serve any number of programs. A
GPU starts programs in the order of their numbers; those that wait for each other have adjacent numbers and are few
enough to be all resident (the launcher sees to that), so the group started first always gets on.

Two launches that run at once must not share counters. Calls on one stream never run at once, so they share that
stream's; a graph may be replayed on any stream, so each captured call has counters of its own, for good.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

EAGER = 4096
RESERVE = 1 << 18

_by_stream: dict[tuple[int, int], Tensor] = {}
_reserve: dict[int, Tensor] = {}
_taken: dict[int, int] = {}


@triton.jit
def meet(counter, program, programs):
    """Wait until all `programs` that share `counter` are here; what they stored before can be read after.

    Read it with cache_modifier=".cg": the first-level cache is not shared.
    """
    tl.debug_barrier()
    amount = tl.where(program == 0, 0x7FFFFFFF - (programs - 2), 1)
    before = tl.atomic_add(counter, amount, sem="acq_rel", scope="gpu")
    while (before ^ tl.atomic_add(counter, 0, sem="acq_rel", scope="gpu")) >= 0:
        pass
    tl.debug_barrier()


@cache
def processors(device: int) -> int:
    """How many multiprocessors the GPU has: as many programs at least can be resident."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def counters(device: torch.device, count: int) -> Tensor:
    """`count` counters for one launch on the current stream of the current CUDA device."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    if torch.cuda.is_current_stream_capturing():
        first = _taken.get(index, 0)
        if index in _reserve and first + count <= RESERVE:
            _taken[index] = first + count
            return _reserve[index][first : first + count]
        return torch.zeros(count, dtype=torch.int32, device=device)  # cleared at every replay: right, but a launch
    if index not in _reserve:
        _reserve[index] = torch.zeros(RESERVE, dtype=torch.int32, device=device)
        torch.cuda.synchronize(index)  # once: graphs that run on other streams read it
    key = (index, torch.cuda.current_stream(index).cuda_stream)
    if key not in _by_stream or _by_stream[key].numel() < count:
        _by_stream[key] = torch.zeros(max(EAGER, count), dtype=torch.int32, device=device)
    return _by_stream[key]

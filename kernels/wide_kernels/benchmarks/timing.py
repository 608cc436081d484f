"""Interleaved timing on a GPU: one call of each candidate in turn, L2 flushed before every one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch

FLUSH_BYTES = 256 << 20  # several times the largest L2
Call = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """Milliseconds over `n` calls."""

    p50_ms: float
    p90_ms: float
    min_ms: float
    n: int

    def as_dict(self) -> dict[str, float | int]:
        """For JSON."""
        return asdict(self)


def captured(call: Call) -> Call:
    """The call as a CUDA graph, so that the device is timed and not Python; also proves that it can be one."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def interleaved(calls: Mapping[str, Call], rounds: int) -> dict[str, Times]:
    """Median, 90th percentile and minimum of each call; all take turns, so a drift of the clock hits all alike."""
    flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
    pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for turn in range(rounds + 2):
        for name, call in calls.items():
            begin, end = _event(), _event()
            flush.sum()  # reads: lines left by writes would have to go to memory while the call runs
            begin.record()
            call()
            end.record()
            if turn >= 2:  # the first two turns warm up
                pairs[name].append((begin, end))
    torch.cuda.synchronize()
    found = {}
    for name, events in pairs.items():
        times = sorted(begin.elapsed_time(end) for begin, end in events)
        found[name] = Times(statistics.median(times), times[int(0.9 * (len(times) - 1))], times[0], len(times))
    return found


def peak_extra_bytes(call: Call) -> int:
    """Memory that one call takes at its peak, its result included, beyond what is allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def launched_kernels(call: Call) -> list[str]:
    """Names of the device kernels that one call launches, in order."""
    from torch.profiler import ProfilerActivity, profile

    call()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        call()
        torch.cuda.synchronize()
    events = [event for event in record.events() or [] if str(event.device_type).endswith("CUDA")]
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]

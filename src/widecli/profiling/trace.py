"""Where a step's time goes: device time by the engine's named ranges, from the trace of steps without graphs.

A kernel belongs to the range in which the host launched it. What a measured step takes beyond its kernels is its launch
gaps. On a CPU the ranges' own durations stand in for kernels.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from widecli.engine.ranges import RANGES, named_ranges
from widecli.model.plan import ModelShape

PREFIX = "wide::"
OTHER = "other"
GAPS = "launch_gaps"
PARTS = (*RANGES, OTHER, GAPS)
"""Every part a breakdown may name, in order."""

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


def range_times(run: Callable[[], object], device: torch.device, repeats: int) -> dict[str, float]:
    """Milliseconds of each part in one `run`, averaged over `repeats`; `run` must not replay a graph."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with named_ranges():
        run()
        with _native_code_quiet(), profile(activities=activities) as record:
            for _ in range(repeats):
                run()
            if on_gpu:
                torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    found = device_times(events) if on_gpu else host_times(events)
    return {part: value / repeats for part, value in found.items()}


@contextlib.contextmanager
def _native_code_quiet() -> Iterator[None]:
    """The profiler's library reports its own start and stop on descriptor 2, and has no setting against it."""
    if os.environ.get("WIDE_DEBUG"):
        yield
        return
    sys.stderr.flush()
    kept = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nothing)
        os.close(kept)


def device_times(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds of device work by the range in which it was launched; without one it is `other`.

    A kernel that starts while the one before it still runs counts from that one's end: until then it mostly waits. (Or
    runs beside it, as the counting does beside the LM head: the sum is the time in which anything ran.)
    """
    ranges = _ranges(events)
    starts = [begin for begin, _, _ in ranges]
    launched: dict[int, float] = {}
    for event in events:
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {}):
            launched[event["args"]["correlation"]] = event["ts"]
    times: dict[str, float] = {}
    busy = float("-inf")  # until then
    for event in sorted((event for event in events if event.get("cat") in _ON_DEVICE), key=lambda event: event["ts"]):
        end = event["ts"] + event["dur"]
        part = OTHER
        when = launched.get(event.get("args", {}).get("correlation", -1))
        if when is not None and (at := bisect.bisect_right(starts, when) - 1) >= 0 and when <= ranges[at][1]:
            part = ranges[at][2]
        times[part] = times.get(part, 0.0) + max(0.0, end - max(event["ts"], busy)) / 1e3
        busy = max(busy, end)
    return times


def host_times(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds of the ranges themselves."""
    times: dict[str, float] = {}
    for begin, end, part in _ranges(events):
        times[part] = times.get(part, 0.0) + (end - begin) / 1e3
    return times


def _ranges(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, float, str]]:
    """(begin, end, part) by their beginning; the engine's ranges never overlap."""
    return sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix(PREFIX))
        for event in events
        if event.get("cat") == "user_annotation" and str(event.get("name", "")).startswith(PREFIX)
    )


def breakdown(parts: Mapping[str, float], step_ms: float) -> dict[str, float]:
    """The parts in their order, and what is left of the measured step as launch gaps, never below 0.

    Empty when the profiler saw nothing: some machines do not let it read the device.
    """
    if not parts:
        return {}
    ordered = {part: parts[part] for part in PARTS if part in parts}
    return {**ordered, GAPS: max(0.0, step_ms - sum(parts.values()))}


def fixed_share(parts: Mapping[str, float], shape: ModelShape) -> float | None:
    """Share of a dense step that no decision can skip; of the fused QKV product, the K and V rows' share."""
    if not parts:
        return None
    query, kv = shape.num_attention_heads, 2 * shape.num_key_value_heads
    skippable = sum(parts.get(part, 0.0) for part in ("attention", "o", "gate_up", "down"))
    skippable += parts.get("qkv", 0.0) * query / (query + kv)
    return 1 - skippable / sum(parts.values())

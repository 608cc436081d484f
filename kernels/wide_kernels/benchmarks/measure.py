"""One case measured: errors, memory, what was launched, times, whether results repeat; as a plain record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wide_kernels.benchmarks import timing
from wide_kernels.benchmarks.cases import TimedCase
from wide_kernels.benchmarks.timing import Call, Times


def same_bits(first: Any, second: Any) -> bool:
    """Whether two results agree in every bit: tensors, or tuples, lists and objects of tensors."""
    if isinstance(first, Tensor):
        return bool(torch.equal(first, second))
    if isinstance(first, (tuple, list)):
        return all(same_bits(a, b) for a, b in zip(first, second, strict=True))
    return all(same_bits(value, vars(second)[key]) for key, value in vars(first).items())


def _divided(times: Times, repeats: int) -> Times:
    return replace(times, p50_ms=times.p50_ms / repeats, p90_ms=times.p90_ms / repeats, min_ms=times.min_ms / repeats)


def _affordable(calls: Mapping[str, Call]) -> tuple[dict[str, Call], dict[str, int], dict[str, str]]:
    """(captured calls, their peak memory, the ones for which memory did not suffice)."""
    graphs: dict[str, Call] = {}
    memory: dict[str, int] = {}
    failed: dict[str, str] = {}
    for name, call in calls.items():
        try:
            memory[name] = timing.peak_extra_bytes(call)
            graphs[name] = timing.captured(call)
        except torch.OutOfMemoryError:
            memory.pop(name, None)
            failed[name] = "out of memory"
    return graphs, memory, failed


def measured(case: TimedCase, rounds: int, kernels: dict[str, list[str]], slow_backends: bool) -> dict[str, Any]:
    """The record of one case. `kernels` remembers launched names by case, whatever the density.

    `slow_backends`: time the torch backend too, which skips nothing.
    """
    error = case.check()
    chosen = case.explanation.backend
    backends = {
        name: call for name, call in case.backends.items() if name != chosen and (slow_backends or name != "torch")
    }
    errors = {name: case.compare(call()) for name, call in backends.items()} if case.compare else {}
    key = f"{case.op} T={case.rows} G={case.group}"
    if key not in kernels:
        kernels[key] = timing.launched_kernels(case.routed)
    repeatable = same_bits(case.routed(), case.routed())
    named = {"routed": case.routed, **case.dense, **case.others}
    graphs, memory, failed = _affordable(named | {f"backend {name}": call for name, call in backends.items()})
    times = {name: _divided(t, case.repeats) for name, t in timing.interleaved(graphs, rounds).items()}
    best = min((name for name in case.dense if name in times), key=lambda name: times[name].p50_ms)
    routed = times["routed"].p50_ms
    return {
        "op": case.op,
        "rows": case.rows,
        "group_size": case.group,
        "density": case.density,
        "backend": chosen,
        "explain": str(case.explanation),
        "error": error,
        "checked_elements": case.checked_elements,
        "bitwise_repeatable": repeatable,
        "routed": times["routed"].as_dict(),
        "baselines": {name: times[name].as_dict() for name in (*case.dense, *case.others) if name in times},
        "backends": {
            chosen: times["routed"].as_dict() | {"error": error, "chosen": True},
            **{
                name: times[f"backend {name}"].as_dict() | {"error": errors.get(name), "chosen": False}
                for name in backends
                if f"backend {name}" in times
            },
        },
        "refused": dict(case.refused),
        "failed": failed,
        "best_dense": best,
        "speedup": times[best].p50_ms / routed,
        "tflops": case.flops / routed / 1e9,
        "peak_extra_bytes": memory,
        "repeats": case.repeats,
        "kernels": kernels[key],
    }

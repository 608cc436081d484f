"""`--patterns`: the grid of tokens that follow patterns, its records and its table."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from wide_kernels.benchmarks.cases import Sizes
from wide_kernels.benchmarks.measure import measured
from wide_kernels.benchmarks.parallel import Outcome
from wide_kernels.benchmarks.pattern_cases import BITS, PatternSizes, pattern_cases, read_histogram, wasted
from wide_kernels.benchmarks.shapes import model_shape

# (T, G, density): the two points of the targets first, then the other group size, then shorter prompts.
GRID = tuple((rows, group, 0.5) for rows in (16384, 4096, 1024) for group in (16, 128, 32))
HEADER = (
    f"{'operator':15}{'T':>6}{'G':>5}{'C':>5} {'frequency':10}{'us':>9}{'dense':>8}{'bits':>8}{'TF/s':>6}{'waste':>7}"
    f"{'error':>9}  backends"
)


def pattern_points(arguments: argparse.Namespace, dtype: torch.dtype) -> list[PatternSizes]:
    """Points by importance: all frequencies of the first count of patterns, then the other counts."""
    model = model_shape(arguments.model)
    frequencies: dict[str, tuple[float, ...]] = {"even": (), "zipf": ()}
    if arguments.histogram is not None:
        frequencies["measured"] = read_histogram(arguments.histogram)
    grid = [point for point in arguments.points or GRID if model.intermediate_size % point[1] == 0]
    return [
        PatternSizes(Sizes(model, rows, group, density, dtype), count, frequency, histogram)
        for count in arguments.counts
        for rows, group, density in grid
        for frequency, histogram in frequencies.items()
    ]


@dataclass(frozen=True)
class PatternWarmTask:
    """Run every operator once at a point, on all backends, so that it is compiled."""

    point: PatternSizes
    ops: frozenset[str]

    def __call__(self) -> Outcome:
        """Run it; a failure is a note, the timing process will meet it again."""
        try:
            for case in pattern_cases(self.point, set(self.ops)):
                for call in (case.routed, *case.others.values(), *case.dense.values()):
                    call()
                for name in case.backends.keys() - {"torch"}:
                    case.backends[name]()
            torch.cuda.synchronize()
        except Exception as failure:
            return Outcome(notes=[f"{self.point}: {type(failure).__name__}: {str(failure)[:200]}"])
        finally:
            torch.cuda.empty_cache()
        return Outcome()


def warm_tasks(points: list[PatternSizes], ops: set[str]) -> list[PatternWarmTask]:
    """One task for each kernel to compile: frequencies share theirs, and only choice and layout know C."""
    counted = frozenset({"norm_route_patterns", "pattern_layout"})
    products = {"gemm_mn", "gated_mlp_up", "gemm_k"} if "ffn" in ops else ops - counted
    sizes = {(point.sizes.rows, point.sizes.group): point for point in points}
    tasks = [PatternWarmTask(point, frozenset({op})) for point in sizes.values() for op in sorted(products)]
    layouts = {(point.sizes.groups, point.count): point for point in points}
    return tasks + [PatternWarmTask(point, counted) for point in layouts.values()]


def measure_patterns(
    points: list[PatternSizes], ops: set[str], rounds: int, deadline: float
) -> Iterator[dict[str, Any]]:
    """One record for each case, or one that says what was left out when the time budget ended."""
    from wide_kernels.pattern_layout import pattern_layout

    kernels: dict[str, list[str]] = {}
    for point in points:
        if time.monotonic() > deadline:
            yield {"left_out": str(point)}
            continue
        waste = wasted(pattern_layout(*point.decision()))
        for case in pattern_cases(point, ops):
            yield {
                "model": point.sizes.model.name,
                "dtype": str(point.sizes.dtype).removeprefix("torch."),
                "patterns": point.count,
                "frequency": point.frequency,
                "waste": waste,
                **measured(case, rounds, kernels, slow_backends=False),
            }
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def pattern_row(record: dict[str, Any]) -> str:
    """One line of the table; dense and bits: how many times faster than those."""
    if "left_out" in record:
        return f"left out, the time budget ended: {record['left_out']}"
    routed = record["routed"]["p50_ms"]
    bits = record["baselines"].get(BITS)
    beside = f"{bits['p50_ms'] / routed:>7.2f}x" if bits else f"{'':>8}"
    backends = ", ".join(
        f"{name} {times['p50_ms'] * 1e3:.1f}{'*' if times['chosen'] else ''}"
        for name, times in record["backends"].items()
    )
    known = (BITS, record["best_dense"])
    backends += "".join(
        f", {name} {times['p50_ms'] * 1e3:.1f}" for name, times in record["baselines"].items() if name not in known
    )
    again = "" if record["bitwise_repeatable"] else "  NOT REPEATABLE"
    return (
        f"{record['op']:15}{record['rows']:>6}{record['group_size']:>5}{record['patterns']:>5} {record['frequency']:10}"
        f"{routed * 1e3:>9.1f}{record['speedup']:>7.2f}x{beside}{record['tflops']:>6.0f}{record['waste']:>7.1%}"
        f"{record['error']:>9.1e}  {backends}{again}"
    )

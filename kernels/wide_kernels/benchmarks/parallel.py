"""What may run in several processes on one GPU: checks, and compiling ahead what is timed afterwards.

Compiling takes most of a first run, on one core a process. Each worker fills Triton's cache on disk, from which the
timing process then reads. Nothing is timed while workers run.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import chain

import torch

import wide_kernels as wk
from wide_kernels.benchmarks.attention_awkward import (
    LARGE_ATTENTION,
    SMALL_ATTENTION,
    AttentionCase,
    attention_errors,
)
from wide_kernels.benchmarks.attention_cases import AttentionSizes, attention_case
from wide_kernels.benchmarks.awkward import LARGE, SMALL, errors
from wide_kernels.benchmarks.cases import Sizes, ffn_cases
from wide_kernels.benchmarks.whole_ffn import ffn_case
from wide_kernels.tuning.table import force

MAX_WORKERS = 12
AWKWARD = (*SMALL, *SMALL_ATTENTION, *LARGE, *LARGE_ATTENTION)


@dataclass(frozen=True)
class Outcome:
    """Of one task: comparisons made, a line for each wrong one, lines worth telling."""

    compared: int = 0
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CheckTask:
    """Compare one awkward case with float64 on the GPU."""

    index: int
    dtype: torch.dtype
    backend: str = "triton"

    def __call__(self) -> Outcome:
        """Run it; an exception counts as a wrong result."""
        case = AWKWARD[self.index]
        compared, wrong = 0, []
        try:
            if isinstance(case, AttentionCase):
                found = attention_errors(case, self.dtype, "cuda", self.backend)
            else:
                found = errors(case, self.dtype, "cuda", self.backend)
            for what, error, tolerance in found:
                compared += 1
                if not error <= tolerance:
                    wrong.append(
                        f"{self.backend} {what} {self.dtype} {case}: relative error {error:.2e} above {tolerance:.0e}"
                    )
        except Exception as failure:  # whatever it is, the other cases still run
            wrong.append(f"{self.backend} {self.dtype} {case}: {type(failure).__name__}: {str(failure)[:300]}")
        return Outcome(compared, wrong)


@dataclass(frozen=True)
class WarmTask:
    """Run every operator once at one point of the grid, so that it is compiled; with `kernel`, in a configuration."""

    sizes: Sizes | AttentionSizes
    ops: frozenset[str] = frozenset()
    kernel: str = "none"
    config: tuple[tuple[str, int], ...] = ()

    def __call__(self) -> Outcome:
        """Run it; a failure is a note, the timing process will meet it again."""
        try:
            with force(self.kernel, dict(self.config)):
                if isinstance(self.sizes, AttentionSizes):
                    cases = iter([attention_case(self.sizes)])
                else:
                    cases = chain(
                        ffn_cases(self.sizes, set(self.ops), gather=False),
                        map(ffn_case, [self.sizes] if "ffn" in self.ops else []),
                    )
                for case in cases:
                    case.routed()
                    for name in case.backends.keys() - {"torch"}:
                        case.backends[name]()
            torch.cuda.synchronize()
        except Exception as failure:  # e.g. too much shared memory: a candidate that is out
            return Outcome(notes=[f"{self.kernel} {dict(self.config)}: {type(failure).__name__}"])
        finally:
            torch.cuda.empty_cache()
        return Outcome()


def check_tasks(dtypes: Sequence[torch.dtype]) -> list[CheckTask]:
    """All awkward cases, the large ones first, with every backend that this GPU can run."""
    backends = [name for name in ("triton", "gluon") if name in wk.available_backends()["gemm_mn"]]
    return [
        CheckTask(i, dtype, backend)
        for i in reversed(range(len(AWKWARD)))
        for dtype in dtypes
        for backend in backends
        if backend == "triton" or not isinstance(AWKWARD[i], AttentionCase)  # there, triton checks auto's choice too
    ]


def usual_workers() -> int:
    """Processes that compile at once: nearly one a core."""
    return max(1, min(MAX_WORKERS, (os.cpu_count() or 2) - 2))


def run_all(tasks: Sequence[Callable[[], Outcome]], workers: int) -> Outcome:
    """Run the tasks in worker processes (0: in this one, for a GPU that takes one process); add up what they find."""
    if workers == 0:
        return _sum([task() for task in tasks])
    outcomes = []
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures: list[Future[Outcome]] = [pool.submit(task) for task in tasks]
        for future in as_completed(futures):
            try:
                outcomes.append(future.result())
            except Exception as failure:  # the worker died
                line = f"a worker process ended: {type(failure).__name__}: {str(failure)[:300]}"
                outcomes.append(Outcome(wrong=[line]))
    return _sum(outcomes)


def _sum(outcomes: Sequence[Outcome]) -> Outcome:
    return Outcome(
        sum(outcome.compared for outcome in outcomes),
        sorted({line for outcome in outcomes for line in outcome.wrong}),
        [line for outcome in outcomes for line in outcome.notes],
    )

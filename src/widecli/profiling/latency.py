"""Times of prefill and decode: candidates take turns, so that a drift of the clock hits all alike.

TTFT: prompt in, first token there (prefill, LM head on the last position, argmax), by the host's clock.
TPOT: the time of each further token; its mean is (end to end - TTFT) / (N - 1).
Caches of the device are not flushed, for dense and routed alike: a step reads far more than they hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import torch
from torch import Tensor

from widecli.engine.session import Session

Call = Callable[[], list[float]]
"""One turn of a candidate: runs it and returns the milliseconds of each sample."""

LEAST_TURNS = 3


@dataclass(frozen=True)
class Times:
    """Milliseconds over `n` samples."""

    p50_ms: float
    p90_ms: float
    p99_ms: float
    min_ms: float
    mean_ms: float
    n: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Times:
        """Quantiles by linear interpolation."""
        data = torch.tensor(samples, dtype=torch.float64)
        p50, p90, p99 = torch.quantile(data, torch.tensor([0.5, 0.9, 0.99], dtype=torch.float64)).tolist()
        return cls(p50, p90, p99, float(data.min()), float(data.mean()), len(samples))

    def as_dict(self) -> dict[str, float | int]:
        """For JSON."""
        return asdict(self)


def interleaved(calls: Sequence[Call], seconds: float, most: int = 50) -> list[Times]:
    """Two turns of each to warm up, then as many turns as fit into `seconds`, at least three and at most `most`.

    The order moves on by one every turn: none always follows the same other one.
    """
    for _ in range(2):
        started = time.perf_counter()
        for call in calls:
            call()
        taken = time.perf_counter() - started
    turns = max(LEAST_TURNS, min(most, int(seconds / max(taken, 1e-9))))
    samples: list[list[float]] = [[] for _ in calls]
    for turn in range(turns):
        for i in range(len(calls)):
            which = (turn + i) % len(calls)
            samples[which] += calls[which]()
    return [Times.of(found) for found in samples]


def first_token(session: Session, ids: Tensor) -> list[float]:
    """Read the prompts `ids` [B, T] from the host: milliseconds until the first token of all is there."""
    device = session.token.device
    wait(device)
    started = time.perf_counter()
    session.prefill(ids)
    wait(device)
    return [1e3 * (time.perf_counter() - started)]


def further_tokens(session: Session, prompt: int, token: Tensor, steps: int) -> list[float]:
    """Milliseconds of each of `steps` decode steps that follow `prompt` tokens in the cache and `token` [B]."""
    device = session.token.device
    session.rewind(prompt, token)
    wait(device)
    if device.type != "cuda":
        times = [time.perf_counter()]
        for _ in range(steps):
            session.decode()
            times.append(time.perf_counter())
        return [1e3 * (after - before) for before, after in pairwise(times)]
    events = [_event() for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        session.decode()
        event.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) for before, after in pairwise(events)]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def wait(device: torch.device) -> None:
    """Until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

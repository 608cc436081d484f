"""Runs jobs as their needs and the executor's room allow; one that fails takes along only what needs it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Protocol

from widecli.errors import WideError
from widecli.sweep.jobs import Job, State
from widecli.track.run import Run

PREEMPTED = 75  # exit code of a command that saved its state
_GRACE_S = 300.0  # a training step on a large model, and a checkpoint
_POLL_S = 0.2


class Handle(Protocol):
    """A job on its way."""

    where: str

    def poll(self) -> int | None:
        """The exit code (negative: a signal's number), None while it runs."""

    def stop(self) -> None:
        """Ask it to save and end."""

    def kill(self) -> None:
        """End it now."""


class Executor(Protocol):
    """Where jobs run."""

    slots: int

    def has_room(self) -> bool:
        """Whether another job can start now."""

    def start(self, arguments: Sequence[str], log: Path) -> Handle:
        """Start `wide ARGUMENTS`; what it prints is appended to `log`."""


class Stop:
    """Signals received while the sweep runs: the first asks jobs to save and end, a second ends them at once."""

    def __init__(self) -> None:
        self.received: list[int] = []

    @property
    def requested(self) -> bool:
        """Whether the sweep is to end."""
        return bool(self.received)

    @property
    def interrupted(self) -> bool:
        """Whether a person did it (Ctrl-C), not a scheduler."""
        return bool(self.received) and self.received[0] == signal.SIGINT

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        """Collect SIGINT, SIGTERM and SIGUSR1 inside the block instead of dying from them."""

        def note(number: int, _: FrameType | None) -> None:
            self.received.append(number)

        before = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run_jobs(
    jobs: Sequence[Job],
    executor: Executor,
    logs: Path,
    *,
    changed: Callable[[Job], None],
    waiting: Callable[[], None] = lambda: None,
    stop: Stop | None = None,
) -> None:
    """Run every waiting job, in the order given as far as their needs allow; returns when none can go on.

    Args:
        jobs: in the order in which they should start.
        executor: where they run.
        logs: folder of one log file a job.
        changed: called after a job's state has changed.
        waiting: called again and again meanwhile.
        stop: when it is requested, no job starts any more and running ones are asked to end.
    """
    stop = stop or Stop()
    running: dict[Job, tuple[Handle, int]] = {}
    asked_at: float | None = None
    try:
        while True:
            if not stop.requested:
                for job in jobs:
                    if job.state is State.WAITING and (started := _advance(job, executor, logs, changed)):
                        running[job] = started
            elif asked_at is None:
                asked_at = time.monotonic()
                for handle, _ in running.values():
                    handle.stop()
            elif len(stop.received) > 1 or time.monotonic() - asked_at > _GRACE_S:
                for handle, _ in running.values():
                    handle.kill()
            if not running:
                break
            waiting()
            time.sleep(_POLL_S)
            for job, (handle, log_start) in list(running.items()):
                if (code := handle.poll()) is not None:
                    del running[job]
                    _settle(job, code, log_start, stopping=stop.requested)
                    changed(job)
    finally:  # also when the table or the manifest cannot be written
        for handle, _ in running.values():
            handle.stop()


def _advance(job: Job, executor: Executor, logs: Path, changed: Callable[[Job], None]) -> tuple[Handle, int] | None:
    """Start a waiting job if it can; returns its handle and where in its log this start begins."""
    if bad := next((need for need in job.needs if need.state.is_over and not need.state.is_good), None):
        job.state = State.STOPPED if bad.state is State.STOPPED else State.SKIPPED
        job.error = bad.error if bad.state is State.STOPPED else "what it needs failed"
        changed(job)
        return None
    if not executor.has_room() or not all(other.state.is_over for other in (*job.needs, *job.after)):
        return None
    try:
        if job.look() is not None:
            job.state = State.REUSED
            changed(job)
            return None
        if job.only_reuse is not None:
            raise WideError(job.only_reuse)
        job.log = logs / f"{job.name}.log"
        log_start = job.log.stat().st_size if job.log.exists() else 0
        job.seconds, job.started = None, time.monotonic()
        handle = executor.start(job.arguments(), job.log)
    except WideError as error:
        job.fail(str(error))
        changed(job)
        return None
    job.state, job.where = State.RUNNING, handle.where
    changed(job)
    return handle, log_start


def _settle(job: Job, code: int, log_start: int, *, stopping: bool) -> None:
    seconds = job.elapsed
    if code == 0:
        if job.path is not None and Run(job.path, job.stage).is_finished:
            job.state, job.seconds = State.DONE, seconds
        else:
            job.fail(f"it ended well but left no finished run in {job.path}")
    elif code == PREEMPTED or (stopping and code < 0):
        job.state, job.error = State.STOPPED, "stopped by a signal; run the sweep again to continue it"
    else:
        job.fail(last_error(job.log, log_start, code))


def last_error(log: Path | None, start: int, code: int) -> str:
    """The sentence with which a command ended, from its log after byte `start`; else its last line."""
    lines: list[str] = []
    if log is not None and log.exists():
        with log.open("rb") as handle:
            handle.seek(start)
            lines = [line.strip() for line in handle.read().decode("utf-8", "replace").splitlines() if line.strip()]
    sentences = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if sentences:
        return sentences[-1]
    if code < 0:
        return f"killed by {signal.Signals(-code).name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")
    return lines[-1] if lines else f"exit code {code}, and nothing in its log"

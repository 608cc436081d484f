"""Runs jobs as their needs and the executor's room allow; one that fails takes along only what needs it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from widecli.errors import UsageError, WideError
from widecli.signals import NOTICES, collected
from widecli.sweep.jobs import Job, State
from widecli.track.run import Run

PREEMPTED = 75  # exit code of a command that saved its state
INTERRUPTED = 130  # a person ended it
_NOT_AGAIN = (UsageError.exit_code, INTERRUPTED)  # a retry would end the same way, or against someone's will
_GRACE_S = 300.0  # a training step on a large model, and a checkpoint
_POLL_S = 0.2


class Handle(Protocol):
    """A job on its way."""

    @property
    def where(self) -> str:
        """The device or machine, or what it waits for, in a word or two."""

    @property
    def since(self) -> float | None:
        """When it began to run (`time.monotonic`); None while it waits for its turn."""

    def poll(self) -> int | None:
        """The exit code (negative: a signal's number), None while it is on its way."""

    def error(self) -> str:
        """The sentence with which it ended badly; asked after `poll` gave its code."""

    def stop(self) -> None:
        """Ask it to save and end."""

    def kill(self) -> None:
        """End it now."""


class Executor(Protocol):
    """Where jobs run: the processes of this machine, or a cluster's queue."""

    slots: int
    outlives: bool
    """Jobs go on when the sweep ends, and the next start of the sweep finds them."""

    def has_room(self) -> bool:
        """Whether another job can start now."""

    def start(self, job: Job, arguments: Sequence[str]) -> Handle:
        """Start `wide ARGUMENTS`; what it prints is appended to `job.log`."""

    def submit(self) -> None:
        """Send off what was started since the last call, where that is done for many at once. Raises WideError."""


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
        with collected((signal.SIGINT, *NOTICES), self.received):
            yield self


def run_jobs(
    jobs: Sequence[Job],
    executor: Executor,
    logs: Path,
    *,
    changed: Callable[[Job], None],
    waiting: Callable[[], None] = lambda: None,
    stop: Stop | None = None,
    retries: int = 0,
    found: Mapping[Job, Handle] | None = None,
) -> None:
    """Run every waiting job, in the order given as far as their needs allow; returns when none can go on.

    Args:
        jobs: in the order in which they should start.
        executor: where they run.
        logs: folder of one log file a job.
        changed: called after a job's state has changed.
        waiting: called again and again meanwhile.
        stop: when it is requested, no job starts any more and running ones are asked to end; those of an executor that
            outlives the sweep are left alone.
        retries: times that a job which failed is started again.
        found: jobs that are on their way already.
    """
    stop = stop or Stop()
    running = dict(found or {})
    for job in running:
        job.state = State.RUNNING
    asked_at: float | None = None
    try:
        while True:
            if not stop.requested:
                _start_waiting(jobs, executor, logs, changed, running)
            elif executor.outlives:
                break
            elif asked_at is None:
                asked_at = time.monotonic()
                for handle in running.values():
                    handle.stop()
            elif len(stop.received) > 1 or time.monotonic() - asked_at > _GRACE_S:
                for handle in running.values():
                    handle.kill()
            if not running and not (executor.outlives and any(job.state is State.WAITING for job in jobs)):
                break
            waiting()
            time.sleep(_POLL_S)
            for job, handle in list(running.items()):
                code = handle.poll()
                job.where, job.started = handle.where, handle.since or time.monotonic()
                if code is not None:
                    del running[job]
                    _settle(job, handle, code, stopping=stop.requested, outlives=executor.outlives, retries=retries)
                    changed(job)
    finally:  # also when the table or the manifest cannot be written
        if not executor.outlives:
            for handle in running.values():
                handle.stop()


def _start_waiting(
    jobs: Sequence[Job],
    executor: Executor,
    logs: Path,
    changed: Callable[[Job], None],
    running: dict[Job, Handle],
) -> None:
    """Start the waiting jobs that can, into `running`. Raises WideError when the executor takes none of them."""
    started = []
    for job in jobs:
        if job.state is State.WAITING and (handle := _advance(job, executor, logs, changed)):
            running[job] = handle
            started.append(job)
    try:
        executor.submit()
    except WideError:
        for job in started:
            job.state = State.WAITING
            del running[job]
        raise
    for job in started:
        job.where = running[job].where
        changed(job)


def _advance(job: Job, executor: Executor, logs: Path, changed: Callable[[Job], None]) -> Handle | None:
    """Start a waiting job if it can; settles what need not or cannot start."""
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
        job.seconds, job.error, job.started = None, None, time.monotonic()
        handle = executor.start(job, job.arguments())
    except WideError as error:
        job.fail(str(error))
        changed(job)
        return None
    job.state = State.RUNNING
    return handle


def _settle(job: Job, handle: Handle, code: int, *, stopping: bool, outlives: bool, retries: int) -> None:
    seconds = job.elapsed
    if code == 0 and job.path is not None and Run(job.path, job.stage).is_finished:
        job.state, job.seconds = State.DONE, seconds
    elif code == PREEMPTED and outlives:  # the machine was wanted back: it goes on where it was, in a new turn
        job.state, job.error = State.WAITING, handle.error()
    elif code == PREEMPTED or (stopping and code < 0):
        job.state, job.error = State.STOPPED, "stopped by a signal; run the sweep again to continue it"
    else:
        error = handle.error() if code else f"it ended well but left no finished run in {job.path}"
        job.failures += 1
        if job.failures > retries or code in _NOT_AGAIN or stopping:
            job.fail(error)
        else:
            job.state, job.error = State.WAITING, f"{error} (it is tried again, {job.failures} of {retries})"

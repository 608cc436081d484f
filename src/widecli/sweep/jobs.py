"""What a sweep runs: one job a run, the order they need, and where each stands."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from widecli.recipe.load import ResolvedRecipe
    from widecli.sweep.grid import Point

_TAIL_BYTES = 4096


class State(StrEnum):
    """Where a job stands."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    REUSED = "reused"  # a finished run of the same recipe was there
    FAILED = "failed"
    SKIPPED = "skipped"  # what it needs failed
    STOPPED = "stopped"  # by a signal; it continues when the sweep runs again

    @property
    def is_over(self) -> bool:
        """Nothing more will happen to the job in this session."""
        return self not in (State.WAITING, State.RUNNING)

    @property
    def is_good(self) -> bool:
        """There is a finished run."""
        return self in (State.DONE, State.REUSED)


@dataclass(eq=False)
class Job:
    """One command into one run directory.

    `locate` finds that directory and `arguments` what stands after `wide`; both are asked when everything in `needs`
    has a finished run, because a second stage's directory depends on the checkpoint that it starts from.
    """

    name: str
    stage: str
    locate: Callable[[], Path]
    arguments: Callable[[], list[str]]
    needs: tuple[Job, ...] = ()
    after: tuple[Job, ...] = ()  # over before this one starts, however they ended
    only_reuse: str | None = None  # why it may not run, when its finished run is not there
    steps: int | None = None
    state: State = State.WAITING
    path: Path | None = None
    error: str | None = None
    seconds: float | None = None
    failures: int = 0
    where: str = ""
    log: Path | None = None
    started: float = field(default=0.0, repr=False)

    def look(self) -> Mapping[str, Any] | None:
        """The summary of the job's finished run, if it is there; sets `path`. Raises WideError."""
        from widecli.track.run import Run

        self.path = self.locate()
        summary = Run(self.path, self.stage).summary()
        if summary is not None and self.seconds is None and isinstance(summary.get("seconds"), (int, float)):
            self.seconds = float(summary["seconds"])
        return summary

    def fail(self, sentence: str) -> None:
        """The job ends badly."""
        self.state, self.error = State.FAILED, sentence

    @property
    def elapsed(self) -> float:
        """Seconds since it started."""
        return time.monotonic() - self.started

    def step(self) -> int | None:
        """The last step that a running training logged."""
        if self.path is None or self.steps is None:
            return None
        try:
            with (self.path / "metrics.jsonl").open("rb") as handle:
                handle.seek(max(0, handle.seek(0, 2) - _TAIL_BYTES))
                lines = handle.read().splitlines()
        except OSError:
            return None
        for line in reversed(lines):
            with contextlib.suppress(ValueError, TypeError, KeyError):  # cut at either end
                return int(json.loads(line)["step"])
        return None


@dataclass
class Plan:
    """A sweep's jobs in the order in which they start, and which of them a point needs, by stage."""

    points: list[Point]
    jobs: list[Job] = field(default_factory=list)
    of_point: list[dict[str, Job]] = field(default_factory=list)
    estimates: list[dict[str, Any]] = field(default_factory=list)
    """What a point's trainings take, by stage, as `wide calibrate --dry-run` says it."""
    recipes: dict[Path, ResolvedRecipe] = field(default_factory=dict)
    """Recipe files that jobs name on their command lines."""

    def common(self) -> list[Job]:
        """Jobs of no point in particular: the dense evaluations."""
        owned = {id(job) for jobs in self.of_point for job in jobs.values()}
        return [job for job in self.jobs if id(job) not in owned]

    def columns(self) -> list[str]:
        """The stages of the points, in their order."""
        return list(dict.fromkeys(stage for jobs in self.of_point for stage in jobs))


def time_left(jobs: Sequence[Job], slots: int) -> tuple[float, bool]:
    """Seconds until all is done, from finished jobs of the same stage, and whether every stage left has one."""
    typical = {
        stage: mean(known)
        for stage in {job.stage for job in jobs}
        if (known := [j.seconds for j in jobs if j.stage == stage and j.state.is_good and j.seconds is not None])
    }
    left = [job for job in jobs if not job.state.is_over]
    seconds = 0.0
    for job in left:
        if job.stage in typical:
            elapsed = job.elapsed if job.state is State.RUNNING else 0.0
            seconds += max(0.0, typical[job.stage] - elapsed)
    return seconds / max(1, min(slots, len(left))), all(job.stage in typical for job in left)


def counted(jobs: Sequence[Job]) -> str:
    """How many jobs are in which state: `2 running, 3 waiting, 1 failed`."""
    counts = {state: sum(job.state is state for job in jobs) for state in State}
    return ", ".join(f"{count} {state.value}" for state, count in counts.items() if count)


def survey(jobs: Sequence[Job]) -> None:
    """Mark as reused what is finished already, as far as that can be known before anything runs."""
    from widecli.errors import WideError

    for job in jobs:
        if job.state is not State.WAITING:
            continue
        if any(need.state in (State.FAILED, State.SKIPPED) for need in job.needs):
            job.state, job.error = State.SKIPPED, "what it needs failed"
        elif all(need.state.is_good for need in job.needs):
            try:
                if job.look() is not None:
                    job.state = State.REUSED
            except WideError as error:
                job.fail(str(error))

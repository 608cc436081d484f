"""One training stage, whatever it trains: start -> loop -> checkpoints -> summary. `Job` says what is trained."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Any, Protocol

import torch

from widecli.errors import Preempted
from widecli.model import checkpoint
from widecli.ranks import current
from widecli.signals import NOTICES, collected
from widecli.train.job import Job
from widecli.train.loop import StepRecord, Trainer
from widecli.train.validation import Validation


class Reporter(Protocol):
    """How a stage talks to whoever started it."""

    def note(self, message: str) -> None:
        """One line on what happens now."""

    def started(self, steps: int, first: int) -> None:
        """The loop is about to run steps `first` to `steps`."""

    def step(self, record: StepRecord) -> None:
        """A step is done."""


def run_stage(
    job: Job, reporter: Reporter, *, started: float, offline: bool, start: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Train what the job names; a run that already has checkpoints continues from the newest.

    `start` sets the routers before the first step of a new run; `started` is when the command began
    (`time.perf_counter`). Returns the values of `summary.json`. Raises Preempted (resumable) after SIGTERM or SIGUSR1.
    """
    recipe, run = job.recipe, job.run
    on_gpu = job.backbone.device.type == "cuda"
    validation = Validation(job, reporter.note, offline)
    ranks = current()
    done = ranks.from_first(checkpoint.steps(run.checkpoints))
    if not done:
        validation.measure_dense()
        start()
        validation.measure_start()
    trainer = job.trainer()
    if done:
        first = job.restore(done[-1][1], trainer)
        reporter.note(f"resuming after step {first}")
        run.rewind_metrics(first + 1)
    else:
        first = 0
        job.save(trainer, 0)
    speeds = _train(job, trainer, first, reporter)
    job.save(trainer, recipe.train.steps)  # what was trained is safe before the last measurement
    final = validation.measure_final()
    path = job.save(trainer, recipe.train.steps, final)
    job.routed.detach()
    return {
        "model": job.backbone.identity.id,
        "backbone": asdict(job.backbone.identity),
        "plan": job.routed.plan.to_json(),
        "budget": recipe.budget.model_dump(),
        "recipe_hash": job.recipe_hash,
        **final,
        "validation": validation.result(),
        "steps": recipe.train.steps,
        "tokens_per_second": median(speeds) if speeds else None,
        "peak_memory_bytes": max(ranks.gather(torch.cuda.max_memory_allocated())) if on_gpu else None,
        "ranks": ranks.size,
        "micro_batch_size": trainer.micro_batch_size,
        "seconds": time.perf_counter() - started,
        "data": {"source": job.tokens.source, "sequences": len(job.tokens), "tokens": job.tokens.total_tokens},
        "checkpoint": str(path),
    }


def _train(job: Job, trainer: Trainer, first: int, reporter: Reporter) -> list[float]:
    """The loop with its logs, checkpoints and signals. Returns the speeds seen after the first block, tokens/s."""
    train = job.recipe.train
    speeds: list[float] = []
    reporter.started(train.steps, first)
    with collected(NOTICES, []) as received:

        def stop() -> bool:
            return trainer.ranks.any(bool(received))  # all ranks agree, or some would go on alone

        for record in trainer.run(first, train.steps, stop):
            job.run.log(**_metrics(record))
            reporter.step(record)
            if record.step > first + 1:  # the first block holds compilation and allocation
                speeds.append(record.tokens_per_second)
            if record.step == trainer.done and stop():
                job.save(trainer, record.step)
                raise Preempted(f"stopped by a signal after step {record.step}; --resume continues")
            if record.step % train.save_every == 0 and record.step < train.steps:
                job.save(trainer, record.step)
    return speeds


def _metrics(record: StepRecord) -> dict[str, Any]:
    return {key: value for key, value in asdict(record).items() if value is not None}

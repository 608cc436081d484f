"""Running a sweep's jobs, here or on a cluster, and how the command ends."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from widecli.cli.console import note, warn
from widecli.errors import Preempted, UsageError, WideError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from widecli.recipe.schema import Recipe
    from widecli.sweep.jobs import Job, Plan
    from widecli.sweep.runner import Executor, Handle


def run_sweep(recipe: Recipe, plan: Plan, folder: Path, *, jobs_per_gpu: int, offline: bool) -> dict[str, Any]:
    """Run what is not finished yet; returns the manifest. Raises Preempted or KeyboardInterrupt after a signal."""
    from widecli.cli.sweep_table import SweepTable, print_outcome
    from widecli.sweep.jobs import counted
    from widecli.sweep.manifest import locked, write_manifest, write_recipes
    from widecli.sweep.runner import Stop, run_jobs
    from widecli.sweep.shared import prepare as prepare_shared
    from widecli.sweep.slurm import refuse_without_slurm

    if recipe.sweep.executor == "slurm":
        refuse_without_slurm()
    write_recipes(folder, recipe, plan)
    with locked(folder, note) as lock:
        executor, found, devices = _executor(recipe, plan, folder, jobs_per_gpu, lock)
        note(f"{len(plan.points)} point{'s' * (len(plan.points) != 1)} on {devices}: {counted(plan.jobs)}")
        for job in plan.jobs:
            if job.error and not job.needs:
                warn(f"{job.name} cannot run: {job.error}")
        write_manifest(folder, recipe, plan)
        if any(not job.state.is_over for job in plan.jobs):
            prepare_shared(_trainings(plan), note, warn, offline)
        with Stop().listening() as stop, SweepTable(plan, executor.slots) as table:

            def changed(job: Job) -> None:
                table.changed(job)
                write_manifest(folder, recipe, plan)

            run_jobs(
                plan.jobs,
                executor,
                folder / "logs",
                changed=changed,
                stop=stop,
                retries=recipe.sweep.retries,
                found=found,
            )
        document = write_manifest(folder, recipe, plan)
    print_outcome(plan)
    note(f"sweep: {folder} (wide report {folder} shows what it found)")
    if executor.outlives and stop.requested:
        _say_what_stays(folder)
    if stop.interrupted:
        note("the same command continues the sweep")
        raise KeyboardInterrupt
    if stop.requested:
        raise Preempted("stopped by a signal; the same command continues the sweep")
    return document


def _executor(
    recipe: Recipe, plan: Plan, folder: Path, jobs_per_gpu: int, lock: int
) -> tuple[Executor, Mapping[Job, Handle], str]:
    """Where the jobs run, those that are on their way there already, and the place in words."""
    from widecli.profiling.environment import usable_cores
    from widecli.sweep.local import LocalExecutor, visible_gpus
    from widecli.sweep.slurm import SlurmExecutor
    from widecli.sweep.slurm_follow import numbers_in_queue

    environment = {"WANDB_RUN_GROUP": folder.name}
    if recipe.sweep.executor == "slurm":
        cluster = SlurmExecutor(recipe.sweep.slurm, folder, environment, note)
        found = cluster.find(plan.jobs)
        if found:
            note(f"{len(found)} jobs of an earlier start are in Slurm's queue or running: following them")
        return cluster, found, "Slurm"
    if numbers := numbers_in_queue(folder):
        raise UsageError(
            f"jobs of this sweep are in Slurm's queue ({', '.join(numbers)}): follow them with --executor slurm, or "
            f"end them with scancel first"
        )
    gpus = visible_gpus()
    if not gpus and jobs_per_gpu > 1:  # they share its cores
        threads = max(1, usable_cores() // jobs_per_gpu)
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(threads)
    devices = {0: "the CPU", 1: "one GPU"}.get(len(gpus), f"{len(gpus)} GPUs")
    return LocalExecutor(gpus, jobs_per_gpu, environment, keep_open=(lock,)), {}, devices


def _say_what_stays(folder: Path) -> None:
    """What a sweep leaves behind in a cluster's queue, and how to come back to it or end it."""
    from widecli.sweep.slurm_follow import numbers_in_queue

    if numbers := numbers_in_queue(folder):
        arrays = list(dict.fromkeys(number.split("_")[0] for number in numbers))
        note(
            f"{len(numbers)} jobs go on in Slurm without this command: the same command follows them again, "
            f"scancel {' '.join(arrays)} ends them"
        )


def _trainings(plan: Plan) -> list[Recipe]:
    """Recipes of the calibrations that will run; a second stage reads the same tokens."""
    return [
        point.calibration.recipe
        for point, jobs in zip(plan.points, plan.of_point, strict=True)
        if any(not jobs[stage].state.is_over for stage in ("calibrate", "lora") if stage in jobs)
    ]


def end(plan: Plan) -> None:
    """Ends the command badly when a job did."""
    from widecli.sweep.jobs import State

    failed = [job for job in plan.jobs if job.state is State.FAILED]
    if failed:
        first = f"{failed[0].name}: {str(failed[0].error).removesuffix('.')}"
        raise WideError(f"{len(failed)} of {len(plan.jobs)} jobs failed, first {first}; the same command tries again")
    if any(job.state is State.STOPPED for job in plan.jobs):
        raise Preempted("some runs were stopped by a signal; the same command continues the sweep")

"""`wide sweep`: a grid of runs, each a command of its own, on all GPUs of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from widecli.cli import options
from widecli.cli.console import emit_json, note, stdout_for_document, warn
from widecli.errors import Preempted, UsageError, WideError

if TYPE_CHECKING:
    from pathlib import Path

    from widecli.recipe.schema import Recipe
    from widecli.sweep.jobs import Job, Plan

_AXES = "Axes"
_VALUES = "a,b,c or start:stop:step"

GroupSizes = Annotated[
    str | None, typer.Option("--G", help=f"FFN channels in a group: {_VALUES}.", rich_help_panel=_AXES)
]
Sparsities = Annotated[
    str | None, typer.Option("--sparsity", help=f"Shares to skip: {_VALUES}.", rich_help_panel=_AXES)
]
Modes = Annotated[str | None, typer.Option("--modes", "--mode", help="wide,token,layer.", rich_help_panel=_AXES)]
Seeds = Annotated[str | None, typer.Option("--seed", help=f"Seeds: {_VALUES}.", rich_help_panel=_AXES)]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUES", help=f"Any recipe key: {_VALUES}.", rich_help_panel=_AXES),
]
Stages = Annotated[
    str | None,
    typer.Option(
        "--stages", help="calibrate,lora,eval,profile: what runs for each point.", show_default="calibrate,eval"
    ),
]
JobsPerGpu = Annotated[int, typer.Option("--jobs-per-gpu", min=1, help="Processes that share a GPU.")]


def sweep(
    arguments: options.Arguments = None,
    model: options.Model = None,
    data: options.Data = None,
    group_sizes: GroupSizes = None,
    sparsity: Sparsities = None,
    modes: Modes = None,
    seed: Seeds = None,
    axes: Set = None,
    stages: Stages = None,
    steps: options.Steps = None,
    tasks: options.Tasks = None,
    limit: options.Limit = None,
    data_root: options.DataRoot = None,
    wandb: options.Wandb = None,
    run_dir: options.RunDir = None,
    jobs_per_gpu: JobsPerGpu = 1,
    offline: options.Offline = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Run every combination of some recipe keys: calibrate each, train its adapter, evaluate it.

    One process a GPU, one after the other without one. The same command continues a sweep that was stopped; finished
    runs of the same recipe are reused, and a point that fails stops no other. `wide report` reads its directory.
    """
    offline = options.go_offline(offline)
    with stdout_for_document(json):
        flags = {"model": model, "data": data, "steps": steps, "tasks": tasks, "limit": limit}
        flags |= {"data_root": data_root, "wandb": wandb, "run_dir": run_dir}
        named = {"G": group_sizes, "sparsity": sparsity, "mode": modes, "seed": seed}
        recipe, plan, folder = prepare(arguments, flags, named, axes or [], stages, offline, dry_run)
        if jobs_per_gpu > 1 and "profile" in recipe.sweep.stages:
            raise UsageError(f"--jobs-per-gpu {jobs_per_gpu} would disturb what the stage profile times: leave it at 1")
        if dry_run:
            document = plan_sweep(recipe, plan, folder)
        else:
            document = run_sweep(recipe, plan, folder, jobs_per_gpu=jobs_per_gpu, offline=offline)
        if json:
            emit_json(document)
        if not dry_run:
            end(plan)


def prepare(
    arguments: list[str] | None,
    flags: dict[str, Any],
    named: dict[str, str | None],
    more: list[str],
    stages: str | None,
    offline: bool,
    dry_run: bool,
) -> tuple[Recipe, Plan, Path]:
    """The sweep's recipe with its axes, the jobs, and the sweep's directory; writes nothing."""
    from widecli.cli.commands import COMMANDS
    from widecli.cli.sweep_jobs import check_evaluations, make_plan
    from widecli.recipe.load import resolve
    from widecli.sweep.grid import check_axes, check_stages, expand
    from widecli.sweep.jobs import survey
    from widecli.sweep.manifest import refuse_foreign, sweep_directory

    recipe_name, overrides = options.split_arguments(arguments)
    recipe_name = recipe_name or options.machine_default()
    given = {options.FLAG_KEYS[name]: value for name, value in flags.items() if value not in (None, [])}
    base = resolve(recipe_name, overrides, given, "sweep").recipe
    axes = check_axes(base.sweep.axes) | check_axes(axes_of(named, more), "the command line")
    wanted = stages.replace(" ", "").split(",") if stages is not None else base.sweep.stages
    section = base.sweep.model_copy(update={"axes": axes, "stages": check_stages(wanted, COMMANDS)})
    for key in section.lora:
        check_axes({key: [None]}, "sweep.lora")
    recipe = base.model_copy(update={"sweep": section})
    folder = sweep_directory(recipe)
    refuse_foreign(folder)
    own = {key: value for key, value in given.items() if key != "track.run_dir"}
    points = expand(recipe_name, overrides, own, axes)
    if "eval" in section.stages:
        check_evaluations(points, offline and not dry_run)  # a grid can be looked at before its data is here
    plan = make_plan(points, section.stages, folder, second=section.lora, offline=offline)
    survey(plan.jobs)
    return recipe, plan, folder


def axes_of(named: dict[str, str | None], more: list[str]) -> dict[str, str]:
    """The axes on the command line: flags first, then `--set key=values`."""
    keys = {"G": "routing.ffn_group_size", "sparsity": "budget.sparsity", "mode": "routing.mode", "seed": "train.seed"}
    axes = {keys[name]: text for name, text in named.items() if text is not None}
    for text in more:
        key, equals, values = text.partition("=")
        if not equals or not values.strip():
            raise UsageError(f"--set {text} is not KEY=VALUES: write train.learning_rate=0.001,0.002")
        if key.strip() in axes:
            raise UsageError(f"{key.strip()} is swept twice: give its values once")
        axes[key.strip()] = values
    return axes


def plan_sweep(recipe: Recipe, plan: Plan, folder: Path) -> dict[str, Any]:
    """Print the grid with estimated time and memory; touches no device and writes nothing."""
    from widecli.cli.sweep_table import print_grid
    from widecli.storage import plain
    from widecli.sweep.manifest import manifest

    document = {"schema": "wide.dry_run/1", "command": "sweep", **manifest(folder, recipe, plan)}
    total, counted = 0.0, set()
    for row, jobs, estimate in zip(document["points"], plan.of_point, plan.estimates, strict=True):
        row["estimate"] = estimate
        row["seconds_on_reference"] = sum(figures["seconds_on_reference"] for figures in estimate.values())
        row["memory_bytes"] = max((figures["memory_bytes"] for figures in estimate.values()), default=None)
        for stage, figures in estimate.items():
            if not jobs[stage].state.is_over and jobs[stage].name not in counted:
                counted.add(jobs[stage].name)
                total += figures["seconds_on_reference"]
            document["reference"] = figures["reference"]
    document |= {"seconds_on_reference": total, "reference": document.get("reference", "one H200")}
    print_grid(plan, document)
    found: dict[str, Any] = plain(document)
    return found


def run_sweep(recipe: Recipe, plan: Plan, folder: Path, *, jobs_per_gpu: int, offline: bool) -> dict[str, Any]:
    """Run what is not finished yet; returns the manifest. Raises Preempted or KeyboardInterrupt after a signal."""
    from widecli.cli.sweep_table import SweepTable, print_outcome
    from widecli.sweep.jobs import counted
    from widecli.sweep.local import LocalExecutor, visible_gpus
    from widecli.sweep.manifest import locked, write_manifest, write_recipes
    from widecli.sweep.runner import Stop, run_jobs
    from widecli.sweep.shared import prepare as prepare_shared

    write_recipes(folder, recipe, plan)
    with locked(folder, note) as lock:
        gpus = visible_gpus()
        executor = LocalExecutor(gpus, jobs_per_gpu, {"WANDB_RUN_GROUP": folder.name}, keep_open=(lock,))
        devices = {0: "the CPU", 1: "one GPU"}.get(len(gpus), f"{len(gpus)} GPUs")
        note(f"{len(plan.points)} points on {devices}: {counted(plan.jobs)}")
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

            run_jobs(plan.jobs, executor, folder / "logs", changed=changed, stop=stop)
        document = write_manifest(folder, recipe, plan)
    print_outcome(plan)
    note(f"sweep: {folder} (wide report {folder} shows what it found)")
    if stop.interrupted:
        raise KeyboardInterrupt
    if stop.requested:
        raise Preempted("stopped by a signal; the same command continues the sweep")
    return document


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

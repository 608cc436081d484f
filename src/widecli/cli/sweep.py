"""`wide sweep`: a grid of runs, each a command of its own, on all GPUs of this machine or through a cluster's queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from widecli.cli import options, sweep_options
from widecli.cli.console import emit_json, stdout_for_document
from widecli.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from widecli.recipe.schema import Recipe
    from widecli.sweep.jobs import Plan


def sweep(
    arguments: options.Arguments = None,
    model: options.Model = None,
    data: options.Data = None,
    group_sizes: sweep_options.GroupSizes = None,
    sparsity: sweep_options.Sparsities = None,
    modes: sweep_options.Modes = None,
    seed: sweep_options.Seeds = None,
    axes: sweep_options.Set = None,
    stages: sweep_options.Stages = None,
    steps: options.Steps = None,
    tasks: options.Tasks = None,
    limit: options.Limit = None,
    data_root: options.DataRoot = None,
    wandb: options.Wandb = None,
    run_dir: options.RunDir = None,
    executor: sweep_options.ExecutorName = None,
    retries: sweep_options.Retries = None,
    jobs_per_gpu: sweep_options.JobsPerGpu = 1,
    partition: sweep_options.Partition = None,
    account: sweep_options.Account = None,
    time: sweep_options.Time = None,
    gpus: sweep_options.Gpus = None,
    cpus: sweep_options.Cpus = None,
    mem: sweep_options.Mem = None,
    max_jobs: sweep_options.MaxJobs = None,
    sbatch: sweep_options.Sbatch = None,
    beyond_positions: options.BeyondPositions = None,
    offline: options.Offline = False,
    trust_remote_code: options.TrustRemoteCode = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Run every combination of some recipe keys: calibrate each, train its adapter, evaluate it.

    One process a GPU, one after the other without one; with --executor slurm a job of the cluster each. The same
    command continues a sweep that was stopped; finished runs of the same recipe are reused, and a point that fails
    stops no other. `wide report` reads its directory.
    """
    from widecli.cli.sweep_run import end, run_sweep

    offline = options.go_offline(offline)
    options.trust_remote_code(trust_remote_code)
    with stdout_for_document(json):
        flags: dict[str, Any] = {"model": model, "data": data, "steps": steps, "tasks": tasks, "limit": limit}
        flags["beyond_positions"] = beyond_positions
        flags |= {"data_root": data_root, "wandb": wandb, "run_dir": run_dir}
        flags |= {"executor": executor, "retries": retries, "partition": partition, "account": account, "time": time}
        flags |= {"gpus": gpus, "cpus": cpus, "mem": mem, "max_jobs": max_jobs}
        named = {"G": group_sizes, "sparsity": sparsity, "mode": modes, "seed": seed}
        changes = [*(arguments or []), *sweep_options.sbatch_overrides(sbatch or [])]
        recipe, plan, folder = prepare(changes, flags, named, axes or [], stages, offline, dry_run)
        if jobs_per_gpu > 1 and recipe.sweep.executor == "slurm":
            raise UsageError(
                f"--jobs-per-gpu {jobs_per_gpu} is for this machine's GPUs: every job of Slurm has its own"
            )
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
    arguments: list[str],
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
    keys = {**options.FLAG_KEYS, **sweep_options.PLACE_KEYS}
    given = {keys[name]: value for name, value in flags.items() if value not in (None, [], {})}
    recipe_name = recipe_name or _default_recipe(overrides, given)
    base = resolve(recipe_name, overrides, given, "sweep").recipe
    axes = check_axes(base.sweep.axes) | check_axes(sweep_options.axes_of(named, more), "the command line")
    wanted = stages.replace(" ", "").split(",") if stages is not None else base.sweep.stages
    section = base.sweep.model_copy(update={"axes": axes, "stages": check_stages(wanted, COMMANDS)})
    for key in section.lora:
        check_axes({key: [None]}, "sweep.lora")
    recipe = base.model_copy(update={"sweep": section})
    folder = sweep_directory(recipe)
    refuse_foreign(folder)
    own = {key: value for key, value in given.items() if key != "track.run_dir" and not key.startswith("sweep.")}
    points = expand(recipe_name, overrides, own, axes)
    if "eval" in section.stages:
        check_evaluations(points, offline and not dry_run)  # a grid can be looked at before its data is here
    plan = make_plan(points, section.stages, folder, second=section.lora, offline=offline)
    survey(plan.jobs)
    return recipe, plan, folder


def _default_recipe(overrides: list[str], given: dict[str, Any]) -> str | None:
    """The recipe of a sweep that names none: sized for the machines that will run it."""
    from widecli.recipe.load import default_recipe_name, resolve

    section = resolve(None, overrides, given, "sweep").recipe.sweep
    return default_recipe_name(section.slurm.gpus > 0) if section.executor == "slurm" else options.machine_default()


def plan_sweep(recipe: Recipe, plan: Plan, folder: Path) -> dict[str, Any]:
    """Print the grid with estimated time and memory; touches no device and writes nothing."""
    from widecli.cli.sweep_table import print_grid
    from widecli.storage import plain
    from widecli.sweep.manifest import manifest
    from widecli.sweep.slurm import sbatch_options

    document = {"schema": "wide.dry_run/1", "command": "sweep", **manifest(folder, recipe, plan)}
    document |= {"executor": recipe.sweep.executor}
    total, flops, counted = 0.0, 0.0, set()
    for row, jobs, estimate in zip(document["points"], plan.of_point, plan.estimates, strict=True):
        row["estimate"] = estimate
        row["seconds_on_reference"] = sum(figures["seconds_on_reference"] for figures in estimate.values())
        row["memory_bytes"] = max((figures["memory_bytes"] for figures in estimate.values()), default=None)
        for stage, figures in estimate.items():
            if not jobs[stage].state.is_over and jobs[stage].name not in counted:
                counted.add(jobs[stage].name)
                total += figures["seconds_on_reference"]
                flops += figures["flops"]
            document["reference"] = figures["reference"]
    document |= {"seconds_on_reference": total, "flops": flops, "reference": document.get("reference", "one H200")}
    if recipe.sweep.executor == "slurm":
        document["sbatch"] = sbatch_options(recipe.sweep.slurm)
    print_grid(plan, document)
    found: dict[str, Any] = plain(document)
    return found

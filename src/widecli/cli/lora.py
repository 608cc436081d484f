"""`wide lora`: a LoRA adapter on top of calibrated routers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from widecli.cli import options
from widecli.cli.console import emit_json, note, stdout_for_document
from widecli.cli.launch import processes
from widecli.errors import UsageError

if TYPE_CHECKING:
    from widecli.recipe.load import ResolvedRecipe
    from widecli.recipe.schema import Recipe

ROUTER_LEARNING_RATE = 0.25  # of the calibration's: the routers have found their place and follow the adapter

Targets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CHECKPOINT] [RECIPE] [KEY=VALUE]...",
        help="A calibrated checkpoint or its run (default: the newest below runs/), then a recipe, then changes to it.",
        show_default=False,
    ),
]


def lora(
    arguments: Targets = None,
    model: options.Model = None,
    data: options.Data = None,
    sparsity: options.Sparsity = None,
    steps: options.Steps = None,
    seed: options.Seed = None,
    freeze_routers: options.FreezeRouters = None,
    wandb: options.Wandb = None,
    run_dir: options.RunDir = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    beyond_positions: options.BeyondPositions = None,
    offline: options.Offline = False,
    trust_remote_code: options.TrustRemoteCode = False,
    nproc: options.Nproc = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Train a LoRA adapter on the seven linear layers, and the routers on, from a calibrated checkpoint.

    Without a recipe: the calibration's own text, steps and budget, at its last temperature.
    """
    offline = options.go_offline(offline)
    options.trust_remote_code(trust_remote_code)
    with processes(None if dry_run else nproc), stdout_for_document(json):
        flags = {
            "model": model,
            "data": data,
            "sparsity": sparsity,
            "steps": steps,
            "seed": seed,
            "freeze_routers": freeze_routers,
            "wandb": wandb,
            "run_dir": run_dir,
            "beyond_positions": beyond_positions,
        }
        start, resolved = prepare(arguments, flags, dry_run=dry_run)
        if start is None:
            document = plan_run(resolved, None, nproc)
        elif dry_run:
            document = plan_run(resolved, start, nproc)
        else:
            document = run_lora(resolved, start, resume=resume, overwrite=overwrite, offline=offline)
        if json:
            emit_json(document)


def prepare(
    arguments: list[str] | None, flags: dict[str, Any], *, dry_run: bool = False
) -> tuple[Path | None, ResolvedRecipe]:
    """The checkpoint and the recipe that a command line asks for; only a dry run of a recipe does without the first."""
    from widecli.model.checkpoint import refuse_incomplete
    from widecli.recipe.load import load_stored

    start, rest = options.take_checkpoint(arguments or [])
    recipe, _ = options.split_arguments(rest)
    if start is None:
        start = options.newest_checkpoint(_is_calibration)
        if start is not None:
            note(f"starting from the newest calibrated checkpoint, {start}")
        elif not (dry_run and recipe):
            raise UsageError("there is no calibrated checkpoint below runs/: name one, or run wide calibrate first")
    if start is None:
        return None, options.recipe_from(rest, command="lora", **flags)
    refuse_incomplete(start)
    stored = start / "recipe.yaml"
    calibrated = load_stored(stored)
    if recipe is None:
        rest = [*second_stage(calibrated), *rest]
    resolved = options.recipe_from(rest, base=str(stored), command="lora", **flags)
    _refuse(start, resolved)
    return start, resolved


def second_stage(calibrated: Recipe) -> list[str]:
    """What a second stage without a recipe of its own changes in the calibration's."""
    end = calibrated.train.temperature_end
    compensation = calibrated.compensation
    if compensation.mean or compensation.rank:
        slower = [f"compensation.learning_rate={compensation.learning_rate * ROUTER_LEARNING_RATE:g}"]
    else:
        slower = []
    return [
        *slower,
        "~track.run_dir",  # that is where the calibration lies
        # the routers end at this temperature: starting warmer would undo what the first stage sharpened
        f"train.temperature_start={end}",
        f"train.temperature_end={end}",
        f"train.learning_rate={calibrated.train.learning_rate * ROUTER_LEARNING_RATE:g}",
        "budget.ramp_ratio=0",  # the budget is met already
    ]


def _is_calibration(checkpoint: Path) -> bool:
    from widecli.model.checkpoint import read_config

    config = read_config(checkpoint)
    return config.adapter is None and config.merged is None


def _refuse(start: Path, resolved: ResolvedRecipe) -> None:
    """Whatever keeps this recipe from continuing that checkpoint, as far as it shows without loading weights."""
    from widecli.model.backbone import load_shape
    from widecli.model.checkpoint import read_config
    from widecli.model.plan import RoutingPlan

    config = read_config(start)
    if config.adapter is not None or config.merged is not None:
        began = f": name the calibration it came from, {config.origin['checkpoint']}" if config.origin else ""
        raise UsageError(f"{start} has been through this stage already{began}")
    asked = RoutingPlan.from_recipe(resolved.recipe, load_shape(resolved.recipe.model))
    if config.plan != asked:
        has, wants = config.plan.to_json(), asked.to_json()
        key = next(k for k in has if has[k] != wants[k])
        name = "layers" if key == "overrides" else key
        raise UsageError(
            f"the routers of {start} have routing.{name}={has[key]} and the recipe asks for {wants[key]}: name another "
            f"checkpoint, or leave routing as it was calibrated"
        )


def lora_name(resolved: ResolvedRecipe, start: Path) -> str:
    """As a calibration's name, with a hash of the recipe and of the routers that it begins with."""
    from widecli.model.checkpoint import origin_of
    from widecli.track.run import run_name

    key = f"{resolved.hash8}/{origin_of(start)['routers_hash']}"
    return run_name(resolved).removesuffix(resolved.hash8) + hashlib.sha256(key.encode()).hexdigest()[:8]


def plan_run(resolved: ResolvedRecipe, start: Path | None, nproc: int | None = None) -> dict[str, Any]:
    """Check a recipe against its model's sizes and print what the run would take; touches no device."""
    from widecli.cli.cost_card import dry_run_document, print_dry_run

    document = {**dry_run_document(resolved, "lora", nproc), "checkpoint": str(start) if start else None}
    print_dry_run(document)
    note(f"it would start from {start}" if start else "no checkpoint was checked: there is none below runs/")
    return document


def run_lora(
    resolved: ResolvedRecipe, start: Path, *, resume: bool = False, overwrite: bool = False, offline: bool = False
) -> dict[str, Any]:
    """Run (or continue) the second stage of a checkpoint; returns its summary."""
    from widecli.cli.cost_card import dry_run_document, refuse_too_large
    from widecli.cli.training import run_stage
    from widecli.train.lora import lora as train

    expected = dry_run_document(resolved, "lora")  # refuses what cannot work before anything is created or loaded
    refuse_too_large(expected)
    options.refuse_own_directory(resolved.recipe.track.run_dir, start)
    return run_stage(
        resolved,
        "lora",
        lora_name(resolved, start),
        lambda run, bar: train(resolved, start, run, bar, offline=offline),
        expected,
        resume=resume,
        overwrite=overwrite,
    )

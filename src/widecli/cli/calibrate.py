"""`wide calibrate`: train the routers of a frozen model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from widecli.cli import options
from widecli.cli.console import emit_json, stdout_for_document
from widecli.cli.launch import processes

if TYPE_CHECKING:
    from widecli.recipe.load import ResolvedRecipe


def calibrate(
    arguments: options.Arguments = None,
    model: options.Model = None,
    data: options.Data = None,
    sparsity: options.Sparsity = None,
    group_size: options.GroupSize = None,
    mode: options.Mode = None,
    steps: options.Steps = None,
    seed: options.Seed = None,
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
    keys: options.Keys = False,
) -> None:
    """Train routers on a frozen model: every token learns, layer by layer, which groups to run.

    Without a recipe: the embedded SmolLM2-135M, at a size that suits this machine.
    """
    offline = options.go_offline(offline)
    options.trust_remote_code(trust_remote_code)
    with processes(None if dry_run else nproc), stdout_for_document(json):
        resolved = options.recipe_from(
            arguments,
            base=None if options.split_arguments(arguments)[0] else options.machine_default(),
            model=model,
            data=data,
            sparsity=sparsity,
            group_size=group_size,
            mode=mode,
            steps=steps,
            seed=seed,
            wandb=wandb,
            run_dir=run_dir,
            beyond_positions=beyond_positions,
        )
        document = (
            plan_run(resolved, nproc)
            if dry_run
            else run_calibration(resolved, resume=resume, overwrite=overwrite, offline=offline)
        )
        if json:
            emit_json(document)


def plan_run(resolved: ResolvedRecipe, nproc: int | None = None) -> dict[str, Any]:
    """Check a recipe against its model's sizes and print what the run would take; touches no device."""
    from widecli.cli.cost_card import dry_run_document, print_dry_run

    document = dry_run_document(resolved, ranks=nproc)
    print_dry_run(document)
    return document


def run_calibration(
    resolved: ResolvedRecipe, *, resume: bool = False, overwrite: bool = False, offline: bool = False
) -> dict[str, Any]:
    """Run (or continue) the calibration of a recipe; returns its summary."""
    from widecli.cli.cost_card import dry_run_document, refuse_too_large
    from widecli.cli.training import run_stage
    from widecli.track.run import run_name
    from widecli.train.calibrate import calibrate as train

    expected = dry_run_document(resolved)  # refuses what cannot work before anything is created or loaded
    refuse_too_large(expected)
    return run_stage(
        resolved,
        "calibrate",
        run_name(resolved),
        lambda run, bar: train(resolved, run, bar, offline=offline),
        expected,
        resume=resume,
        overwrite=overwrite,
    )

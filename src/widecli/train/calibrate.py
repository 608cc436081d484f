"""Stage one, calibration: routers start from the closed form and learn on a frozen backbone."""

from __future__ import annotations

import time
from typing import Any

from widecli.model.compensation_fit import fit_compensations
from widecli.model.routed import RoutedModel
from widecli.model.thresholds import Batch, meet_budget
from widecli.model.warm_start import WarmStart, closed_form
from widecli.recipe.load import ResolvedRecipe
from widecli.recipe.schema import Recipe
from widecli.track.run import Run
from widecli.train.grouping import set_up_groups
from widecli.train.job import Job, Note, check_plan, load_material, text_batches
from widecli.train.loop import Trainables
from widecli.train.stage import Reporter, run_stage

_ROUNDS_ALONE = 2  # fits of the compensation where no step follows
_PASSES_AFTER_FIT = 2  # of the threshold search; the first search was nearly right
_WARM_START_SEED_OFFSET = 1_000_003  # text for the closed form: an order of its own


def calibrate(resolved: ResolvedRecipe, run: Run, reporter: Reporter, *, offline: bool = False) -> dict[str, Any]:
    """Train the routers a recipe describes; a run that already has checkpoints continues from the newest.

    Returns the values of `summary.json`. Raises Preempted (resumable) after SIGTERM or SIGUSR1.
    """
    started = time.perf_counter()
    job = prepare(resolved.recipe, resolved.hash8, run, reporter.note, offline)
    return run_stage(job, reporter, started=started, offline=offline, start=lambda: _start_routers(job, reporter))


def prepare(recipe: Recipe, recipe_hash: str, run: Run, note: Note, offline: bool) -> Job:
    """Load the backbone and the tokens and hang randomly started routers on; nothing is measured or written yet."""
    backbone, tokens = load_material(recipe, note, offline)
    plan, budget = check_plan(recipe, backbone)
    routed = RoutedModel.attach(backbone.model, plan, seed=recipe.train.seed)
    trainables = Trainables(
        distill=recipe.train.distill,
        compensation_learning_rate=recipe.compensation.learning_rate,
    )
    return Job(recipe, recipe_hash, run, backbone, tokens, routed, budget, trainables, recipe.train.seed)


def warm_start_batches(job: Job) -> list[Batch]:
    """The text behind the closed form, in an order of its own, on the device."""
    recipe = job.recipe
    return text_batches(
        job.tokens, recipe.routing.warm_start_tokens, recipe.train.seed + _WARM_START_SEED_OFFSET, job.backbone.device
    )


def _fit_compensations(job: Job, batches: list[Batch], share: float, note: Note) -> None:
    """Fit what stands in for skipped groups to the routers of now, and the routers' thresholds to that."""
    if not job.routed.substitutes:
        return
    note("fitting what stands in for skipped groups")
    fit_compensations(job.routed, batches)
    # it moves what later routers read: without a new search the start would skip anything but its budget
    meet_budget(job.routed, batches, job.budget.scaled(share), passes=_PASSES_AFTER_FIT)


def _text_of(job: Job) -> str:
    """Names backbone and text together; empty for a backbone that its weights do not name."""
    fingerprint = job.backbone.identity.fingerprint
    return f"{fingerprint}/{job.tokens.identity}" if fingerprint else ""


def _start_routers(job: Job, reporter: Reporter) -> None:
    recipe = job.recipe
    batches = warm_start_batches(job)
    set_up_groups(job.routed, batches, _text_of(job), recipe.train.seed, reporter.note)
    if recipe.routing.warm_start != "closed_form":
        return
    # without steps the start is the result, so it has to meet the budget itself
    share = recipe.budget.start_share if recipe.train.steps else 1.0
    settings = WarmStart.for_tokens(sum(ids.numel() for ids, _ in batches), share)
    closed_form(job.routed, batches, job.budget, settings, lambda text: reporter.note(f"closed form: {text}"))
    for _ in range(1 if recipe.train.steps else _ROUNDS_ALONE):
        _fit_compensations(job, batches, share, reporter.note)

"""Stage two: a LoRA adapter learns to live with what the routers skip, while they train on or stay frozen."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from widecli.errors import UsageError
from widecli.model import checkpoint
from widecli.model.adapter import Adapter
from widecli.model.budget import Budget
from widecli.model.routed import RoutedModel
from widecli.recipe.load import ResolvedRecipe
from widecli.recipe.schema import Recipe
from widecli.track.run import Run
from widecli.train.job import Job, Note, load_material
from widecli.train.loop import Trainables
from widecli.train.sharding import whole_sizes
from widecli.train.stage import Reporter, run_stage

SEED_OFFSET = 2_000_003  # the second stage reads the text in another order and draws other noise than the first


def lora(
    resolved: ResolvedRecipe, start: Path, run: Run, reporter: Reporter, *, offline: bool = False
) -> dict[str, Any]:
    """Train an adapter on the calibrated routers of the checkpoint `start`; a run with checkpoints continues.

    Returns the values of `summary.json`. Raises Preempted (resumable) after SIGTERM or SIGUSR1.
    """
    started = time.perf_counter()
    job = prepare(resolved.recipe, start, resolved.hash8, run, reporter.note, offline)
    summary = run_stage(job, reporter, started=started, offline=offline)
    assert job.adapter is not None
    section = resolved.recipe.lora
    return {
        **summary,
        "adapter": {**job.adapter.facts(), "folder": f"{summary['checkpoint']}/{checkpoint.ADAPTER}"},
        "objective": section.objective,
        "routers": "frozen" if section.freeze_routers else "trained",
        "origin": job.origin,
    }


def prepare(recipe: Recipe, start: Path, recipe_hash: str, run: Run, note: Note, offline: bool) -> Job:
    """Load backbone and tokens, wrap the linear layers, hang the checkpoint's routers on; nothing is written yet."""
    config = checkpoint.read_config(start)
    origin = checkpoint.origin_of(start)
    backbone, tokens = load_material(recipe, note, offline)
    if difference := config.backbone.mismatch(backbone.identity):
        raise UsageError(
            f"{start} was trained on {config.backbone.id}, and {recipe.model.name} is another model: {difference}"
        )
    # routers are made for their groups: the checkpoint's plan counts, whatever the recipe says
    budget = Budget.from_section(recipe.budget, config.plan, backbone.shape, recipe.data.sequence_length)
    section, seed = recipe.lora, recipe.train.seed + SEED_OFFSET
    with whole_sizes(backbone.model, backbone.device):
        adapter = Adapter.new(backbone.model, section, seed)
    routed = RoutedModel.attach(backbone.model, config.plan)
    checkpoint.load_routing(start, routed)
    trainables = Trainables(
        routers=not section.freeze_routers,
        adapter=adapter,
        adapter_learning_rate=section.learning_rate,
        distill=1.0 if section.objective == "distill" else recipe.train.distill,
        # as much below the first stage's as the routers' own
        compensation_learning_rate=recipe.compensation.learning_rate,
    )
    return Job(recipe, recipe_hash, run, backbone, tokens, routed, budget, trainables, seed, origin)

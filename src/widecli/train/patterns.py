"""A calibrated checkpoint as one whose tokens pick patterns, without training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from widecli.data.sources import SamplingModel, open_source
from widecli.data.tokens import prepare_tokens
from widecli.errors import UsageError
from widecli.model import checkpoint
from widecli.model.backbone import load_backbone
from widecli.model.pattern_fit import Conversion, Match, convert
from widecli.model.plan import PatternPlan
from widecli.model.routed import RoutedModel
from widecli.recipe.load import dump, load_text, recipe_hash
from widecli.recipe.schema import Recipe, RoutingSection
from widecli.train.job import Note, text_batches


@dataclass(frozen=True)
class Settings:
    """What a conversion may choose; `data` None = the text that the checkpoint was calibrated on."""

    patterns: PatternPlan
    tokens: int
    match: Match = "global"
    seed: int = 0
    data: Sequence[str] | None = None


def refuse(source: Path, settings: Settings) -> None:
    """Raise UsageError for a checkpoint that cannot be converted, as far as it shows without loading weights."""
    from widecli.model.backbone import load_shape

    checkpoint.refuse_incomplete(source)
    config = checkpoint.read_config(source)
    if config.plan.patterns is not None:
        raise UsageError(
            f"{source} has patterns already ({config.plan.patterns.described}): name the checkpoint it came from"
        )
    if config.merged is not None:
        raise UsageError(f"{source} is an exported model: convert the checkpoint it came from, then export that")
    if not config.plan.by_groups:
        raise UsageError(f"{source} was calibrated with routing.mode={config.plan.mode}: patterns need groups")
    with_patterns(config, settings).plan.validate(load_shape(checkpoint.section_of(source)))
    if settings.tokens < settings.patterns.count:
        raise UsageError(
            f"{settings.patterns.count} patterns cannot be found in {settings.tokens} tokens; read more with --tokens"
        )


def with_patterns(config: checkpoint.CheckpointConfig, settings: Settings) -> checkpoint.CheckpointConfig:
    """The configuration of the converted checkpoint, but for what was measured."""
    return replace(config, plan=replace(config.plan, mode="patterns", patterns=settings.patterns))


def convert_checkpoint(source: Path, out: Path, settings: Settings, note: Note, offline: bool = False) -> Conversion:
    """Fit patterns to what the routers of `source` decide and write the checkpoint `out`. Raises UsageError."""
    refuse(source, settings)
    stored = source / "recipe.yaml"
    recipe = load_text(stored.read_text(encoding="utf-8"), str(stored))
    config = checkpoint.read_config(source)
    note(f"loading {recipe.model.name}")
    backbone = load_backbone(recipe.model)
    section = recipe.data
    if settings.data:
        section = section.model_copy(update={"source": settings.data[0] if len(settings.data) == 1 else settings.data})
    sampled = SamplingModel(backbone.model, backbone.tokenizer, str(config.backbone.weights_hash), settings.seed)
    text = open_source(section.source, section=section, offline=offline, sampling=sampled)
    note(f"preparing tokens from {text.name}")
    section = section.model_copy(update={"max_tokens": None})
    tokens = prepare_tokens(text, backbone.tokenizer, section, tokens_needed=settings.tokens)

    # the adapter first, as in training: the routers were calibrated on what it makes of the residual
    bits, adapter = checkpoint.attach(source, backbone)
    routers = {name: value.clone() for name, value in bits.routers.state_dict().items()}
    bits.detach()
    converted = with_patterns(config, settings)
    routed = RoutedModel.attach(backbone.model, converted.plan, seed=settings.seed)
    routed.routers.load_state_dict(routers)
    found = convert(
        routed,
        text_batches(tokens, settings.tokens, settings.seed, backbone.device),
        seed=settings.seed,
        match=settings.match,
        context_tokens=section.sequence_length,
        say=note,
    )
    recipe = described(recipe, settings.patterns)
    converted = replace(
        converted,
        recipe_hash=recipe_hash(recipe),
        achieved=found.achieved,
        origin={**checkpoint.origin_of(source), "command": "patterns"},
    )
    extra: dict[str, Any] = {}
    if adapter is not None:
        extra[checkpoint.ADAPTER] = lambda path: adapter.save(path, config.backbone.id)
    checkpoint.save(out, routed.routers, converted, dump(recipe), extra, codebooks=routed.codebooks)
    routed.detach()
    return found


def described(recipe: Recipe, patterns: PatternPlan) -> Recipe:
    """The recipe that a second stage of the converted checkpoint goes by."""
    changes = {
        "mode": "patterns",
        "pattern_count": patterns.count,
        "pattern_segments": patterns.segments,
        "pattern_parts": patterns.parts,
    }
    routing = RoutingSection.model_validate({**recipe.routing.model_dump(), **changes})
    return recipe.model_copy(update={"routing": routing})

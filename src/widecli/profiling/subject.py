"""What is measured: the weights, the dense model on them, and the routed variants that take turns with it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from widecli.engine.model import InferenceModel
from widecli.engine.routing import RandomMasks
from widecli.engine.weights import ModelWeights, take_weights
from widecli.errors import UsageError
from widecli.model import checkpoint
from widecli.model.backbone import load_backbone, resolve_dtype
from widecli.model.compensation import build_compensations
from widecli.model.plan import CompensationPlan, ModelShape, RoutingPlan
from widecli.model.routed import build_routers
from widecli.model.vocabulary import refuse_unknown
from widecli.profiling.bound import Phase
from widecli.profiling.shapes import config_of_shape, random_model
from widecli.recipe.schema import ModelSection

Masks = Literal["learned", "random"]
Dense = Literal["own", "library"]  # by whom a dense model multiplies one row
_RANK = 32
_SMALL = 0.02
_CHARACTERS_A_TOKEN = 20  # a token is rarely longer


@dataclass(frozen=True)
class Settings:
    """What is measured, over which grid. `seconds` is the time for one setting; it holds for all variants together."""

    phases: tuple[Phase, ...]
    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    gen: int
    sparsities: tuple[float, ...]
    group_sizes: tuple[int, ...]
    masks: Masks
    memory: bool = False
    energy: bool = False
    breakdown: bool = False
    throughput: bool = False
    compare_hf: bool = False
    dense: Dense = "own"
    compensations: tuple[int | None, ...] = ()  # ranks, None = without; empty = the checkpoint's own
    seconds: float = 5.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Outline:
    """A model before its weights: enough to estimate and to refuse."""

    name: str
    shape: ModelShape
    dtype: torch.dtype
    tied: bool
    max_tokens: int | None  # None = known once it is loaded
    device: torch.device
    plans: tuple[RoutingPlan, ...]


@dataclass(frozen=True)
class Variant:
    """One routed model. `sparsity` None = what its routers decide; variants of one plan share model and `masks`."""

    sparsity: float | None
    plan: RoutingPlan
    model: InferenceModel
    masks: RandomMasks | None = None

    def prepare(self) -> None:
        """Make the model's masks this variant's."""
        if self.masks is not None and self.sparsity is not None:
            self.masks.skip(self.sparsity)

    @property
    def label(self) -> str:
        """For people."""
        rate = "learned" if self.sparsity is None else f"S {100 * self.sparsity:.4g} %"
        compensation = f", {self.plan.compensation.described}" if self.plan.compensation else ""
        return f"{rate}, G {self.plan.ffn_group_size}{compensation}"


@dataclass(frozen=True)
class Subject:
    """Everything loaded. `hugging_face`: the module whose weights these are."""

    outline: Outline
    dense: InferenceModel
    variants: tuple[Variant, ...]
    text: Tensor | None  # tokens of real text, where decisions depend on it
    hugging_face: Any

    def prompts(self, batch: int, tokens: int) -> Tensor:
        """int64 [B, T] on the host: consecutive pieces of the text, from its beginning again at its end; or random."""
        if self.text is None:
            generator = torch.Generator().manual_seed(0)
            return torch.randint(self.outline.shape.vocab_size, (batch, tokens), generator=generator)
        return self.text.repeat(-(-batch * tokens // len(self.text)))[: batch * tokens].view(batch, tokens)


def random_plans(
    shape: ModelShape,
    group_sizes: tuple[int, ...],
    like: RoutingPlan | None,
    compensations: tuple[int | None, ...] = (),
) -> tuple[RoutingPlan, ...]:
    """A plan for each group size and compensation, otherwise like a checkpoint's.

    `compensations` are ranks beside means, None = nothing is added; without any it is the checkpoint's own. Raises
    UsageError for a size that does not fit.
    """
    base = like or RoutingPlan(shape.query_heads_per_kv_head, group_sizes[0], _RANK)
    made = tuple(None if rank is None else CompensationPlan(rank=rank) for rank in compensations)
    plans = tuple(
        dataclasses.replace(base, ffn_group_size=size, compensation=compensation)
        for size in group_sizes
        for compensation in made or (base.compensation,)
    )
    for plan in plans:
        plan.validate(shape)
    return plans


def outline_of_shape(
    name: str,
    dtype: str,
    device: torch.device,
    group_sizes: tuple[int, ...],
    compensations: tuple[int | None, ...],
) -> tuple[Outline, Any]:
    """A known shape and its config; makes nothing."""
    config = config_of_shape(name)
    shape = ModelShape.from_config(config)
    outline = Outline(
        name.lower(),
        shape,
        resolve_dtype(dtype, device),
        bool(config.tie_word_embeddings),
        int(config.max_position_embeddings),
        device,
        random_plans(shape, group_sizes, None, compensations),
    )
    return outline, config


def subject_of_shape(outline: Outline, config: Any, settings: Settings) -> Subject:
    """Random weights of that shape, and random masks."""
    model = random_model(config, outline.device, outline.dtype)
    return with_random_masks(outline, take_weights(model), settings, model)


def load_dense(section: ModelSection, settings: Settings) -> tuple[Outline, InferenceModel]:
    """A dense model, to be measured with random masks."""
    model = InferenceModel.from_dense(load_backbone(section))
    return _outline_of(section.name, model, _plans_of(settings, model.shape, None)), model


def load_checkpoint(
    directory: Path, dtype: str | None, settings: Settings, *, beyond_positions: bool = False
) -> tuple[Outline, InferenceModel]:
    """A checkpoint, with its own plan or, where random masks replace its decisions, with those of the grid."""
    checkpoint.refuse_incomplete(directory)
    model = InferenceModel.from_checkpoint(directory, dtype=dtype, beyond_positions=beyond_positions)
    if model.plan is None or model.counter is None:
        raise UsageError(f"{directory} routes nothing: its plan leaves every part of every layer dense")
    plans = (model.plan,) if settings.masks == "learned" else _plans_of(settings, model.shape, model.plan)
    return _outline_of(checkpoint.read_config(directory).backbone.id, model, plans), model


def _plans_of(settings: Settings, shape: ModelShape, like: RoutingPlan | None) -> tuple[RoutingPlan, ...]:
    return random_plans(shape, settings.group_sizes, like, settings.compensations)


def characters_read(settings: Settings) -> int:
    """How much of a text has tokens enough for the largest cell."""
    return _CHARACTERS_A_TOKEN * max(settings.batches) * max(settings.prompts) + 1000


def subject_of_checkpoint(outline: Outline, model: InferenceModel, settings: Settings, words: str) -> Subject:
    """The checkpoint on the text `words`, with its own decisions or (`settings.masks`) random ones."""
    assert model.plan is not None and model.backbone is not None
    if settings.masks == "random":
        return with_random_masks(outline, model.weights, settings, model.backbone.model)
    encoded = model.backbone.tokenizer(words[: characters_read(settings)], add_special_tokens=False, verbose=False)[
        "input_ids"
    ]
    if not encoded:
        raise UsageError("the text has no tokens: name a longer one with --text")
    refuse_unknown("the text", encoded, model.backbone.model)
    text = torch.tensor(encoded, dtype=torch.int64)
    variant = Variant(None, model.plan, model)
    dense = InferenceModel.from_dense(model.weights, library=settings.dense == "library")
    return Subject(outline, dense, (variant,), text, model.backbone.model)


def with_random_masks(outline: Outline, weights: ModelWeights, settings: Settings, hugging_face: Any) -> Subject:
    """Any weights with routers that have learned nothing, each decision replaced by a random mask."""
    variants = []
    for plan in outline.plans:
        masks = RandomMasks(settings.sparsities[0])
        routers = build_routers(plan, outline.shape)
        compensations = _random_compensations(plan, outline.shape)
        model = InferenceModel.from_routed(weights, plan, routers, masks, compensations)
        variants += [Variant(sparsity, plan, model, masks) for sparsity in settings.sparsities]
    dense = InferenceModel.from_dense(weights, library=settings.dense == "library")
    return Subject(outline, dense, tuple(variants), None, hugging_face)


def _random_compensations(plan: RoutingPlan, shape: ModelShape) -> nn.ModuleDict:
    """What has learned nothing and is small: its values do not matter, but zeros would cost less power."""
    made = build_compensations(plan, shape)
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data.normal_(std=_SMALL, generator=generator)
    return made


def _outline_of(name: str, model: InferenceModel, plans: tuple[RoutingPlan, ...]) -> Outline:
    weights = model.weights
    tied = weights.lm_head.weight.data_ptr() == weights.embedding.data_ptr()
    return Outline(name, model.shape, weights.dtype, tied, model.max_tokens, weights.device, plans)

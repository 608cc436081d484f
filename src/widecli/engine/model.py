"""`InferenceModel`: a dense model or a calibrated checkpoint, ready to be served fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from widecli.engine.cache import KVCache, check_memory
from widecli.engine.compensation import StandIn, bypass_of
from widecli.engine.layer import Layer
from widecli.engine.routing import Decision, Masks, Reduction
from widecli.engine.session import Session
from widecli.engine.statistics import SkipCounter
from widecli.engine.weights import ModelWeights, take_weights
from widecli.errors import UsageError
from widecli.model import checkpoint
from widecli.model.backbone import Backbone, load_backbone
from widecli.model.compensation import Compensation, each_compensation
from widecli.model.plan import PARTS, ModelShape, PartName, RoutingPlan
from widecli.model.router import Router


@dataclass(frozen=True)
class InferenceModel:
    """Weights and decisions; `session` opens a batch on it, `engine.generate.generate` runs prompts.

    `backbone` carries tokenizer and identity where the model came from `from_checkpoint` or a `Backbone`. With
    `library` dense products of one row are the library's (cuBLAS), not the faster ones of `dense_rows`.
    """

    weights: ModelWeights
    layers: tuple[Layer, ...]
    plan: RoutingPlan | None
    counter: SkipCounter | None
    backbone: Backbone | None = None
    library: bool = False

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        *,
        dense: bool = False,
        dtype: str | None = None,
        device: torch.device | None = None,
        beyond_positions: bool = False,
    ) -> InferenceModel:
        """The model of a checkpoint or run directory with its routers, or (`dense`) its backbone alone.

        An adapter is merged into the weights. With `beyond_positions`, or where the checkpoint's recipe has it,
        sequences may be longer than the model is made for. Raises UsageError when the checkpoint is incomplete, belongs
        to another backbone or cannot run here.
        """
        directory = checkpoint.resolve(path)
        config = checkpoint.read_config(directory)
        section = checkpoint.section_of(directory)
        if dense and config.merged:
            raise UsageError(
                f"{directory} is a merged model: for its dense backbone name {config.backbone.id} by --model"
            )
        changes: dict[str, Any] = {"dtype": dtype} if dtype is not None else {}
        if beyond_positions:
            changes["beyond_positions"] = True
        section = section.model_copy(update=changes)
        backbone = load_backbone(section, device)
        routed, adapter = checkpoint.attach(directory, backbone)
        routed.detach()
        if dense:
            if adapter is not None:
                adapter.unload()
            return cls.from_dense(backbone)
        if adapter is not None:
            adapter.merge()
        return cls.from_routed(backbone, config.plan, routed.routers, compensations=routed.compensations)

    @classmethod
    def from_dense(cls, model: Backbone | nn.Module | ModelWeights, *, library: bool = False) -> InferenceModel:
        """A dense model: a loaded `Backbone` or a Hugging Face causal LM, which shares its weights with the result.

        Weights already taken serve several models at once, dense and routed. `library` as in the class.
        """
        weights = _weights_of(model)
        layers = tuple(Layer(i, weights, library=library) for i in range(weights.shape.num_hidden_layers))
        return cls(weights, layers, None, None, model if isinstance(model, Backbone) else None, library)

    @classmethod
    def from_routed(
        cls,
        model: Backbone | nn.Module | ModelWeights,
        plan: RoutingPlan,
        routers: nn.ModuleDict,
        masks: Masks | None = None,
        compensations: nn.ModuleDict | None = None,
    ) -> InferenceModel:
        """A model with routers laid out as in a `RoutedModel`; `masks` decide in their place, but they still run.

        `compensations`, laid out as there, are what the plan adds for skipped groups; they are cast to the model's
        dtype. Raises UsageError where the plan asks for what is not handed in.
        """
        weights = _weights_of(model)
        plan.validate(weights.shape)
        if plan.compensation is not None and not compensations:
            raise UsageError(
                f"this plan compensates for skipped groups ({plan.compensation.described}), and there is nothing to "
                "do it with: hand in the compensations too"
            )
        compensating = each_compensation(compensations) if plan.compensation and compensations else {}
        layers, decisions = _routed_layers(weights, plan, routers.to(weights.device), masks, compensating)
        counter = SkipCounter(plan, weights.shape, decisions) if decisions else None
        return cls(weights, layers, plan, counter, model if isinstance(model, Backbone) else None)

    @property
    def shape(self) -> ModelShape:
        """Its sizes."""
        return self.weights.shape

    @property
    def max_tokens(self) -> int:
        """The longest sequence, prompt and generated together, that this model may be asked for."""
        window = self.weights.window
        return self.weights.max_tokens if window is None else min(window, self.weights.max_tokens)

    def session(
        self, batch: int, capacity: int, *, graphs: bool | None = None, cache: KVCache | None = None
    ) -> Session:
        """Buffers for `batch` sequences of at most `capacity` tokens; CUDA graphs by default where there is a GPU.

        `cache`: another session's of the same size, for models that take turns on one; each overwrites the other's.
        Raises UsageError for more than the model or the memory can hold, naming the largest that fits.
        """
        if batch < 1 or capacity < 1:
            raise UsageError(f"a session needs at least one sequence of one token, got {batch} of {capacity}")
        self.check_length(capacity)
        device = self.weights.device
        if cache is None:
            check_memory(self.shape, batch, capacity, self.weights.dtype, device)
            cache = KVCache(self.shape, batch, capacity, self.weights.dtype, device)
        elif (cache.batch, cache.capacity) != (batch, capacity):
            raise UsageError(
                f"a cache of {cache.batch} sequences of {cache.capacity} tokens cannot serve {batch} of {capacity}"
            )
        on_gpu = device.type == "cuda"
        if graphs and not on_gpu:
            raise UsageError(f"CUDA graphs need a GPU, the model is on {device}")
        graphs = on_gpu if graphs is None else graphs
        return Session(self.weights, self.layers, self.counter, cache, graphs, self.library)

    def check_length(self, tokens: int) -> None:
        """Raise UsageError when the model cannot hold a sequence of so many tokens, naming what it can."""
        if tokens <= self.max_tokens:
            return
        window = self.weights.window
        if window is not None and window < self.weights.max_tokens:
            raise UsageError(
                f"sequences of {tokens} tokens reach beyond this model's sliding window of {window}, which the engine "
                f"does not have; it serves at most {window} tokens, prompt and generated together"
            )
        raise UsageError(
            f"sequences of {tokens} tokens are longer than the {self.max_tokens} this model is made for; ask for at "
            f"most {self.max_tokens}, prompt and generated together, or add --beyond-positions if you mean it"
        )


def _weights_of(model: Backbone | nn.Module | ModelWeights) -> ModelWeights:
    if isinstance(model, ModelWeights):
        return model
    if isinstance(model, Backbone):
        return take_weights(model.model, beyond_positions=model.beyond_positions)
    return take_weights(model)


def _routed_layers(
    weights: ModelWeights,
    plan: RoutingPlan,
    routers: nn.ModuleDict,
    masks: Masks | None,
    compensations: Mapping[tuple[int, PartName], Compensation],
) -> tuple[tuple[Layer, ...], dict[tuple[int, PartName], tuple[int, int]]]:
    """Every layer with its decisions, and where each decision's groups stand in the sums of a step."""
    layers: list[Layer] = []
    decisions: dict[tuple[int, PartName], tuple[int, int]] = {}
    taken = 0  # decisions so far
    groups = 0  # their groups

    for index, layer in enumerate(plan.layers(weights.shape)):
        made: dict[str, Decision] = {}
        norms = {"attention": weights.layers[index].attention_norm, "ffn": weights.layers[index].ffn_norm}
        added = {
            part: compensations[index, part] for part in PARTS if layer.groups(part) and (index, part) in compensations
        }
        bypasses = {part: bypass_of(added[part], norms[part], weights.device) for part in added}
        ours: Any = routers[str(index)] if str(index) in routers else {}  # noqa: SIM401 - a ModuleDict has no get
        for name in ("shared", "attention", "ffn"):  # the order in which a step takes them
            if name not in ours:
                continue
            parts: tuple[PartName, ...] = ("attention", "ffn") if name == "shared" else (cast(PartName, name),)
            made[name] = Decision(taken, cast(Router, ours[name]), norms[parts[0]], masks, bypasses.get(parts[0]))
            decisions |= {(index, part): (groups, made[name].groups) for part in parts}
            taken += 1
            groups += made[name].groups
        attention = made.get("shared", made.get("attention"))
        stand_ins = {part: StandIn.of(added[part], norms[part].weight.dtype, weights.device) for part in added}
        around = bypasses.get("ffn") if layer.shared else None
        reduction = None if around is None else Reduction(norms["ffn"], around)
        layers.append(
            Layer(index, weights, attention, made.get("ffn"), layer.shared, stand_ins=stand_ins, reduction=reduction)
        )
    return tuple(layers), decisions

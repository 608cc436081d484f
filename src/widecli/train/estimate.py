"""What a training stage will take, from shapes alone: FLOPs, a card's memory, time. All are estimates and say so."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from widecli.model.cost import fixed_flops, overhead_flops, part_flops
from widecli.model.plan import PARTS, ModelShape, RoutingPlan

if TYPE_CHECKING:
    from widecli.recipe.schema import Recipe

WHOLE_UP_TO = 0.4  # of a card's memory may be weights before they are dealt; the rest is for activations
# Share of a large matrix product's rate that a step reaches. Measured with SmolLM2-135M: one H200 (790 TFLOP/s) runs
# 145k tokens/s eager and 386k compiled, two CPU cores about 120 tokens/s. Larger models come closer to the peak:
# Llama-3.1-8B shapes reach 0.69 to 0.72 on one and on two H200s (compiled; eager is in proportion, not measured).
CPU_EFFICIENCY = 0.35
_EFFICIENCY = {"cuda": (0.10, 0.26), "cuda-compiled": (0.27, 0.69), "cpu": (CPU_EFFICIENCY, CPU_EFFICIENCY)}
_EFFICIENCY_WIDTHS = (576, 4096)  # hidden sizes of the two
_OPTIMIZER_COPIES = 4  # fp32 weights, gradients and two moments
_MESSAGE_COPIES = 2  # what ranks add up: one message of all gradients, and its sum
_GATHERED_LAYERS = 3  # of a dealt backbone: the one that runs, the next one, and the message that brings it
USABLE = 0.92  # of a card's memory: the rest is CUDA's own, NCCL's, and what fragments
_CHUNK_LOGITS_COPIES = 3


def efficiency(shape: ModelShape, device: str, *, compiled: bool) -> float:
    """Share of a large matrix product's rate that a training step reaches on a `cuda` or `cpu` device."""
    narrow, wide = _EFFICIENCY["cuda-compiled" if compiled and device == "cuda" else device]
    low, high = map(math.log, _EFFICIENCY_WIDTHS)
    position = (math.log(shape.hidden_size) - low) / (high - low)
    return narrow + (wide - narrow) * min(1.0, max(0.0, position))


def longest_sequences(recipe: Recipe) -> dict[str, int]:
    """Tokens of the longest sequences that a training feeds, by the key that sets them."""
    window = {"eval.perplexity_window": recipe.eval.perplexity_window} if recipe.data.validation else {}
    return {"data.sequence_length": recipe.data.sequence_length, **window}


@dataclass(frozen=True)
class Estimate:
    """Sizes in bytes, on the fullest card; FLOPs of the whole run, on all cards together."""

    router_parameters: int
    compensation_parameters: int
    adapter_parameters: int
    backbone_parameters: int
    groups_per_token: int
    tokens: int
    flops: float
    weights_bytes: float
    activations_bytes: float
    trainable_bytes: float
    ranks: int = 1
    host_bytes: float = 0.0  # of weights that lie in a rank's share of the machine's memory

    @property
    def memory_bytes(self) -> float:
        """Everything at the peak of a step."""
        return self.weights_bytes + self.activations_bytes + self.trainable_bytes

    def seconds(self, flops_per_second: float) -> float:
        """Time of the steps at a sustained rate of each card."""
        return self.flops / flops_per_second / self.ranks


def estimate(
    recipe: Recipe,
    shape: ModelShape,
    plan: RoutingPlan,
    *,
    value_bytes: int,
    lora: bool = False,
    ranks: int = 1,
    card_bytes: float | None = None,
) -> Estimate:
    """Estimate a calibration or, with `lora`, the second stage; `value_bytes` of one backbone value (2 for bf16).

    `card_bytes` decides whether distributed.shard=auto deals the backbone.
    """
    layers = plan.layers(shape)
    counts = [n for x in layers for n in ([1] if x.shared else [g for g in (x.attention_groups, x.ffn_groups) if g])]
    width, rank = shape.hidden_size, plan.rank
    routers = sum(width * rank + rank + 2 * n * (rank + 1) for n in counts)
    length = recipe.data.sequence_length
    tokens = recipe.train.steps * recipe.train.batch_size * length
    forward = shape.num_hidden_layers * sum(part_flops(shape, p, length) for p in PARTS) + fixed_flops(shape)
    # a training pass computes all groups and the means of all: it saves nothing yet
    passed = forward + overhead_flops(shape, rank, layers, plan.compensation) + _mean_flops(shape, plan)
    passes = 3 if recipe.train.activation_checkpointing else 2  # frozen weights need no gradient of their own
    taught = recipe.train.distill > 0 or (lora and recipe.lora.objective == "distill")
    adapter = _adapter_parameters(recipe, shape) if lora else 0
    substitutes = compensation_parameters(shape, plan)
    trained = adapter + (0 if lora and recipe.lora.freeze_routers else routers + substitutes)
    micro_tokens = (recipe.train.micro_batch_size or -(-recipe.train.batch_size // ranks)) * length
    copies = _OPTIMIZER_COPIES + (_MESSAGE_COPIES if ranks > 1 else 0)
    parameters = backbone_parameters(shape)
    held, on_host = _weights(recipe, shape, value_bytes, ranks, card_bytes)
    return Estimate(
        router_parameters=routers,
        compensation_parameters=substitutes,
        adapter_parameters=adapter,
        backbone_parameters=parameters,
        groups_per_token=sum(counts),
        tokens=tokens,
        flops=(passed * passes + forward * taught) * tokens,  # the teacher runs dense, and forward alone
        weights_bytes=held,
        activations_bytes=_activation_bytes(recipe, shape, plan, sum(counts), micro_tokens, value_bytes, lora),
        trainable_bytes=float(trained * 4 * copies),
        ranks=ranks,
        host_bytes=on_host,
    )


def _weights(
    recipe: Recipe, shape: ModelShape, value_bytes: int, ranks: int, card_bytes: float | None
) -> tuple[float, float]:
    """Bytes of the backbone on one card and in the memory beside it."""
    section = recipe.distributed
    layer, whole = _layer_parameters(shape) * value_bytes, float(backbone_parameters(shape) * value_bytes)
    fits = card_bytes is None or whole <= WHOLE_UP_TO * card_bytes
    dealt = section.offload or section.shard in ("node", "full") or (section.shard == "auto" and not fits)
    if not dealt or (ranks == 1 and not section.offload):
        return whole, 0.0
    layers = float(layer * shape.num_hidden_layers)
    always = whole - layers + min(_GATHERED_LAYERS, shape.num_hidden_layers) * layer
    return (always, layers / ranks) if section.offload else (always + layers / ranks, 0.0)


def remedies(recipe: Recipe, shape: ModelShape, plan: RoutingPlan, card_bytes: float, **how: Any) -> list[str] | None:
    """The recipe keys to change so that a run fits a card, the cheapest way that does; [] = it fits, None = none does.

    In this order: smaller micro-batches, recomputing activations, dealing the backbone, keeping it off the card.
    """
    for changes in _ways(recipe, how.get("ranks", 1)):
        tree = recipe.model_dump()
        for key, value in changes.items():
            section, _, name = key.partition(".")
            tree[section][name] = value
        tried = estimate(type(recipe).model_validate(tree), shape, plan, card_bytes=card_bytes, **how)
        if tried.memory_bytes <= USABLE * card_bytes:
            return [f"{key}={str(value).lower()}" for key, value in changes.items()]
    return None


def fitting_micro_batch(
    recipe: Recipe, shape: ModelShape, plan: RoutingPlan, card_bytes: float, *, ranks: int, **how: Any
) -> int:
    """The largest halving of a rank's share that should fit its card, at least one sequence."""
    size = max(1, recipe.train.batch_size // ranks)
    while size > 1:
        train = recipe.train.model_copy(update={"micro_batch_size": size})
        tried = recipe.model_copy(update={"train": train})
        figures = estimate(tried, shape, plan, card_bytes=card_bytes, ranks=ranks, **how)
        if figures.memory_bytes <= USABLE * card_bytes:
            break
        size = (size + 1) // 2
    return size


def _ways(recipe: Recipe, ranks: int) -> Iterator[dict[str, Any]]:
    """Changes to try, nothing first."""
    train, section = recipe.train, recipe.distributed
    largest = train.micro_batch_size or max(1, train.batch_size // ranks)
    sizes = [largest]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    recompute: list[dict[str, Any]] = [{}]
    if not train.activation_checkpointing:
        recompute.append({"train.activation_checkpointing": True})
    layouts: list[dict[str, Any]] = [{}]
    if ranks > 1 and section.shard != "full":
        layouts.append({"distributed.shard": "full"})
    if not section.offload:
        layouts.append({"distributed.shard": "full", "distributed.offload": True})
    for layout in layouts:
        for again in recompute:
            for size in sizes:
                yield {**({} if size == largest else {"train.micro_batch_size": size}), **again, **layout}


def backbone_parameters(shape: ModelShape) -> int:
    """Parameters of the dense model."""
    # an untied head would add V x D once more; shapes do not say, and the larger models here are untied
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.hidden_size < 4096 else 2)
    return shape.num_hidden_layers * _layer_parameters(shape) + embeddings


def compensation_parameters(shape: ModelShape, plan: RoutingPlan) -> int:
    """Parameters of what stands in for skipped groups: N D means a part, and two matrices r D of its bypass."""
    held = plan.compensation
    if held is None:
        return 0
    return sum((held.mean * groups + 2 * held.rank) * shape.hidden_size for groups in _routed_parts(shape, plan))


def _mean_flops(shape: ModelShape, plan: RoutingPlan) -> float:
    """FLOPs per token of adding the skipped groups' means, as one product over all groups."""
    means = plan.compensation is not None and plan.compensation.mean
    return 2.0 * shape.hidden_size * sum(_routed_parts(shape, plan)) * means


def _routed_parts(shape: ModelShape, plan: RoutingPlan) -> list[int]:
    """Groups of each routed part of each layer; a layer's shared decision counts for both of its parts."""
    return [groups for layer in plan.layers(shape) for part in PARTS if (groups := layer.groups(part))]


def _layer_parameters(shape: ModelShape) -> int:
    heads = shape.num_attention_heads + shape.num_key_value_heads
    return 2 * shape.hidden_size * heads * shape.head_dim + 3 * shape.hidden_size * shape.intermediate_size


def _adapter_parameters(recipe: Recipe, shape: ModelShape) -> int:
    """Both matrices on q, k, v, o, gate, up and down of every layer."""
    width, inner = shape.hidden_size, shape.intermediate_size
    query, key = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    ends = 2 * (width + query) + 2 * (width + key) + 3 * (width + inner)
    return shape.num_hidden_layers * recipe.lora.rank * ends


def _activation_bytes(
    recipe: Recipe, shape: ModelShape, plan: RoutingPlan, groups: int, tokens: int, value_bytes: int, lora: bool
) -> float:
    """Tensors kept for the backward pass of one micro-batch, plus one chunk of logits."""
    from widecli.model.loss import CHUNK_BYTES

    heads = (3 * shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim
    eager_layer = (6 * shape.hidden_size + heads + 4 * shape.intermediate_size) * value_bytes
    layer = eager_layer * (
        0.56 if recipe.train.compile is not False else 1.0
    )  # measured: fused kernels keep fewer tensors
    if lora:  # what dropout left of each linear layer's input, and where it dropped
        inputs = 5 * shape.hidden_size + shape.num_attention_heads * shape.head_dim + shape.intermediate_size
        layer += inputs * (value_bytes + 1)
    layer += _compensation_values(shape, plan) * value_bytes / shape.num_hidden_layers
    if recipe.train.activation_checkpointing:
        kept = shape.num_hidden_layers * shape.hidden_size * value_bytes + layer
    else:
        kept = shape.num_hidden_layers * layer
    # noise, its slices, masks and their gradients, fp32; of recomputed layers only the masks, which the budget reads
    decisions = groups * 4 * (1 if recipe.train.activation_checkpointing else 6)
    return float(tokens * (kept + decisions) + _CHUNK_LOGITS_COPIES * CHUNK_BYTES)


def _compensation_values(shape: ModelShape, plan: RoutingPlan) -> int:
    """Values a token that compensation keeps for its gradients: a bypass's input and A n twice, the groups skipped."""
    held = plan.compensation
    if held is None:
        return 0
    bypass = shape.hidden_size + 2 * held.rank if held.rank else 0
    return sum(bypass + held.mean * groups for groups in _routed_parts(shape, plan))

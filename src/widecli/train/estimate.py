"""What a training stage will take, from shapes alone: FLOPs, memory and time. Figures are estimates and say so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from widecli.model.cost import fixed_flops, part_flops, router_flops
from widecli.model.plan import PARTS, ModelShape, RoutingPlan

if TYPE_CHECKING:
    from widecli.recipe.schema import Recipe

# Share of a large matrix product's rate that a step reaches, measured on SmolLM2-135M: one H200 (790 TFLOP/s) runs
# 146k tokens/s eager and 319k compiled, two CPU cores about 120 tokens/s. Larger models come closer to the peak.
EFFICIENCY = {"cuda": 0.10, "cuda-compiled": 0.22, "cpu": 0.35}
_OPTIMIZER_COPIES = 4  # fp32 weights, gradients and two moments
_CHUNK_LOGITS_COPIES = 3


@dataclass(frozen=True)
class Estimate:
    """Sizes in bytes, FLOPs of the whole run."""

    router_parameters: int
    adapter_parameters: int
    backbone_parameters: int
    groups_per_token: int
    tokens: int
    flops: float
    weights_bytes: float
    activations_bytes: float
    trainable_bytes: float

    @property
    def memory_bytes(self) -> float:
        """Everything at the peak of a step."""
        return self.weights_bytes + self.activations_bytes + self.trainable_bytes

    def seconds(self, flops_per_second: float) -> float:
        """Time of the steps at a sustained rate."""
        return self.flops / flops_per_second


def estimate(recipe: Recipe, shape: ModelShape, plan: RoutingPlan, *, value_bytes: int, lora: bool = False) -> Estimate:
    """Estimate a calibration or, with `lora`, the second stage; `value_bytes` of one backbone value (2 for bf16)."""
    layers = plan.layers(shape)
    counts = [n for x in layers for n in ([1] if x.shared else [g for g in (x.attention_groups, x.ffn_groups) if g])]
    width, rank = shape.hidden_size, plan.rank
    routers = sum(width * rank + rank + 2 * n * (rank + 1) for n in counts)
    length = recipe.data.sequence_length
    tokens = recipe.train.steps * recipe.train.batch_size * length
    forward = shape.num_hidden_layers * sum(part_flops(shape, p, length) for p in PARTS) + fixed_flops(shape)
    forward += router_flops(shape, rank, layers)
    passes = 3 if recipe.train.activation_checkpointing else 2  # frozen weights need no gradient of their own
    passes += lora and recipe.lora.objective == "distill"  # the teacher's pass
    adapter = _adapter_parameters(recipe, shape) if lora else 0
    trained = adapter + (0 if lora and recipe.lora.freeze_routers else routers)
    micro_tokens = (recipe.train.micro_batch_size or recipe.train.batch_size) * length
    parameters = backbone_parameters(shape)
    return Estimate(
        router_parameters=routers,
        adapter_parameters=adapter,
        backbone_parameters=parameters,
        groups_per_token=sum(counts),
        tokens=tokens,
        flops=forward * passes * tokens,
        weights_bytes=float(parameters * value_bytes),
        activations_bytes=_activation_bytes(recipe, shape, sum(counts), micro_tokens, value_bytes, lora),
        trainable_bytes=float(trained * 4 * _OPTIMIZER_COPIES),
    )


def backbone_parameters(shape: ModelShape) -> int:
    """Parameters of the dense model."""
    heads = shape.num_attention_heads + shape.num_key_value_heads
    layer = 2 * shape.hidden_size * heads * shape.head_dim + 3 * shape.hidden_size * shape.intermediate_size
    # an untied head would add V x D once more; shapes do not say, and the larger models here are untied
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.hidden_size < 4096 else 2)
    return shape.num_hidden_layers * layer + embeddings


def _adapter_parameters(recipe: Recipe, shape: ModelShape) -> int:
    """Both matrices on q, k, v, o, gate, up and down of every layer."""
    width, inner = shape.hidden_size, shape.intermediate_size
    query, key = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    ends = 2 * (width + query) + 2 * (width + key) + 3 * (width + inner)
    return shape.num_hidden_layers * recipe.lora.rank * ends


def _activation_bytes(
    recipe: Recipe, shape: ModelShape, groups: int, tokens: int, value_bytes: int, lora: bool
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
    if recipe.train.activation_checkpointing:
        kept = shape.num_hidden_layers * shape.hidden_size * value_bytes + layer
    else:
        kept = shape.num_hidden_layers * layer
    decisions = groups * 4 * 6  # noise, its slices, masks and their gradients, fp32
    return float(tokens * (kept + decisions) + _CHUNK_LOGITS_COPIES * CHUNK_BYTES)

"""What skipping saves: FLOPs of each group, of the dense model and of a routed pass.

One multiply-add counts as two FLOPs; norms, rotary embedding, softmax and activations are left out (below 1 %).
Attention scores depend on the context: a prefill over C tokens gives a query (C + 1) / 2 keys on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from widecli.model.plan import LayerPlan, ModelShape, PartName


@dataclass(frozen=True)
class FlopsSkipped:
    """Shares of FLOPs skipped, against the dense model, at a stated context length.

    `prunable`: of what routing may skip (Q projection, attention, O projection, gate, up, down).
    `total`: of the whole forward pass with the LM head; the routers' own cost is subtracted from the gain.
    """

    prunable: float
    total: float
    context_tokens: int


def mean_keys(context_tokens: int) -> float:
    """Keys a query sees on average in a causal prefill over `context_tokens`."""
    return (context_tokens + 1) / 2


def part_flops(shape: ModelShape, part: PartName, context_tokens: int) -> float:
    """FLOPs per token of one layer's prunable part, all groups together."""
    if part == "ffn":
        return 2.0 * 3 * shape.hidden_size * shape.intermediate_size
    width = shape.num_attention_heads * shape.head_dim
    projections = 2.0 * 2 * shape.hidden_size * width
    scores = 2.0 * 2 * width * mean_keys(context_tokens)
    return projections + scores


def part_parameters(shape: ModelShape, part: PartName) -> int:
    """Weights of one layer's prunable part: Q and O, or gate, up and down."""
    if part == "ffn":
        return 3 * shape.hidden_size * shape.intermediate_size
    return 2 * shape.hidden_size * shape.num_attention_heads * shape.head_dim


def fixed_flops(shape: ModelShape) -> float:
    """FLOPs per token that no decision changes: K and V projections of every layer, and the LM head."""
    kv = 2.0 * 2 * shape.hidden_size * shape.num_key_value_heads * shape.head_dim
    return shape.num_hidden_layers * kv + 2.0 * shape.hidden_size * shape.vocab_size


def router_flops(shape: ModelShape, rank: int, layers: Sequence[LayerPlan]) -> float:
    """FLOPs per token of all routers."""
    total = 0.0
    for layer in layers:
        counts = [1] if layer.shared else [n for n in (layer.attention_groups, layer.ffn_groups) if n]
        total += sum(2.0 * rank * (shape.hidden_size + 2 * n) for n in counts)
    return total


def flops_skipped(
    shape: ModelShape,
    rank: int,
    layers: Sequence[LayerPlan],
    attention: Sequence[float],
    ffn: Sequence[float],
    context_tokens: int,
) -> FlopsSkipped:
    """Shares skipped, from each layer's skip rate of both parts (0 where a part is not routed)."""
    attention_cost = part_flops(shape, "attention", context_tokens)
    ffn_cost = part_flops(shape, "ffn", context_tokens)
    prunable = shape.num_hidden_layers * (attention_cost + ffn_cost)
    saved = sum(attention) * attention_cost + sum(ffn) * ffn_cost
    dense = prunable + fixed_flops(shape)
    return FlopsSkipped(
        prunable=saved / prunable,
        total=(saved - router_flops(shape, rank, layers)) / dense,
        context_tokens=context_tokens,
    )

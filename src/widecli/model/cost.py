"""What skipping saves: FLOPs of each group, of the dense model and of a routed pass.

One multiply-add counts as two FLOPs; norms, rotary embedding, softmax and activations are left out (below 1 %).
Attention scores depend on the context: a prefill over C tokens gives a query (C + 1) / 2 keys on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from widecli.model.plan import PARTS, CompensationPlan, LayerPlan, ModelShape, PartName


@dataclass(frozen=True)
class FlopsSkipped:
    """Shares of FLOPs skipped, against the dense model, at a stated context length.

    `prunable`: of what routing may skip (Q projection, attention, O projection, gate, up, down). `total`: of the whole
    forward pass with the LM head. Both are net: what routers and compensation cost is subtracted from the gain.
    `prunable_gross` subtracts nothing.
    """

    prunable: float
    prunable_gross: float
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


def part_savings(
    shape: ModelShape, part: PartName, groups: int, context_tokens: int, compensation: CompensationPlan | None
) -> float:
    """FLOPs per token that a layer is spared by skipping a whole part: its own, less the means in its place."""
    means = 2.0 * groups * shape.hidden_size if compensation and compensation.mean else 0.0
    return part_flops(shape, part, context_tokens) - means


def overhead_flops(
    shape: ModelShape, rank: int, layers: Sequence[LayerPlan], compensation: CompensationPlan | None
) -> float:
    """FLOPs per token that routing adds whatever is skipped: all routers and bypasses."""
    parts = sum(1 for layer in layers for part in PARTS if layer.groups(part))
    bypasses = 2.0 * 2 * compensation.rank * shape.hidden_size * parts if compensation else 0.0
    return router_flops(shape, rank, layers) + bypasses


def flops_skipped(
    shape: ModelShape,
    rank: int,
    layers: Sequence[LayerPlan],
    attention: Sequence[float],
    ffn: Sequence[float],
    context_tokens: int,
    compensation: CompensationPlan | None = None,
) -> FlopsSkipped:
    """Shares skipped, from each layer's skip rate of both parts (0 where a part is not routed)."""
    rates = {"attention": attention, "ffn": ffn}
    prunable = shape.num_hidden_layers * sum(part_flops(shape, part, context_tokens) for part in PARTS)
    gross = sum(sum(rates[part]) * part_flops(shape, part, context_tokens) for part in PARTS)
    saved = sum(
        rate * part_savings(shape, part, layer.groups(part), context_tokens, compensation)
        for part in PARTS
        for layer, rate in zip(layers, rates[part], strict=True)
    )
    net = saved - overhead_flops(shape, rank, layers, compensation)
    return FlopsSkipped(
        prunable=net / prunable,
        prunable_gross=gross / prunable,
        total=net / (prunable + fixed_flops(shape)),
        context_tokens=context_tokens,
    )

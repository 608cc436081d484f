"""FLOPs counted by hand for one small config: D 8, D' 32, 4 query heads and 2 KV heads of 4, 10 words, 2 layers."""

from __future__ import annotations

import pytest
import torch

from tiny_models import random_ids, tiny_model, tiny_routed
from widecli.model.cost import fixed_flops, flops_skipped, part_flops, part_parameters, router_flops
from widecli.model.plan import CompensationPlan, LayerPlan, ModelShape

SHAPE = ModelShape(
    num_hidden_layers=2,
    hidden_size=8,
    intermediate_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=10,
)


def test_parts_counted_by_hand() -> None:
    # Q: 8 x 16 multiply-adds, O the same = 256 multiply-adds = 512 FLOPs.
    # 7 tokens: a query sees 1..7 keys, 4 on average; q.k and p.v: 16 multiply-adds a key each, 2 * 16 * 4 -> 256.
    assert part_flops(SHAPE, "attention", 7) == 512 + 256
    # gate, up and down: 3 * 8 * 32 multiply-adds = 768 -> 1536 FLOPs, whatever the context
    assert part_flops(SHAPE, "ffn", 7) == part_flops(SHAPE, "ffn", 4096) == 1536
    assert (part_parameters(SHAPE, "attention"), part_parameters(SHAPE, "ffn")) == (256, 768)


def test_fixed_flops_counted_by_hand() -> None:
    # K and V: 2 * 8 * 8 multiply-adds a layer = 256 FLOPs, two layers 512; LM head 8 * 10 -> 160
    assert fixed_flops(SHAPE) == 512 + 160


def test_routers_counted_by_hand() -> None:
    layers = (LayerPlan(2, 4), LayerPlan(1, 1, shared=True))
    # rank 3: D x r and r x 2N multiply-adds: 3 * (8 + 4) + 3 * (8 + 8) + 3 * (8 + 2) = 114 -> 228 FLOPs
    assert router_flops(SHAPE, 3, layers) == 228


def test_flops_skipped_counted_by_hand() -> None:
    layers = (LayerPlan(2, 4), LayerPlan(2, 4))
    found = flops_skipped(SHAPE, 3, layers, attention=[0.5, 0.25], ffn=[0.75, 0.0], context_tokens=7)
    saved = 0.75 * 768 + 0.75 * 1536
    routers = 2 * (36 + 48) * 2
    dense = 2 * (768 + 1536) + 512 + 160
    assert found.prunable_gross == pytest.approx(saved / (2 * (768 + 1536)))
    assert found.prunable == pytest.approx((saved - routers) / (2 * (768 + 1536)))
    assert found.total == pytest.approx((saved - routers) / dense)
    assert found.context_tokens == 7


def test_compensation_counted_by_hand() -> None:
    layers = (LayerPlan(2, 4), LayerPlan(0, 4))
    plan = CompensationPlan(mean=True, rank=5)
    found = flops_skipped(SHAPE, 3, layers, [0.5, 0.0], [0.75, 0.25], 7, compensation=plan)
    saved = 0.5 * 768 + 1.0 * 1536
    # three routed parts: A and B of 5 x 8 each are 80 multiply-adds; a mean of 8 for each of the skipped groups:
    # half of 2, three of 4, one of 4
    added = 3 * 2 * 80 + 2 * 8 * (1 + 3 + 1)
    routers = 2 * 3 * (8 + 4) + 2 * (2 * 3 * (8 + 8))
    assert found.prunable == pytest.approx((saved - added - routers) / (2 * (768 + 1536)))
    assert found.prunable_gross == pytest.approx(saved / (2 * (768 + 1536)))
    without = flops_skipped(SHAPE, 3, layers, [0.5, 0.0], [0.75, 0.25], 7, compensation=CompensationPlan(False, 5))
    assert without.prunable - found.prunable == pytest.approx(2 * 8 * 5 / (2 * (768 + 1536)))


def test_skipping_nothing_costs_the_routers() -> None:
    layers = (LayerPlan(2, 4), LayerPlan(2, 4))
    found = flops_skipped(SHAPE, 3, layers, [0, 0], [0, 0], 7)
    assert found.prunable_gross == 0
    assert found.prunable == pytest.approx(-2 * 2 * (36 + 48) / (2 * (768 + 1536)))
    assert found.total < 0


def test_dense_flops_equal_what_torch_counts() -> None:
    """All matrix products of a real forward pass. Torch counts every key for every query: the mean of 2 T - 1."""
    from torch.utils.flop_counter import FlopCounterMode

    model = tiny_model(attn_implementation="eager")
    shape = ModelShape.from_config(model.config)
    tokens = 11
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=random_ids(1, tokens))
    ours = fixed_flops(shape) + shape.num_hidden_layers * (
        part_flops(shape, "attention", 2 * tokens - 1) + part_flops(shape, "ffn", tokens)
    )
    assert counter.get_total_flops() == ours * tokens


def test_the_trace_reports_the_share_that_its_rates_cost() -> None:
    routed = tiny_routed()
    with torch.no_grad(), routed.tracing() as trace:
        routed.decoder(input_ids=random_ids(1, 8))
    cost = {p: part_flops(routed.shape, p, 64) for p in ("attention", "ffn")}  # type: ignore[arg-type]
    rates = {p: trace.layer_rates(p).mean().item() for p in ("attention", "ffn")}  # type: ignore[arg-type]
    expected = sum(rates[p] * cost[p] for p in cost) / sum(cost.values())
    routers = router_flops(routed.shape, routed.plan.rank, routed.layers) / (2 * sum(cost.values()))
    assert trace.flops_skipped(64).prunable_gross == pytest.approx(expected, abs=1e-6)
    assert trace.flops_skipped(64).prunable == pytest.approx(expected - routers, abs=1e-6)

"""The ideal times against counts made by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from widecli.model.plan import CompensationPlan, ModelShape, RoutingPlan
from widecli.profiling.bound import Pass, Peaks, Skipped, bound, peaks_of

# D 8, D' 32, 4 query heads on 2 KV heads of 4, V 50: width 16, K and V together 16
SHAPE = ModelShape(1, 8, 32, 4, 2, 4, 50)
PLAN = RoutingPlan(attention_group_size=2, ffn_group_size=16, rank=3)
BY_FLOPS = Peaks(1.0, 1e30, "test")
BY_BYTES = Peaks(1e30, 1.0, "test")


def test_flops_of_a_dense_prefill() -> None:
    step = Pass.of(SHAPE, "ttft", 2, 10, 5, itemsize=2)
    found = bound(step, BY_FLOPS)
    rows, keys = 20, 5.5
    assert found.parts == pytest.approx(
        {
            "qkv": 2 * rows * 8 * (16 + 16),
            "attention": 2 * 2 * rows * keys * 16,
            "o": 2 * rows * 16 * 8,
            "gate_up": 2 * rows * 8 * 64,
            "down": 2 * rows * 32 * 8,
            "lm_head": 2 * 2 * 8 * 50,  # the last position of two sequences
        }
    )
    assert found.seconds == found.flops == sum(found.parts.values())


def test_bytes_of_a_dense_decode_step() -> None:
    step = Pass.of(SHAPE, "tpot", 2, 10, 4, itemsize=2)
    assert bound(step, BY_BYTES).parts == pytest.approx(
        {
            "qkv": 2 * (8 * 32 + 2 * (8 + 32)),
            "attention": 2 * (2 * 2 * 16 + 2 * 12 * 16),  # q and o; keys and values of 12 tokens on average
            "o": 2 * (16 * 8 + 2 * (16 + 8 + 8)),
            "gate_up": 2 * (8 * 64 + 2 * (8 + 32)),
            "down": 2 * (32 * 8 + 2 * (32 + 8 + 8)),
            "lm_head": 2 * (8 * 50 + 2 * (8 + 50)),
        }
    )


def test_a_routed_prefill_computes_what_is_executed_and_its_routers() -> None:
    step = Pass.of(SHAPE, "ttft", 2, 10, 5, itemsize=2)
    dense = bound(step, BY_FLOPS).parts
    routed = bound(step, BY_FLOPS, Skipped(PLAN, [[0.25, 0.75]], [[0.9, 0.7]])).parts
    assert routed["qkv"] == pytest.approx(2 * 20 * 8 * (16 * 0.5 + 16))  # K and V of every token stay
    assert routed["attention"] == pytest.approx(dense["attention"] / 2)
    assert routed["o"] == pytest.approx(dense["o"] / 2)
    assert routed["gate_up"] == pytest.approx(dense["gate_up"] * 0.2)
    assert routed["down"] == pytest.approx(dense["down"] * 0.2)
    assert routed["norm_route"] == pytest.approx(2 * 20 * 3 * 2 * (8 + 2 * 2))
    assert routed["lm_head"] == dense["lm_head"]


def test_a_decode_step_reads_the_weights_that_at_least_one_row_runs() -> None:
    parts = {}
    for batch in (1, 3):
        step = Pass.of(SHAPE, "tpot", batch, 10, 4, itemsize=1)
        parts[batch] = bound(step, BY_BYTES, Skipped.evenly(PLAN, SHAPE, 0.5)).parts
    assert parts[1]["down"] == pytest.approx(32 * 8 * 0.5 + 32 * 0.5 + 2 * 8)
    assert parts[3]["down"] == pytest.approx(32 * 8 * (1 - 0.5**3) + 3 * (32 * 0.5 + 2 * 8))
    # the cache belongs to its sequence: no other row makes a step read it
    assert parts[3]["attention"] == pytest.approx(3 * parts[1]["attention"])
    assert parts[1]["attention"] == pytest.approx(2 * 16 * 0.5 + 12 * 16 * 0.5)
    assert parts[1]["norm_route"] == parts[3]["norm_route"] == 4 * 3 * 2 * (8 + 2 * 2)


def test_compensation_reads_means_of_what_a_row_skips_and_the_bypass_whole() -> None:
    plan = dataclasses.replace(PLAN, compensation=CompensationPlan(rank=5))
    prefill, rates = Pass.of(SHAPE, "ttft", 2, 10, 5, itemsize=2), ([[0.25, 0.75]], [[0.9, 0.7]])
    without, found = (bound(prefill, BY_FLOPS, Skipped(p, *rates)).parts for p in (PLAN, plan))
    assert found["norm_route"] - without["norm_route"] == pytest.approx(2 * 2 * 20 * 5 * 8)  # both parts'
    assert found["o"] - without["o"] == pytest.approx(2 * 20 * 8 * (1.0 + 5))
    assert found["down"] - without["down"] == pytest.approx(2 * 20 * 8 * (1.6 + 5))
    for batch in (1, 3):
        step = Pass.of(SHAPE, "tpot", batch, 10, 4, itemsize=2)
        without, found = (bound(step, BY_BYTES, Skipped.evenly(p, SHAPE, 0.5)).parts for p in (PLAN, plan))
        assert found["down"] - without["down"] == pytest.approx(2 * 8 * (2 * (1 - 0.5**batch) + 5))
        assert found["norm_route"] - without["norm_route"] == 2 * 2 * 5 * 8
    means = dataclasses.replace(PLAN, parts="ffn", compensation=CompensationPlan(rank=0))
    found = bound(prefill, BY_FLOPS, Skipped(means, [[]], [[0.9, 0.7]])).parts
    assert found["down"] == pytest.approx(2 * 20 * 8 * (32 * 0.2 + 1.6)) and found["o"] == pytest.approx(
        2 * 20 * 16 * 8
    )


def test_keys_are_read_when_one_of_the_groups_on_them_runs() -> None:
    plan = RoutingPlan(attention_group_size=1, ffn_group_size=16, rank=3)
    step = Pass.of(SHAPE, "tpot", 1, 10, 4, itemsize=1)
    skipped = Skipped(plan, [[1.0, 1.0, 0.5, 0.5]], [[0.0, 0.0]])
    found = bound(step, BY_BYTES, skipped).parts["attention"]
    assert found == pytest.approx(2 * 16 * 0.25 + 12 * 16 * (0 + 0.75) / 2)


def test_each_part_takes_the_slower_of_flops_and_bytes() -> None:
    step = Pass.of(SHAPE, "ttft", 2, 10, 5, itemsize=2)
    peaks = Peaks(10.0, 7.0, "test")
    by_flops, by_bytes = bound(step, BY_FLOPS).parts, bound(step, BY_BYTES).parts
    expected = {part: max(by_flops[part] / 10, by_bytes[part] / 7) for part in by_flops}
    assert bound(step, peaks).parts == pytest.approx(expected)


def test_layers_add_up_and_unrouted_ones_are_dense() -> None:
    from widecli.model.plan import LayerOverride

    two = ModelShape(2, 8, 32, 4, 2, 4, 50)
    plan = RoutingPlan(2, 16, 3, overrides={0: LayerOverride(parts="none")})
    step = Pass.of(two, "ttft", 1, 10, 5, itemsize=2)
    routed = bound(step, BY_FLOPS, Skipped.evenly(plan, two, 0.5)).parts
    dense = bound(step, BY_FLOPS).parts
    assert routed["down"] == pytest.approx(0.75 * dense["down"])
    assert routed["norm_route"] == pytest.approx(2 * 10 * 3 * 2 * (8 + 2 * 2))


def test_the_llama_3_1_8b_decode_bound_is_its_weights_over_the_bandwidth() -> None:
    from widecli.model.shapes import SHAPES

    step = Pass.of(SHAPES["llama-3.1-8b"], "tpot", 1, 1024, 128, itemsize=2)
    found = bound(step, Peaks(989.4e12, 4.8e12, "data sheet"))
    # 7.5 billion weights without the embedding, 131 kB of cache a token
    assert found.bytes == pytest.approx(2 * 7.5047e9 + 1088 * 131072, rel=0.002)
    assert found.seconds == pytest.approx(3.16e-3, rel=0.01)


def test_peaks_are_measured_where_no_data_sheet_is_known() -> None:
    peaks = peaks_of(torch.device("cpu"), torch.float32)
    assert peaks.source == "measured" and peaks.flops > 1e8 and peaks.bytes > 1e7
    assert peaks_of(torch.device("cpu"), torch.float32) is peaks

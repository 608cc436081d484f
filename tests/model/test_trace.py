from __future__ import annotations

import pytest
import torch

from widecli.model.plan import LayerPlan, ModelShape
from widecli.model.trace import RoutingTrace

SHAPE = ModelShape(2, 8, 64, 4, 2, 2, 10)
LAYERS = (LayerPlan(2, 4), LayerPlan(0, 1))


def mask(*rows: list[int]) -> torch.Tensor:
    return torch.tensor([list(rows)], dtype=torch.bool)


def passed(trace: RoutingTrace, valid: torch.Tensor | None = None) -> None:
    trace.add_pass(
        {
            (0, "attention"): mask([1, 0], [0, 0], [1, 1]),
            (0, "ffn"): mask([1, 1, 1, 1], [0, 0, 0, 1], [1, 1, 0, 0]),
            (1, "ffn"): mask([1], [0], [0]),
        },
        valid,
    )


def test_rates_are_shares_of_groups_skipped_counted_by_hand() -> None:
    trace = RoutingTrace(SHAPE, 4, LAYERS)
    passed(trace)
    assert trace.tokens == 3
    assert trace.layer_rates("attention").tolist() == pytest.approx([3 / 6, 0])  # layer 1 is dense there
    assert trace.layer_rates("ffn").tolist() == pytest.approx([5 / 12, 2 / 3])
    rate = trace.skip_rate()
    assert (rate.attention, rate.ffn) == (pytest.approx(0.25), pytest.approx((5 / 12 + 2 / 3) / 2))
    assert rate.mean == pytest.approx((0.25 + (5 / 12 + 2 / 3) / 2) / 2)
    assert trace.group_rates("attention") == [pytest.approx([1 / 3, 2 / 3]), []]


def test_padding_is_left_out() -> None:
    trace = RoutingTrace(SHAPE, 4, LAYERS, keep_masks=True)
    passed(trace, torch.tensor([[True, False, True]]))
    assert trace.tokens == 2
    assert trace.layer_rates("attention")[0].item() == pytest.approx(1 / 4)
    assert trace.layer_rates("ffn").tolist() == pytest.approx([2 / 8, 1 / 2])
    assert trace.masks is not None and trace.masks[0, "attention"][0].tolist() == [[True, False], [True, True]]


def test_passes_add_up_weighted_by_their_tokens() -> None:
    trace = RoutingTrace(SHAPE, 4, LAYERS)
    passed(trace)
    passed(trace, torch.tensor([[True, False, False]]))
    assert trace.tokens == 4
    assert trace.layer_rates("attention")[0].item() == pytest.approx((3 + 1) / 8)


def test_counts_stay_exact_beyond_what_fp32_can_hold() -> None:
    layers = (LayerPlan(0, 1),)
    shape = ModelShape(1, 8, 64, 4, 2, 2, 10)
    trace = RoutingTrace(shape, 4, layers)
    trace.add_pass({(0, "ffn"): torch.ones(1, 2**24 + 2, 1, dtype=torch.bool)}, None)
    for _ in range(3):
        trace.add_pass({(0, "ffn"): torch.ones(1, 1, 1, dtype=torch.bool)}, None)
    assert trace.tokens == 2**24 + 5
    assert trace.layer_rates("ffn").item() == 0


def test_the_gradient_of_a_rate_reaches_the_mask_of_real_tokens_only() -> None:
    soft = torch.full((1, 3, 1), 0.5, requires_grad=True)
    trace = RoutingTrace(ModelShape(1, 8, 64, 4, 2, 2, 10), 4, (LayerPlan(1, 0),))
    trace.add_pass({(0, "attention"): soft}, torch.tensor([[True, True, False]]))
    trace.layer_rates("attention").sum().backward()
    assert soft.grad is not None and soft.grad.flatten().tolist() == [-0.5, -0.5, 0.0]


def test_a_trace_without_a_pass_says_so() -> None:
    with pytest.raises(RuntimeError, match="no forward pass"):
        RoutingTrace(SHAPE, 4, LAYERS).skip_rate()


def test_the_summary_is_plain_data_in_fractions() -> None:
    trace = RoutingTrace(SHAPE, 4, LAYERS)
    passed(trace)
    summary = trace.summary(64)
    assert set(summary) == {"skip_rate", "flops_skipped", "layers"}
    assert summary["flops_skipped"]["context_tokens"] == 64
    assert summary["layers"]["ffn"] == pytest.approx([5 / 12, 2 / 3])


def test_traces_of_several_processes_add_up_to_one() -> None:
    """One of them saw nothing, one several passes: what each sends has the same size and type."""
    one, several, none, whole = (RoutingTrace(SHAPE, 4, LAYERS) for _ in range(4))
    padded = torch.tensor([[True, True, False]])
    for trace, passes in ((one, [padded]), (several, [None, None]), (whole, [padded, None, None])):
        for valid in passes:
            passed(trace, valid)
    sent: list[torch.Tensor] = []

    def send(flat: torch.Tensor) -> torch.Tensor:
        sent.append(flat)
        return flat

    one.gathered(send), several.gathered(send)
    found = none.gathered(lambda flat: flat + sent[0] + sent[1])
    assert found.tokens == whole.tokens == 8
    for part in ("attention", "ffn"):
        assert found.group_rates(part) == whole.group_rates(part)


def test_traces_that_all_saw_nothing_are_no_trace() -> None:
    with pytest.raises(RuntimeError, match="no forward pass"):
        RoutingTrace(SHAPE, 4, LAYERS).gathered(lambda flat: flat)

from __future__ import annotations

import pytest
import torch

from widecli.errors import UsageError
from widecli.model.budget import Budget
from widecli.model.cost import part_flops, router_flops
from widecli.model.plan import LayerOverride, LayerPlan, ModelShape, RoutingPlan
from widecli.model.trace import RoutingTrace
from widecli.recipe.schema import BudgetSection

SHAPE = ModelShape(2, 8, 64, 4, 2, 4, 10)
PLAN = RoutingPlan(2, 16, rank=2)


def trace_of(attention: list[list[list[float]]], ffn: list[list[list[float]]]) -> RoutingTrace:
    """Masks by layer, token and group; an empty layer is not routed."""
    layers = tuple(LayerPlan(len(a[0]) if a else 0, len(f[0]) if f else 0) for a, f in zip(attention, ffn, strict=True))
    trace = RoutingTrace(SHAPE, 2, layers)
    masks = {}
    for part, rows in (("attention", attention), ("ffn", ffn)):
        for layer, values in enumerate(rows):
            if values:
                masks[layer, part] = torch.tensor([values], requires_grad=True)
    trace.add_pass(masks, None)  # type: ignore[arg-type]
    return trace


# attention: layer 0 skips 1 of 4, layer 1 skips 2 of 4; FFN: layer 0 skips 6 of 8, layer 1 nothing. Two tokens.
ATTENTION = [[[1.0, 1.0], [1.0, 0.0]], [[0.0, 1.0], [1.0, 0.0]]]
FFN = [[[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]], [[1.0] * 4, [1.0] * 4]]
A, F = (0.25 + 0.5) / 2, (0.75 + 0.0) / 2


def test_rate_is_the_plain_mean_of_both_parts() -> None:
    distance = Budget("rate", 0.9).distance(trace_of(ATTENTION, FFN))
    assert distance.item() == pytest.approx(0.9 - (A + F) / 2)


def test_rate_counts_one_part_when_only_one_is_routed() -> None:
    distance = Budget("rate", 0.9).distance(trace_of(ATTENTION, [[], []]))
    assert distance.item() == pytest.approx(0.9 - A)


def test_parts_meets_each_target_by_itself() -> None:
    trace = trace_of(ATTENTION, FFN)
    both = Budget("parts", 0.5, attention=0.5, ffn=0.1).distance(trace)
    assert both.item() == pytest.approx(((0.5 - A) + (F - 0.1)) / 2)
    one = Budget("parts", 0.5, ffn=0.1).distance(trace)
    assert one.item() == pytest.approx(F - 0.1)


def test_uniform_looks_at_every_layer() -> None:
    distance = Budget("uniform", 0.4).distance(trace_of(ATTENTION, FFN))
    layers = [(0.25 + 0.75) / 2, (0.5 + 0.0) / 2]
    assert distance.item() == pytest.approx((abs(layers[0] - 0.4) + abs(layers[1] - 0.4)) / 2)


def test_uniform_leaves_dense_layers_out_and_counts_the_parts_a_layer_has() -> None:
    distance = Budget("uniform", 0.4).distance(trace_of([ATTENTION[0], []], [[], []]))
    assert distance.item() == pytest.approx(0.4 - 0.25)


def test_flops_weighs_the_parts_by_their_cost() -> None:
    distance = Budget("flops", 0.9, context_tokens=32).distance(trace_of(ATTENTION, FFN))
    a, f = part_flops(SHAPE, "attention", 32), part_flops(SHAPE, "ffn", 32)
    routers = router_flops(SHAPE, 2, (LayerPlan(2, 4), LayerPlan(2, 4))) / (2 * (a + f))
    assert distance.item() == pytest.approx(0.9 + routers - (A * a + F * f) / (a + f)), "net of what the routers cost"


def test_flops_agrees_with_what_is_reported() -> None:
    trace = trace_of(ATTENTION, FFN)
    reported = trace.flops_skipped(32).prunable
    assert Budget("flops", reported, context_tokens=32).distance(trace).item() == pytest.approx(0, abs=1e-6)


def test_the_loss_is_the_distance_times_the_weight() -> None:
    trace = trace_of(ATTENTION, FFN)
    assert Budget("rate", 0.9, weight=7.0).loss(trace).item() == pytest.approx(
        7 * Budget("rate", 0.9).distance(trace).item()
    )


@pytest.mark.parametrize("kind", ["rate", "parts", "uniform", "flops"])
def test_gradients_push_towards_the_target_from_either_side(kind: str) -> None:
    for target, sign in ((0.99, 1), (0.0, -1)):
        mask = torch.full((1, 2, 4), 0.5, requires_grad=True)
        trace = RoutingTrace(ModelShape(1, 8, 64, 4, 2, 4, 10), 2, (LayerPlan(0, 4),))
        trace.add_pass({(0, "ffn"): mask}, None)
        Budget(kind, target, ffn=target).distance(trace).backward()  # type: ignore[arg-type]
        assert mask.grad is not None
        assert bool((mask.grad * sign > 0).all()), "a larger mask executes more and must move the loss accordingly"


def test_a_target_for_a_part_that_is_not_routed_is_refused() -> None:
    section = BudgetSection(kind="parts", attention=0.5, ffn=0.5)
    with pytest.raises(UsageError, match=r"budget.ffn is set, but the plan does not route the ffn part"):
        Budget.from_section(section, RoutingPlan(2, 16, parts="attention"), SHAPE, 32)


def test_a_plan_that_routes_nothing_is_refused() -> None:
    plan = RoutingPlan(2, 16, overrides={i: LayerOverride(parts="none") for i in range(2)})
    with pytest.raises(UsageError, match="routes nothing"):
        Budget.from_section(BudgetSection(), plan, SHAPE, 32)


def test_part_targets_in_layer_mode_are_refused() -> None:
    with pytest.raises(UsageError, match=r"routing\.mode=layer"):
        Budget.from_section(BudgetSection(kind="parts", ffn=0.5), RoutingPlan(2, 16, mode="layer"), SHAPE, 32)


def test_the_budget_takes_over_every_key_of_its_section() -> None:
    section = BudgetSection(kind="parts", attention=0.25, ffn=0.75, weight=3.0)
    assert Budget.from_section(section, PLAN, SHAPE, 99) == Budget(
        "parts", 0.5, 0.25, 0.75, 3.0, 99, section.start_share, section.ramp_ratio
    )


def test_scaling_multiplies_every_target_and_nothing_else() -> None:
    whole = Budget("parts", 0.5, attention=0.4, ffn=None, weight=3.0, context_tokens=64)
    assert whole.scaled(0.5) == Budget("parts", 0.25, attention=0.2, ffn=None, weight=3.0, context_tokens=64)

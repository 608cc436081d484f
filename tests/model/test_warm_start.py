from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiny_models import random_ids, tiny_model, tiny_plan
from widecli.errors import UsageError
from widecli.model.budget import Budget
from widecli.model.plan import LayerOverride, RoutingPlan
from widecli.model.routed import RoutedModel
from widecli.model.trace import RoutingTrace
from widecli.model.warm_start import WarmStart, closed_form, contribution, reduced_rank_regression


def brute_force(x: Tensor, s: Tensor, rank: int, penalty: float) -> Tensor:
    """Coefficients of rank-limited ridge regression, from the data itself and by singular values.

    The ridge solution, by appending sqrt(penalty) rows; then the fitted values' best rank-k approximation (Eckart and
    Young), which is a projection on their leading right-singular vectors.
    """
    d = x.shape[1]
    extended = torch.cat([x, penalty**0.5 * torch.eye(d, dtype=x.dtype)])
    full = torch.linalg.lstsq(
        extended, torch.cat([s, torch.zeros(d, s.shape[1], dtype=s.dtype)]), driver="gelsd"
    ).solution
    _, _, vh = torch.linalg.svd(x @ full, full_matrices=False)
    return full @ vh[:rank].T @ vh[:rank]


@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(30, 80),
    features=st.integers(2, 9),
    groups=st.integers(1, 7),
    rank=st.integers(1, 9),
    ridge=st.sampled_from([1e-9, 1e-3, 0.3]),
)
@settings(deadline=None, max_examples=60)
def test_regression_from_moments_equals_brute_force_in_fp64(
    seed: int, rows: int, features: int, groups: int, rank: int, ridge: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=generator, dtype=torch.float64)
    s = x @ torch.randn(features, groups, generator=generator, dtype=torch.float64)
    s = s + torch.randn(rows, groups, generator=generator, dtype=torch.float64)
    xx = x.T @ x
    left, right = reduced_rank_regression(xx, x.T @ s, rank, ridge)
    k = min(rank, features, groups)
    assert left.shape == (features, k) and right.shape == (groups, k)
    expected = brute_force(x, s, k, ridge * float(xx.diagonal().mean()))
    torch.testing.assert_close(left @ right.T, expected, rtol=1e-6, atol=1e-7)


def test_without_a_penalty_no_map_of_the_rank_fits_better() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 6, generator=generator, dtype=torch.float64)
    s = torch.randn(60, 5, generator=generator, dtype=torch.float64)
    left, right = reduced_rank_regression(x.T @ x, x.T @ s, 2, 0.0)
    best = (x @ left @ right.T - s).square().sum()
    for trial in range(30):
        noise = torch.Generator().manual_seed(trial)
        a = left + 0.05 * torch.randn(left.shape, generator=noise, dtype=torch.float64)
        b = right + 0.05 * torch.randn(right.shape, generator=noise, dtype=torch.float64)
        assert (x @ a @ b.T - s).square().sum() > best


@pytest.mark.parametrize(
    ("groups", "width", "outputs"), [(4, 32, 16), (2, 32, 8), (8, 32, 3), (1, 16, 16), (16, 16, 5)]
)
def test_contribution_equals_brute_force(groups: int, width: int, outputs: int) -> None:
    """Both branches: groups narrower and wider than the output."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, width, generator=generator)
    weight = torch.randn(outputs, width, generator=generator)
    size = width // groups
    expected = torch.empty(7, groups, dtype=torch.float64)
    for t in range(7):
        for g in range(groups):
            columns = slice(g * size, (g + 1) * size)
            added = weight[:, columns].double() @ hidden[t, columns].double()
            expected[t, g] = (added * added).sum()
    found = contribution(hidden, weight, groups)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_contributions_are_never_negative() -> None:
    hidden = torch.zeros(3, 32)
    hidden[1] = 1e-20
    assert bool((contribution(hidden, torch.randn(64, 32), 4) >= 0).all())


WHOLE = WarmStart(budget_share=1.0)  # the start itself meets the budget


def batches(padded: bool = False) -> list[tuple[Tensor, Tensor | None]]:
    found: list[tuple[Tensor, Tensor | None]] = []
    for i in range(8):
        ids = random_ids(4, 32, seed=i)
        valid = torch.arange(32)[None] < torch.tensor([[32], [20], [9], [32]]) if padded else None
        found.append((ids, valid))
    return found


def started(budget: Budget, padded: bool = False, seed: int = 0, model: Any = None, **plan: Any) -> RoutingTrace:
    """The warm start, then what its own text skips."""
    routed = RoutedModel.attach(model or tiny_model(seed=seed), tiny_plan(**plan), seed=seed)
    text = batches(padded)
    closed_form(routed, text, budget, WHOLE)
    with torch.no_grad(), routed.tracing() as trace:
        for ids, valid in text:
            routed.decoder(input_ids=ids, attention_mask=valid, use_cache=False)
    return trace


# Thresholds are set on logits seen before the last shift, and a shift changes what later layers see: a few percent.
TOLERANCE = 0.06


@pytest.mark.parametrize("mode", ["wide", "token", "layer"])
@pytest.mark.parametrize("sparsity", [0.25, 0.5])
def test_the_start_meets_a_rate_on_its_text(mode: str, sparsity: float) -> None:
    budget = Budget("rate", sparsity)
    assert budget.distance(started(budget, mode=mode)).item() < TOLERANCE


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("wide", "uniform"),
        ("token", "uniform"),
        pytest.param("layer", "uniform"),
        ("wide", "flops"),
        ("token", "flops"),
        ("layer", "flops"),
    ],
)
def test_the_start_meets_a_uniform_and_a_flops_budget(mode: str, kind: Any) -> None:
    budget = Budget(kind, 0.4, context_tokens=32)
    assert budget.distance(started(budget, mode=mode)).item() < TOLERANCE


@pytest.mark.parametrize("mode", ["wide", "token"])
def test_the_start_meets_targets_a_part(mode: str) -> None:
    trace = started(Budget("parts", 0.5, attention=0.6, ffn=0.2), mode=mode)
    rate = trace.skip_rate()
    assert rate.attention == pytest.approx(0.6, abs=TOLERANCE)
    assert rate.ffn == pytest.approx(0.2, abs=TOLERANCE)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("tap", ["residual", "normalised"])
def test_padding_and_taps(padded: bool, tap: str) -> None:
    budget = Budget("rate", 0.4)
    assert budget.distance(started(budget, padded, tap=tap)).item() < TOLERANCE


def test_zero_sparsity_skips_next_to_nothing() -> None:
    assert started(Budget("rate", 0.0)).skip_rate().mean < 0.02


@pytest.mark.parametrize(
    "kind",
    ["rate", "flops", pytest.param("uniform"), pytest.param("parts")],
)
def test_overrides_are_left_alone_and_the_rest_meets_the_budget(kind: Any) -> None:
    targets = {"attention": 0.3, "ffn": 0.3} if kind == "parts" else {}
    budget = Budget(kind, 0.3, context_tokens=32, **targets)
    trace = started(budget, overrides={0: LayerOverride(parts="ffn")})
    assert trace.layer_rates("attention")[0].item() == 0
    assert budget.distance(trace).item() < TOLERANCE


def test_the_start_is_the_same_every_time() -> None:
    weights = []
    for _ in range(2):
        routed = RoutedModel.attach(tiny_model(), tiny_plan())
        closed_form(routed, batches(), Budget("rate", 0.5), WHOLE)
        weights.append({name: p.clone() for name, p in routed.routers.state_dict().items()})
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())


def test_the_start_leaves_the_backbone_and_its_hooks_as_they_were() -> None:
    model = tiny_model()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    routed = RoutedModel.attach(model, tiny_plan())
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    closed_form(routed, batches(), Budget("rate", 0.5), WHOLE)
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert all(torch.equal(model.state_dict()[name], p) for name, p in before.items())
    assert all(p.requires_grad and p.grad is None for p in routed.parameters())
    assert all(bool(p.isfinite().all()) for p in routed.parameters())


def test_the_start_keeps_far_more_of_the_model_than_random_routers_do() -> None:
    """Distance of the last hidden states to the dense model's, at about the same skip rate."""
    ids = random_ids(8, 32, seed=99)
    model = tiny_model()
    routed = RoutedModel.attach(model, tiny_plan())
    with torch.no_grad():
        with routed.dense():
            dense = model.model(input_ids=ids).last_hidden_state
        random = model.model(input_ids=ids).last_hidden_state
    closed_form(routed, batches(), Budget("rate", 0.5), WHOLE)
    with torch.no_grad():
        closed = model.model(input_ids=ids).last_hidden_state
    assert (closed - dense).square().mean() < 0.8 * (random - dense).square().mean()


def test_a_dead_group_does_not_break_the_start() -> None:
    model = tiny_model()
    model.model.layers[0].mlp.down_proj.weight[:, :16] = 0
    routed = RoutedModel.attach(model, tiny_plan())
    closed_form(routed, batches(), Budget("rate", 0.5), WHOLE)
    assert all(bool(p.isfinite().all()) for p in routed.parameters())
    with torch.no_grad(), routed.tracing() as trace:
        for ids, _ in batches():
            routed.decoder(input_ids=ids)
    assert trace.group_rates("ffn")[0][0] > 0.95, "a group that adds nothing is the first to go"


def test_a_rank_above_what_the_scores_have_is_padded_with_zeros() -> None:
    routed = RoutedModel.attach(tiny_model(), RoutingPlan(2, 16, rank=12))
    closed_form(routed, batches(), Budget("rate", 0.5), WHOLE)
    router = routed.decisions[0, "attention"].router  # 2 groups, rank 12
    assert not bool(router.down.weight[2:].any()) and bool(router.down.weight[:2].any())


def test_by_default_the_start_skips_half_of_the_budget() -> None:
    routed = RoutedModel.attach(tiny_model(), tiny_plan())
    closed_form(routed, batches(), Budget("rate", 0.6))
    with torch.no_grad(), routed.tracing() as trace:
        for ids, _ in batches():
            routed.decoder(input_ids=ids, use_cache=False)
    assert trace.skip_rate().mean == pytest.approx(0.3, abs=TOLERANCE)


def test_first_order_scores_are_the_squared_gradients_of_the_loss_towards_the_gates() -> None:
    """By finite differences on the open gates: what the regression is fed, without the cost of a group."""
    from widecli.model.loss import next_token_loss

    model = tiny_model()
    routed = RoutedModel.attach(model, tiny_plan())
    ids = random_ids(1, 6)
    with routed.probing(open_gates=True):
        hidden = routed.decoder(input_ids=ids, use_cache=False).last_hidden_state
        next_token_loss(hidden, routed.lm_head.weight, ids, None).backward()
        gradients = {key: d.probe.grad for key, d in routed.decisions.items() if d.probe is not None}
    assert len(gradients) == 4
    handles = []
    step = 1e-2

    def loss_with(key: tuple[int, str], token: int, group: int, size: int, change: float) -> float:
        path = "self_attn.o_proj" if key[1] == "attention" else "mlp.down_proj"
        output = model.model.layers[key[0]].get_submodule(path)

        def scale(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            x = args[0].clone()
            x[0, token, group * size : (group + 1) * size] *= 1 + change
            return (x,)

        handle = output.register_forward_pre_hook(scale)
        handles.append(handle)
        with torch.no_grad(), routed.dense():
            logits = model(input_ids=ids).logits[0].double()
        handle.remove()
        return torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum").item()

    for key, size in (((0, "attention"), 16), ((1, "attention"), 16), ((0, "ffn"), 16), ((1, "ffn"), 16)):
        for token, group in ((0, 1), (2, 0), (4, 1)):
            up = loss_with(key, token, group, size, step)
            down = loss_with(key, token, group, size, -step)
            found = gradients[key][0, token, group].item()  # type: ignore[index]
            assert found == pytest.approx((up - down) / (2 * step), rel=0.03, abs=3e-3)


def test_a_model_that_gives_nan_is_named_before_anything_is_solved() -> None:
    model = tiny_model()
    model.model.layers[0].mlp.down_proj.weight[3, 5] = float("nan")
    routed = RoutedModel.attach(model, tiny_plan())
    with pytest.raises(UsageError, match=r"NaN or infinity on this text .*the attention of layer"):
        closed_form(routed, [(random_ids(2, 16), None)], Budget("rate", 0.5))

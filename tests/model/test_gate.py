from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from widecli.model.gate import argmax_gate, gumbel_gate, logistic_noise, margins

CPU = torch.device("cpu")


def test_argmax_gate_executes_where_class_0_is_at_least_as_likely() -> None:
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
    assert argmax_gate(margins(logits)).tolist() == [True, False, True]


@given(st.integers(0, 10_000), st.floats(0.05, 10))
@settings(deadline=None, max_examples=30)
def test_samples_are_exactly_zero_or_one(seed: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, 5, 2, generator=generator) * 3
    noise = logistic_noise(seed, 0, range(7), 1, 5, CPU)[:, 0]
    gate = gumbel_gate(margins(logits), torch.tensor(temperature), noise)
    assert gate.dtype == torch.float32
    assert set(gate.unique().tolist()) <= {0.0, 1.0}
    assert torch.equal(gate.bool(), logits[..., 0] + noise >= logits[..., 1])


def test_the_gradient_is_that_of_the_relaxed_sample() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 4, 2, generator=generator, dtype=torch.float64).requires_grad_()
    noise = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    upstream = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    (gumbel_gate(margins(logits), torch.tensor(0.8, dtype=torch.float64), noise) * upstream).sum().backward()
    step = 1e-6
    for index in [(0, 0, 0), (0, 0, 1), (3, 2, 0), (5, 3, 1)]:
        relaxed = []
        for sign in (1, -1):
            moved = logits.detach().clone()
            moved[index] += sign * step
            soft = 1 / (1 + torch.exp(-(moved[..., 0] - moved[..., 1] + noise) / 0.8))
            relaxed.append(float((soft * upstream).sum()))
        assert float(logits.grad[index]) == pytest.approx((relaxed[0] - relaxed[1]) / (2 * step), rel=1e-5)  # type: ignore[index]


def test_the_logistic_form_has_the_distribution_of_two_gumbel_draws() -> None:
    """Relaxed samples of softmax((logits + gumbel) / tau) and of ours, compared at many quantiles."""
    draws, tau = 200_000, 0.7
    logits = torch.tensor([0.9, 0.2])
    generator = torch.Generator().manual_seed(1)
    uniform = torch.rand(draws, 2, generator=generator, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
    gumbel = -torch.log(-torch.log(uniform))
    two = torch.softmax((logits.double() + gumbel) / tau, -1)[:, 0]
    noise = logistic_noise(3, 0, [0], draws, 1, CPU).flatten().double()
    one = torch.sigmoid((0.7 + noise) / tau)
    points = torch.linspace(0.02, 0.98, 49, dtype=torch.float64)
    gap = (two.quantile(points) - one.quantile(points)).abs().max()
    assert gap < 0.01
    executed = gumbel_gate(margins(logits.expand(draws, 1, 2)), torch.tensor(tau), noise.float()[:, None]).mean()
    expected = math.exp(0.9) / (math.exp(0.9) + math.exp(0.2))
    assert float(executed) == pytest.approx(expected, abs=5 * math.sqrt(0.25 / draws))


def test_noise_is_finite_fp32_and_standard_logistic() -> None:
    noise = logistic_noise(0, 0, range(8), 512, 16, CPU)
    assert noise.dtype == torch.float32 and bool(noise.isfinite().all())
    assert float(noise.mean()) == pytest.approx(0, abs=0.03)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 3, rel=0.03)


def test_noise_does_not_depend_on_how_the_batch_is_cut() -> None:
    whole = logistic_noise(5, 9, range(6), 4, 3, CPU)
    cut = torch.cat([logistic_noise(5, 9, rows, 4, 3, CPU) for rows in ([0], [1, 2], [3, 4, 5])])
    assert torch.equal(whole, cut)
    assert torch.equal(logistic_noise(5, 9, [4, 1], 4, 3, CPU), whole[[4, 1]])


@pytest.mark.parametrize("other", [(6, 9, 0), (5, 10, 0), (5, 9, 1)])
def test_noise_differs_between_seeds_steps_and_rows(other: tuple[int, int, int]) -> None:
    seed, step, row = other
    first = logistic_noise(5, 9, [0], 4, 3, CPU)
    assert not bool((first == logistic_noise(seed, step, [row], 4, 3, CPU)).any())


def test_noise_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    logistic_noise(0, 0, [0, 1], 4, 4, CPU)
    assert torch.equal(torch.rand(3), expected)

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from widecli.train.schedules import budget_share, learning_rate, temperature


def test_the_learning_rate_warms_up_linearly_then_falls_as_a_cosine() -> None:
    rates = [learning_rate(step, 100, 2e-3, 0.1) for step in range(100)]
    assert rates[:10] == pytest.approx([2e-4 * (i + 1) for i in range(10)])
    assert rates[10] == pytest.approx(2e-3)
    assert rates[55] == pytest.approx(1e-3)
    assert rates[99] == pytest.approx(1e-3 * (1 + math.cos(math.pi * 89 / 90)))


@given(st.integers(1, 2000), st.floats(0, 0.99), st.floats(1e-6, 1))
def test_the_learning_rate_is_positive_bounded_and_has_one_peak(steps: int, warmup: float, peak: float) -> None:
    rates = [learning_rate(step, steps, peak, warmup) for step in range(steps)]
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in rates)
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)


def test_without_a_warm_up_the_first_step_has_the_peak() -> None:
    assert learning_rate(0, 10, 0.5, 0.0) == 0.5


def test_the_temperature_is_linear_from_the_first_step_to_the_last() -> None:
    assert [temperature(s, 5, 5.0, 0.5) for s in range(5)] == pytest.approx([5.0, 3.875, 2.75, 1.625, 0.5])


def test_a_single_step_has_the_first_temperature() -> None:
    assert temperature(0, 1, 5.0, 0.5) == 5.0


def test_the_budget_rises_linearly_and_stays_at_one() -> None:
    assert [budget_share(s, 10, 0.5, 0.4) for s in range(6)] == pytest.approx([0.5, 0.625, 0.75, 0.875, 1.0, 1.0])


def test_without_a_ramp_the_whole_budget_counts_from_the_first_step() -> None:
    assert budget_share(0, 10, 0.5, 0.0) == 1.0

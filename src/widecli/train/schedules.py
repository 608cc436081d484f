"""Schedules as pure functions of the step, so that a resumed run needs nothing but the step."""

from __future__ import annotations

import math


def learning_rate(step: int, steps: int, peak: float, warmup_ratio: float) -> float:
    """Linear warm-up over `warmup_ratio * steps`, then a cosine to 0; `step` counts from 0 and the first is above 0."""
    warmup = warmup_ratio * steps
    if step < warmup:
        return peak * min(1.0, (step + 1) / warmup)
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1.0, steps - warmup)))


def budget_share(step: int, steps: int, start_share: float, ramp_ratio: float) -> float:
    """Share of the budget asked for at a step: linear from `start_share` to 1 over `ramp_ratio * steps`, then 1."""
    ramp = ramp_ratio * steps
    if step >= ramp:
        return 1.0
    return start_share + (1 - start_share) * step / ramp


def temperature(step: int, steps: int, start: float, end: float) -> float:
    """Gumbel-softmax temperature, linear from `start` at the first step to `end` at the last."""
    return start + (end - start) * step / max(1, steps - 1)

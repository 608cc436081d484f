"""FLOPs skipped as summaries hold them: gross, and net of what routers and compensation cost.

Until compensation came, `prunable` was gross and there was no net share of the prunable; since then it is net and
`prunable_gross` stands beside it. `total` was net always.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def gross_and_net(flops: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Shares of the prunable FLOPs skipped, gross and net; None for what a record does not have."""
    gross, prunable = _number(flops.get("prunable_gross")), _number(flops.get("prunable"))
    return (prunable, None) if "prunable_gross" not in flops else (gross, prunable)


def in_words(flops: Mapping[str, Any]) -> str:
    """`46.3% of the prunable (48.3% gross), 35.0% of all`: net, and gross where that is meant."""
    gross, net = gross_and_net(flops)
    shown = f"{gross:.1%} of the prunable, gross" if net is None else f"{net:.1%} of the prunable ({gross:.1%} gross)"
    return f"{shown}, {flops['total']:.1%} of all"


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)

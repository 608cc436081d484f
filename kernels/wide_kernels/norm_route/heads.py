"""Triton: what follows the router's bottleneck, a decision on groups; for both kernels."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def differences(w2, b2, first, N_G, R: tl.constexpr, RP: tl.constexpr, BG: tl.constexpr):
    """Weights [RP, BG] and bias [BG] of z = execute logit - skip logit, for BG groups."""
    rank = tl.arange(0, RP)
    group = first + tl.arange(0, BG)
    weights = w2 + (2 * group)[None, :] * R + rank[:, None]
    known = group < N_G
    square = (rank < R)[:, None] & known[None, :]
    weight = tl.load(weights, mask=square, other=0.0) - tl.load(weights + R, mask=square, other=0.0)
    bias = tl.load(b2 + 2 * group, mask=known, other=0.0) - tl.load(b2 + 2 * group + 1, mask=known, other=0.0)
    return weight, bias

"""Triton: what follows the router's bottleneck, a decision on groups or a choice of patterns; for both kernels."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


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


@triton.jit
def scoring(w2, b2, segment, first, C: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, BG: tl.constexpr):
    """Weights [RP, BG] and bias [BG] of the scores of BG patterns of a segment; past the last one the bias is -inf."""
    rank = tl.arange(0, RP)
    pattern = first + tl.arange(0, BG)
    known = pattern < C
    entry = segment * C + pattern
    square = (rank < R)[:, None] & known[None, :]
    weight = tl.load(w2 + entry[None, :] * R + rank[:, None], mask=square, other=0.0)
    return weight, tl.load(b2 + entry, mask=known, other=float("-inf"))


@dataclass(frozen=True)
class Head:
    """What follows the bottleneck: weights, biases and results of a decision, and the kernel's sizes for it."""

    w2: Tensor
    b2: Tensor
    numbers: Tensor
    patterns: Tensor
    ids: Tensor
    decided: Tensor
    sizes: dict[str, int]

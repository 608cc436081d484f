"""Triton: the left operand of what stands in for skipped groups, made in registers out of mask and bypass."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def skipped_share(mask, row, inside, N_G: tl.constexpr, NP: tl.constexpr):
    """u of some rows: the share of their N_G groups that they skip; NP, a power of two, holds N_G."""
    group = tl.arange(0, NP)
    known = inside[:, None] & (group < N_G)[None, :]
    runs = tl.load(mask + row[:, None] * N_G + group[None, :], mask=known, other=0)
    return (N_G - tl.sum((runs != 0).to(tl.int32), 1)).to(tl.float32) / N_G


@triton.jit
def coefficients(mask, reduced, row, inside, share, place, N_G: tl.constexpr, RB: tl.constexpr):
    """[1 - m, u reduced, zeros] in fp32, at columns `place` of `row`; both, `inside` and `share` broadcast together."""
    flags = tl.load(mask + row * N_G + place, mask=inside & (place < N_G), other=1)
    value = tl.where(flags == 0, 1.0, 0.0)
    if RB > 0:
        by = place - N_G
        known = inside & (by >= 0) & (by < RB)
        value += tl.load(reduced + row * RB + by, mask=known, other=0.0).to(tl.float32) * share
    return value

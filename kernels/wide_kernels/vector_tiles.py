"""Triton: tiles of a weight that one row is multiplied with, in registers, 16 bytes at a time in half precision."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weights_of(weight, columns, depth, counts, K: tl.constexpr, MASKED: tl.constexpr):
    """weight[columns, depth ... + 8] as [BC, BN, 8]; with MASKED zeros in the chunks that do not count."""
    # Chunks come first in the tile: neighbouring threads then read neighbouring chunks of one row.
    offset = columns[None, :, None].to(tl.int64) * K + (depth[:, None] + tl.arange(0, 8)[None, :])[:, None, :]
    if MASKED:
        return tl.load(weight + offset, mask=counts[:, None, None], other=0.0)
    return tl.load(weight + offset)


@triton.jit
def products_with(x, tile, depth, counts, MASKED: tl.constexpr):
    """Sums [BC, BN] of a tile of weights times the row's values there."""
    place = depth[:, None] + tl.arange(0, 8)[None, :]
    if MASKED:
        a = tl.load(x + place, mask=counts[:, None], other=0.0)
    else:
        a = tl.load(x + place)
    return tl.sum(a.to(tl.float32)[:, None, :] * tile.to(tl.float32), 2)

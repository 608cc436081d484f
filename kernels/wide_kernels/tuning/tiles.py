"""Sizes of tiles from sizes of problems."""

from __future__ import annotations

TILE = 16  # the smallest side of a tensor-core tile


def largest_power(size: int, limit: int) -> int:
    """The largest power of two, at most `limit`, that divides `size` (a multiple of 16)."""
    return min(size & -size, limit)


def padded_rows(rows: int) -> int:
    """The power of two, at least 16, that holds `rows`."""
    return max(TILE, 1 << (rows - 1).bit_length())

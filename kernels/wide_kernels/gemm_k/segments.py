"""How many adjacent groups GEMM-K sorts together."""

from __future__ import annotations

MAX_SEGMENT = 8  # groups; the counting sort has 2^segment bins, and a tile keeps its list in one register
TILE_ROWS = 128  # rows of a GEMM tile: a pattern needs about that many rows to fill one of its own


def segment_length(rows: int, groups: int, tile_rows: int = TILE_ROWS) -> int:
    """Groups in a segment: as many bits as there are full tiles to tell apart, spread evenly over the segments."""
    bits = max(1, min(MAX_SEGMENT, (max(rows // tile_rows, 1)).bit_length() - 1))
    segments = -(-groups // bits)
    return -(-groups // segments)

"""Measured configurations by GPU family, and entries that a benchmark forces while it compares candidates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from wide_kernels.tuning.tiles import largest_power

# Kernel -> the operator that shows its speed.
TUNED = {
    "gemm_mn": "gemm_mn",
    "gated_mlp_up": "gated_mlp_up",
    "gemm_k": "gemm_k",
    "gemm_k_order": "gemm_k",
    "vector_mn": "gemm_mn",
    "vector_gated": "gated_mlp_up",
    "vector_k": "gemm_k",
    "few_rows_mn": "gemm_mn",
    "few_rows_gated": "gated_mlp_up",
    "few_rows_k": "gemm_k",
}

Entries = Mapping[str, int]


class Key(NamedTuple):
    """What a configuration is chosen by; `rows` is a power of two, `width` that of a group in channels."""

    kernel: str
    rows: int
    width: int
    dtype: str


def _halves(kernel: str, rows: int, width: int, **entries: int) -> dict[Key, Entries]:
    """The same for both 16-bit types, whose kernels read the same bytes at the same speed."""
    return {Key(kernel, rows, width, dtype): entries for dtype in ("bfloat16", "float16")}


# Family -> key -> entries that replace what the launchers compute from the sizes. Only measured winners belong here.
TABLES: Mapping[str, Mapping[Key, Entries]] = {
    "sm_90": {
        **_halves("vector_gated", 1, 128, BN=4, BC=128, STAGES=3, num_warps=4),
        **_halves("vector_mn", 1, 128, BN=4, BC=256, STAGES=3, num_warps=4),
        **_halves("vector_k", 1, 128, BN=4, BC=256, STAGES=3, num_warps=4),
    },
}

_FORCED: dict[str, Entries] = {}


@contextmanager
def force(kernel: str, config: Entries) -> Iterator[None]:
    """Inside, `kernel` runs with these entries of its configuration instead of the built-in ones."""
    _FORCED[kernel] = config
    try:
        yield
    finally:
        del _FORCED[kernel]


def forced(kernel: str, width: int | None = None) -> dict[str, int]:
    """The forced entries, if any; with `width`, a column tile still divides a group of that many channels."""
    config = dict(_FORCED.get(kernel, {}))
    if "BN" in config and width is not None:
        config["BN"] = largest_power(width, config["BN"])
    return config

"""Measured configurations by GPU family, and entries that a benchmark forces while it compares candidates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

# Kernel -> the operator that shows its speed.
TUNED = {
    "gemm_mn": "gemm_mn",
    "hopper_mn": "gemm_mn",
    "hopper_gated": "gated_mlp_up",
    "gated_mlp_up": "gated_mlp_up",
    "gemm_k": "gemm_k",
    "hopper_k": "gemm_k",
    "gemm_k_order": "gemm_k",
    "vector_mn": "gemm_mn",
    "vector_gated": "gated_mlp_up",
    "vector_k": "gemm_k",
    "few_rows_mn": "gemm_mn",
    "few_rows_gated": "gated_mlp_up",
    "few_rows_k": "gemm_k",
    "norm_route": "norm_route",
    "norm_row": "norm_route",
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
        **_halves("few_rows_k", 64, 128, num_stages=5, SPLITS=4),
        **_halves("few_rows_k", 128, 128, SPLITS=4),
        **_halves("few_rows_mn", 64, 128, BK=128, num_stages=3),
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


def forced(kernel: str) -> dict[str, int]:
    """The forced entries, if any."""
    return dict(_FORCED.get(kernel, {}))

"""Configurations that replace the built-in ones: set by the benchmark while it compares candidates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from wide_kernels.tuning.tiles import largest_power

# Kernel -> the operator that shows its speed.
TUNED = {
    "gemm_mn": "gemm_mn",
    "gated_mlp_up": "gated_mlp_up",
    "gemm_k": "gemm_k",
    "gemm_k_order": "gemm_k",
    "few_rows_mn": "gemm_mn",
    "few_rows_gated": "gated_mlp_up",
    "few_rows_k": "gemm_k",
    "norm_route": "norm_route",
    "route_layout": "route_layout",
}

_FORCED: dict[str, Mapping[str, int]] = {}


@contextmanager
def force(kernel: str, config: Mapping[str, int]) -> Iterator[None]:
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

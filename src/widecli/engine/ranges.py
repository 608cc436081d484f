"""Names of a step's parts, which a profiler sees as ranges and a breakdown groups by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

RANGES = ("embed", "norm_route", "qkv", "rope_cache", "attention", "o", "gate_up", "down", "lm_head", "statistics")
"""In the order a step meets them; a range's name in a trace is `wide::<name>`."""

_NOTHING: AbstractContextManager[None] = nullcontext()
_wanted = False


def within(name: str) -> AbstractContextManager[object]:
    """The range `name` of a step; costs nothing unless `named_ranges` is open."""
    return torch.profiler.record_function(f"wide::{name}") if _wanted else _NOTHING


@contextmanager
def named_ranges() -> Iterator[None]:
    """Name the parts of every step inside the block. Replayed graphs have no ranges: measure those without."""
    global _wanted
    before, _wanted = _wanted, True
    try:
        yield
    finally:
        _wanted = before

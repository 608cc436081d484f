"""Operators that make skipping pay. They know tensors and masks, nothing about models.

A mask is bool [T, N_G], True = execute: token t runs group g. `route_layout(mask)` sorts it once for every operator
that shares the decision; for a few rows (decode) the GEMMs take `mask=` and need no layout. What stands in for skipped
groups (`StandIn`) is added by `gemm_k`, or by `compensate` where a library makes the product. Importing this package
imports neither torch nor triton: a name is loaded when it is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wide_kernels.attention_decode.launch import attention_decode
    from wide_kernels.attention_prefill.launch import attention_prefill
    from wide_kernels.compensate.launch import compensate
    from wide_kernels.dispatch import Explanation, available_backends, explain
    from wide_kernels.errors import UnsupportedError
    from wide_kernels.gemm_k.launch import gemm_k
    from wide_kernels.gemm_mn.launch import gated_mlp_up, gemm_mn
    from wide_kernels.layout import RouteLayout, route_layout
    from wide_kernels.norm_route.launch import norm_route
    from wide_kernels.norm_route.pieces import in_pieces, side_by_side
    from wide_kernels.stand_in import StandIn, stand_in_weight

__all__ = [
    "Explanation",
    "RouteLayout",
    "StandIn",
    "UnsupportedError",
    "attention_decode",
    "attention_prefill",
    "available_backends",
    "compensate",
    "explain",
    "gated_mlp_up",
    "gemm_k",
    "gemm_mn",
    "in_pieces",
    "norm_route",
    "route_layout",
    "side_by_side",
    "stand_in_weight",
]

_HOMES = {
    "Explanation": "dispatch",
    "RouteLayout": "layout",
    "StandIn": "stand_in",
    "UnsupportedError": "errors",
    "attention_decode": "attention_decode.launch",
    "attention_prefill": "attention_prefill.launch",
    "available_backends": "dispatch",
    "compensate": "compensate.launch",
    "explain": "dispatch",
    "gated_mlp_up": "gemm_mn.launch",
    "gemm_k": "gemm_k.launch",
    "gemm_mn": "gemm_mn.launch",
    "in_pieces": "norm_route.pieces",
    "norm_route": "norm_route.launch",
    "route_layout": "layout",
    "side_by_side": "norm_route.pieces",
    "stand_in_weight": "stand_in",
}


class _Package(ModuleType):
    """Importing `wide_kernels.gemm_mn.launch` must not put the sub-package where the operator `wk.gemm_mn` belongs."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    """Load a public name from its module when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value

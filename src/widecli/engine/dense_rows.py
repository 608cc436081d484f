"""Dense products of one row on a GPU, by the routed products' kernels with nothing skipped.

They read at 3.6 to 4.4 TB/s, the library at 2.5 to 4.2 (the products of Llama-3.1-8B on an H200; its LM head 234 us
against 242), and their first weights come while the launch before them ends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import wide_kernels as wk
from widecli.engine.cache import KVCache
from widecli.engine.weights import Linear


def one_row(x: Tensor) -> bool:
    """Whether x [rows, D] is one row on a GPU."""
    return len(x) == 1 and x.is_cuda


def takes_one_row(*weights: Tensor) -> bool:
    """Whether Triton takes one row of the products with these weights."""
    return all(_backend("gemm_mn", weight, 0, always=1) == "triton" for weight in weights)


def adds_one_row(*weights: Tensor) -> bool:
    """The same of products that are added to the residual stream."""
    return all(_backend("gemm_k", weight, 1) == "triton" for weight in weights)


def _backend(op: str, weight: Tensor, groups: int, **options: Any) -> str | None:
    """None where the backend that the environment asks for does not take it: nobody asked for these products."""
    mask = torch.ones(1, groups, dtype=torch.bool, device=weight.device)
    try:
        return wk.explain(op, weight.new_empty(1, weight.shape[1]), weight, mask=mask, **options).backend
    except wk.UnsupportedError:
        return None


def project_row(x: Tensor, linear: Linear, cache: KVCache) -> Tensor:
    """linear(x) for x [1, D]."""
    return wk.gemm_mn(x, linear.weight, bias=linear.bias, mask=cache.nothing, always=1, early=True)

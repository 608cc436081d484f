"""Element-wise steps that a GPU should do in one pass each: compiled there, plain torch on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from wide_kernels.activations import activate


def activate_gate(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up of the fused projection [rows, 2 D'] -> [rows, D']."""
    return _run(_activate_gate, gate_up, activation)


def rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """Rotate q and k, put k and v into the cache's slots; returns the rotated q.

    q [B, T, H_q, d], k and v and both cache slices [B, T, H_k, d], cos and sin [T, d] for the T positions.
    """
    return _run(_rotate_and_store, q, k, v, cos, sin, k_cache, v_cache)


def rotate_and_scatter(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> Tensor:
    """As `rotate_and_store` for one token a sequence, each at a slot of its own.

    q [B, 1, H_q, d], k and v [B, 1, H_k, d], cos and sin [B, d], caches [B, T_k, H_k, d], slots int64 [B].
    """
    return _run(_rotate_and_scatter, q, k, v, cos, sin, k_cache, v_cache, slots)


def _activate_gate(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return activate(gate, activation) * up


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., H, d]; cos and sin [..., 1, d]. The second half of d holds the partners of the first."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    cos, sin = cos[:, None], sin[:, None]
    k_cache.copy_(_rotate(k, cos, sin))
    v_cache.copy_(v)
    return _rotate(q, cos, sin)


def _rotate_and_scatter(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> Tensor:
    cos, sin = cos[:, None, None], sin[:, None, None]
    sequence = torch.arange(q.shape[0], device=q.device)
    k_cache[sequence, slots] = _rotate(k, cos, sin)[:, 0]
    v_cache[sequence, slots] = v[:, 0]
    return _rotate(q, cos, sin)


def _run(function: Callable[..., Tensor], first: Tensor, *rest: object) -> Tensor:
    return (_compiled(function) if first.is_cuda else function)(first, *rest)


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # dynamic: one kernel for all prompt lengths
    return torch.compile(function, dynamic=True, fullgraph=True)

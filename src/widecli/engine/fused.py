"""The engine's own steps, one launch each on a GPU (Triton), plain torch on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from wide_kernels.activations import activate
from widecli.engine.weights import Linear, Norm


def normalise(x: Tensor, norm: Norm) -> Tensor:
    """RMSNorm over the last dimension."""
    if x.is_cuda and x.dim() == 2:
        from widecli.engine import fused_triton

        return fused_triton.normalise(x, norm)
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)


def count_executed(mask: Tensor, active: Tensor, executed: Tensor, tokens: Tensor) -> None:
    """Add what active rows execute: mask bool [rows, N] and active bool [rows] to executed [N] and tokens [], int64."""
    if mask.is_cuda:
        from widecli.engine import fused_triton

        return fused_triton.count_executed(mask, active, executed, tokens)
    executed.add_((mask & active[:, None]).sum(0))
    tokens.add_(active.sum())
    return None


def positions(lengths: Tensor, first_slots: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """(cos, sin, slots, keys) of one more token a sequence, which has `lengths` [B] tokens in its slots from
    first_slots [B] on: rows [B, d] of the tables [capacity, d] for its position, its slot, and the keys that it sees,
    itself among them; int64.
    """
    if lengths.is_cuda:
        from widecli.engine import fused_triton

        return fused_triton.positions(lengths, first_slots, tables)
    cos, sin = (table[lengths] for table in tables)
    return cos, sin, first_slots + lengths, lengths + 1


def take_likeliest(logits: Tensor, token: Tensor, lengths: Tensor | None = None) -> None:
    """Put the first of the most likely tokens into `token` int64 [B], logits [B, V]; count it in `lengths` [B]."""
    if logits.is_cuda:
        from widecli.engine import fused_triton

        return fused_triton.take_likeliest(logits, token, lengths)
    token.copy_(logits.argmax(-1))
    if lengths is not None:
        lengths.add_(1)
    return None


def activate_gate(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up of the fused projection [rows, 2 D'] -> [rows, D']."""
    if gate_up.is_cuda:
        from widecli.engine import fused_triton

        return fused_triton.activate_gate(gate_up, activation)
    gate, up = gate_up.chunk(2, -1)
    return activate(gate, activation) * up


@dataclass(frozen=True)
class Places:
    """Where rows stand: cos and sin [rows, d] of their positions; row r goes to slots[r] (int64) of one layer's caches
    k_slots and v_slots [all slots, H_k, d], which are contiguous.
    """

    cos: Tensor
    sin: Tensor
    k_slots: Tensor
    v_slots: Tensor
    slots: Tensor


def rotate_and_store(q: Tensor, k: Tensor, v: Tensor, places: Places) -> Tensor:
    """Rotate q and k, put k and v into the cache; returns the rotated q.

    q [rows, H_q, d], k and v [rows, H_k, d].
    """
    if q.is_cuda:
        from widecli.engine import fused_triton

        return fused_triton.rotate_and_store(q, k, v, places)
    cos, sin = places.cos[:, None], places.sin[:, None]
    places.k_slots.index_copy_(0, places.slots, _rotate(k, cos, sin))
    places.v_slots.index_copy_(0, places.slots, v)
    return _rotate(q, cos, sin)


def project_and_store(
    x: Tensor, qkv: Linear, mask: Tensor, width: int, heads: tuple[int, int, int], places: Places
) -> Tensor:
    """Queries, keys and values of one row x [1, D] on a GPU and `rotate_and_store`, in one launch: q [1, H_q, d].

    `mask` bool [1, N] decides on the first N groups of `width` channels, the rest runs. First weights of what runs in
    any case are fetched while the launch before this one ends: they must be older than that. `heads`: H_q, H_k and d.
    D must be a multiple of 8.
    """
    from widecli.engine import fused_triton

    return fused_triton.project_and_store(x, qkv, mask, width, heads, places)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [rows, H, d]; cos and sin [rows, 1, d]. The second half of d holds the partners of the first."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin

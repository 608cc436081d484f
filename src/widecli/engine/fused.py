"""Element-wise steps that should take one pass over memory: Triton on a GPU, plain torch on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from wide_kernels.activations import activate
from widecli.engine.weights import Norm


def normalise(x: Tensor, norm: Norm) -> Tensor:
    """RMSNorm over the last dimension."""
    if x.is_cuda and x.dim() == 2:
        from widecli.engine import fused_triton

        return fused_triton.normalise(x, norm)
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)


def activate_gate(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up of the fused projection [rows, 2 D'] -> [rows, D']."""
    if gate_up.is_cuda:
        from widecli.engine import fused_triton

        return fused_triton.activate_gate(gate_up, activation)
    gate, up = gate_up.chunk(2, -1)
    return activate(gate, activation) * up


def rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_slots: Tensor, v_slots: Tensor, slots: Tensor
) -> Tensor:
    """Rotate q and k, put k and v into the cache; returns the rotated q.

    q [rows, H_q, d], k and v [rows, H_k, d], cos and sin [rows, d]; row r goes to `slots[r]` (int64) of the caches
    [all slots, H_k, d], which are contiguous.
    """
    if q.is_cuda:
        from widecli.engine import fused_triton

        return fused_triton.rotate_and_store(q, k, v, cos, sin, k_slots, v_slots, slots)
    cos, sin = cos[:, None], sin[:, None]
    k_slots.index_copy_(0, slots, _rotate(k, cos, sin))
    v_slots.index_copy_(0, slots, v)
    return _rotate(q, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [rows, H, d]; cos and sin [rows, 1, d]. The second half of d holds the partners of the first."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin

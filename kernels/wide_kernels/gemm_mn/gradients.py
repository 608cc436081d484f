"""Gradients of the routed up projections."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from wide_kernels.activations import activate, activate_backward
from wide_kernels.gemm_mn.reference import zero_skipped


def gemm_mn_gradients(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    mask: Tensor,
    bias: Tensor | None,
    activation: str | None,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Those of (x, weight, bias) that are needed."""
    gradient = zero_skipped(gradient.contiguous(), mask)
    if activation is not None:  # recomputed: keeping it would cost T x N
        gradient = activate_backward(gradient, F.linear(x, weight, bias), activation)
    to_x = gradient @ weight if needs[0] else None
    to_weight = gradient.t() @ x if needs[1] else None
    to_bias = gradient.sum(0) if bias is not None and needs[2] else None
    return to_x, to_weight, to_bias


def gated_mlp_up_gradients(
    gradient: Tensor, x: Tensor, w_gate: Tensor, w_up: Tensor, mask: Tensor, activation: str, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Those of (x, w_gate, w_up) that are needed."""
    gradient = zero_skipped(gradient.contiguous(), mask)
    gate, up = F.linear(x, w_gate), F.linear(x, w_up)  # recomputed: keeping them would cost 2 x T x D'
    to_gate = activate_backward(gradient * up, gate, activation)
    to_up = gradient * activate(gate, activation)
    to_x = to_gate @ w_gate + to_up @ w_up if needs[0] else None
    to_w_gate = to_gate.t() @ x if needs[1] else None
    to_w_up = to_up.t() @ x if needs[2] else None
    return to_x, to_w_gate, to_w_up

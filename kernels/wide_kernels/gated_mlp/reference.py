"""Plain torch: the two halves one after the other, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from wide_kernels.gemm_k.reference import gemm_k_gradients, gemm_k_reference
from wide_kernels.gemm_mn.gradients import gated_mlp_up_gradients
from wide_kernels.gemm_mn.reference import gated_mlp_up_reference


def gated_mlp_reference(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, mask: Tensor, residual: Tensor | None, activation: str
) -> Tensor:
    """(activation(x w_gate^T) * (x w_up^T)) w_down^T + residual, hidden channels zero where `mask` [T, N_G] skips."""
    return gemm_k_reference(gated_mlp_up_reference(x, w_gate, w_up, mask, activation), w_down, mask, residual)


def gated_mlp_gradients(
    gradient: Tensor,
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    mask: Tensor,
    activation: str,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Those of (x, w_gate, w_up, w_down) that are needed; the hidden channels are computed again."""
    hidden = gated_mlp_up_reference(x, w_gate, w_up, mask, activation)
    to_hidden, to_down = gemm_k_gradients(gradient, hidden, w_down, mask, (any(needs[:3]), needs[3]))
    if to_hidden is None:
        return None, None, None, to_down
    return *gated_mlp_up_gradients(to_hidden, x, w_gate, w_up, mask, activation, needs[:3]), to_down

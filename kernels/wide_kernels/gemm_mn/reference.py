"""Plain torch: the dense product with the skipped groups zeroed. Also the backend that runs anywhere."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from wide_kernels.activations import activate


def zero_skipped(y: Tensor, mask: Tensor) -> Tensor:
    """y [T, N] with exact zeros in the groups that `mask` [T, N_G] skips, whatever stood there (NaN too)."""
    rows, groups = mask.shape
    return y.view(rows, groups, y.shape[1] // groups).masked_fill(~mask[:, :, None], 0).view(y.shape)


def gemm_mn_reference(x: Tensor, weight: Tensor, mask: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """x [T, K], weight [N, K] -> activation(x weight^T + bias) [T, N], zeros where skipped."""
    return zero_skipped(activate(F.linear(x, weight, bias), activation), mask)


def gated_mlp_up_reference(x: Tensor, w_gate: Tensor, w_up: Tensor, mask: Tensor, activation: str | None) -> Tensor:
    """activation(x w_gate^T) * (x w_up^T) [T, D'], zeros where skipped."""
    return zero_skipped(activate(F.linear(x, w_gate), activation) * F.linear(x, w_up), mask)

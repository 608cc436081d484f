"""Plain torch: coefficients times weight. Also the backend that runs anywhere."""

from __future__ import annotations

import torch
from torch import Tensor

from wide_kernels.stand_in import coefficients


def compensate_reference(residual: Tensor | None, weight: Tensor, mask: Tensor, reduced: Tensor | None) -> Tensor:
    """residual [T, N] + [1 - m, u reduced] weight [N, P]^T, for mask [T, N_G] and reduced [T, Rb]."""
    left = coefficients(mask, reduced, weight.shape[1], weight.dtype)
    return left @ weight.t() if residual is None else torch.addmm(residual, left, weight.t())

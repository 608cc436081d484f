"""Plain torch: the dense product of the masked input. Also the backend that runs anywhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from wide_kernels.gemm_mn.reference import zero_skipped


def gemm_k_reference(h: Tensor, weight: Tensor, mask: Tensor, residual: Tensor | None) -> Tensor:
    """h [T, K] with its skipped groups zeroed, times weight [N, K]^T, plus residual [T, N]."""
    y = F.linear(zero_skipped(h.contiguous(), mask), weight)
    return y if residual is None else y + residual


def gemm_k_gradients(
    gradient: Tensor, h: Tensor, weight: Tensor, mask: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Those of (h, weight) that are needed."""
    to_h = zero_skipped(gradient @ weight, mask) if needs[0] else None
    to_weight = gradient.t() @ zero_skipped(h.contiguous(), mask) if needs[1] else None
    return to_h, to_weight

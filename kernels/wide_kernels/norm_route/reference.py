"""Plain torch: RMSNorm as Llama's, and the router in fp32. Also the backend that runs anywhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def norm_route_reference(
    x: Tensor, norm_weight: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(normalised x [T, D], mask [T, N_G]); the router reads x as it is, logits 2g = execute and 2g + 1 = skip."""
    rows = x.shape[0]
    with torch.autocast(x.device.type, enabled=False):
        full = x.float() if x.dtype is not torch.float64 else x
        scale = torch.rsqrt(full.square().mean(-1, keepdim=True) + eps)
        normalised = norm_weight * (full * scale).to(x.dtype)
        logits = F.linear(F.linear(full, w1.to(full.dtype), b1.to(full.dtype)), w2.to(full.dtype), b2.to(full.dtype))
        logits = logits.view(rows, w2.shape[0] // 2, 2)
        return normalised, logits[..., 0] >= logits[..., 1]

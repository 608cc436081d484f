"""Plain torch: RMSNorm as Llama's, and the router in fp32. Also the backend that runs anywhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from wide_kernels.norm_route.pieces import whole

TAP_EPS = 1e-6  # of the router's own norm, whatever the layer's is: that which routers are calibrated with


def norm_route_reference(
    x: Tensor,
    norm_weight: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    eps: float,
    tap: str = "residual",
) -> tuple[Tensor, Tensor]:
    """(normalised x [T, D], mask [T, N_G]); logits 2g = execute and 2g + 1 = skip.

    The router reads x as it is, or with tap="normalised" divided by its root mean square, unrounded and without the
    norm's weight.
    """
    with torch.autocast(x.device.type, enabled=False):
        full = x.float() if x.dtype is not torch.float64 else x
        mean_square = full.square().mean(-1, keepdim=True)
        normalised = norm_weight * (full * torch.rsqrt(mean_square + eps)).to(x.dtype)
        read = full * torch.rsqrt(mean_square + TAP_EPS) if tap == "normalised" else full
        logits = _linear(_linear(read, whole(w1), b1), w2, b2).view(x.shape[0], w2.shape[0] // 2, 2)
        return normalised, logits[..., 0] >= logits[..., 1]


def reduced_reference(x: Tensor, bypass: Tensor, eps: float) -> Tensor:
    """What a bypass [Rb, D] reads of x [T, D]: its product with x over its root mean square, rounded once."""
    with torch.autocast(x.device.type, enabled=False):
        full = x.float() if x.dtype is not torch.float64 else x
        scale = torch.rsqrt(full.square().mean(-1, keepdim=True) + eps)
        return (F.linear(full, bypass.to(full.dtype)) * scale).to(x.dtype)


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """In the dtype of x."""
    return F.linear(x, weight.to(x.dtype), bias.to(x.dtype))

"""The activations that the GEMMs can fuse, in torch: value and gradient. Triton's forms are in `gemm_mn/triton.py`."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from wide_kernels.errors import UnsupportedError

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


def check_activation(op: str, activation: str | None) -> None:
    """Refuse an activation that no backend knows."""
    if activation is not None and activation not in ACTIVATIONS:
        raise UnsupportedError(f"{op}: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")


def activate(x: Tensor, activation: str | None) -> Tensor:
    """The activation's value; None is the identity."""
    if activation is None:
        return x
    if activation == "silu":
        return F.silu(x)
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def activate_backward(gradient: Tensor, x: Tensor, activation: str | None) -> Tensor:
    """The gradient in front of the activation, from the one behind it and the activation's input."""
    aten = torch.ops.aten
    if activation is None:
        return gradient
    if activation == "silu":
        return cast(Tensor, aten.silu_backward(gradient, x))
    if activation == "relu":
        return cast(Tensor, aten.threshold_backward(gradient, x, 0))
    return cast(Tensor, aten.gelu_backward(gradient, x, approximate="tanh" if activation == "gelu_tanh" else "none"))

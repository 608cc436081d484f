"""NaN and infinity in weights: found once, when they are read, and named."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from widecli.errors import UsageError


def not_finite(model: nn.Module | Tensor) -> UsageError:
    """The sentence for a model whose predictions are NaN although its weights are finite: activations overflow."""
    dtype = str(model.dtype).removeprefix("torch.")
    remedy = "take model.dtype=bfloat16 or float32" if dtype == "float16" else "check the model, or take another copy"
    return UsageError(f"the model predicts NaN in {dtype}, so that nothing can be measured: {remedy}")


@torch.no_grad()
def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Name of the first floating-point tensor that holds NaN or infinity, or None.

    One pass that allocates nothing (minimum and maximum, which carry NaN), and one wait for the device.
    """
    names: list[str] = []
    ends: list[Tensor] = []
    for name, tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            names.append(name)
            wide = tensor.float() if tensor.dtype.itemsize < 2 else tensor  # of 8 bits there is no minimum
            ends.append(torch.stack(torch.aminmax(wide)).float())
    finite = torch.isfinite(torch.stack(ends)).all(dim=1).tolist() if ends else []
    return next((name for name, is_finite in zip(names, finite, strict=True) if not is_finite), None)

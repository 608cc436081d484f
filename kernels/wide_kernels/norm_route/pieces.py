"""A router's fp32 weight as 16-bit numbers that tensor cores multiply."""

from __future__ import annotations

import torch
from torch import Tensor

PIECES = 3  # bf16 numbers have 8 bits: three add up to the 24 of an fp32 one


def in_pieces(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 [r, D] -> `dtype` [3, r, D], whose thirds add up to it: exactly in bf16, to 6e-8 in fp16.

    A 16-bit x times each of them, summed in fp32, is as good as an fp32 product and takes none of its conversions. Made
    once, where the weight is loaded.
    """
    pieces = []
    for _ in range(PIECES):
        pieces.append(weight.to(dtype))
        weight = weight - pieces[-1].float()
    return torch.stack(pieces)


def whole(weight: Tensor) -> Tensor:
    """The fp32 weight [r, D] of either form."""
    return weight if weight.dim() == 2 else weight.double().sum(0).float()

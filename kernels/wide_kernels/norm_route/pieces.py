"""A router's fp32 weight as 16-bit numbers that tensor cores multiply."""

from __future__ import annotations

import torch
from torch import Tensor

from wide_kernels.errors import UnsupportedError

PIECES = 3  # bf16 numbers have 8 bits: three add up to the 24 of an fp32 one


def in_pieces(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 [r, D] -> `dtype` [3, r, D], whose thirds add up to it: exactly in bf16, within 6e-8 in fp16.

    A 16-bit x times each of them, summed in fp32, is as good as an fp32 product and takes none of its conversions. Made
    once, where the weight is loaded. Raises UnsupportedError for another weight or a dtype that has no 16 bits.
    """
    if weight.dim() != 2 or weight.dtype is not torch.float32:
        raise UnsupportedError(f"in_pieces: the weight must be float32 [r, D], got {weight.dtype} {list(weight.shape)}")
    if dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedError(f"in_pieces: pieces are bfloat16 or float16, got {dtype}; a wider x takes w1 whole")
    pieces = []
    for _ in range(PIECES):
        pieces.append(weight.to(dtype))
        weight = weight - pieces[-1].float()
    return torch.stack(pieces)


def whole(weight: Tensor) -> Tensor:
    """The fp32 weight [r, D] of either form."""
    return weight if weight.dim() == 2 else weight.double().sum(0).float()

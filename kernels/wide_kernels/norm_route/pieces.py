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


def side_by_side(pieces: Tensor, bypass: Tensor) -> tuple[Tensor, Tensor]:
    """The same pieces [3, r, D] and bypass [Rb, D] as views of one tensor: `norm_route` makes one product of them.

    Made once, where the weights are loaded. Raises UnsupportedError where they do not fit together.
    """
    fit = (
        pieces.dim() == 3 and bypass.dim() == 2 and pieces.dtype is bypass.dtype and pieces.shape[2] == bypass.shape[1]
    )
    if not fit:
        raise UnsupportedError(
            "side_by_side: pieces [3, r, D] and a bypass [Rb, D] have one dtype and one D, "
            f"got {pieces.dtype} {list(pieces.shape)} and {bypass.dtype} {list(bypass.shape)}"
        )
    together = torch.cat([pieces.flatten(0, 1), bypass])
    rows = len(together) - len(bypass)
    return together[:rows].view(pieces.shape), together[rows:]


def are_side_by_side(pieces: Tensor, bypass: Tensor) -> bool:
    """Whether these contiguous tensors lie so in memory."""
    return bypass.data_ptr() == pieces.data_ptr() + pieces.numel() * pieces.element_size()


def whole(weight: Tensor) -> Tensor:
    """The fp32 weight [r, D] of either form."""
    return weight if weight.dim() == 2 else weight.double().sum(0).float()

"""Patterns of groups on the inference path: which one each row picks, and the numbers that rows are sorted by.

A pattern's score is linear in what the router's first product gives, so all of a row's scores are one small product
more. Patterns are numbered so that neighbours are alike: rows are sorted by number, and those that meet in a tile then
run few groups more than their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import wide_kernels as wk
from widecli.model.patterns import Codebook
from widecli.model.router import Router

_PIECES = 3  # bf16 numbers that add up to an fp32 one


@dataclass(frozen=True)
class Choice:
    """What rows picked: `ids` int32 [rows, S], one in each segment of the groups; `patterns` bool [S, C + 1, width].

    The last pattern of a segment runs nothing: padding's.
    """

    ids: Tensor
    patterns: Tensor

    @property
    def mask(self) -> Tensor:
        """The decision group by group, bool [rows, N]."""
        segments = torch.arange(self.patterns.shape[0], device=self.ids.device)
        return self.patterns[segments, self.ids].flatten(1)


def numbered(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Patterns bool [S, C, width] in their order here, with the empty one behind, and the order, int64 [S, C]."""
    order = torch.stack([wk.similar_order(segment) for segment in bits])
    chained = torch.take_along_dim(bits, order[..., None], 1)
    return F.pad(chained, (0, 0, 0, 1)), order


class PatternScores:
    """A router and its codebook: from rows of the residual stream to their choice."""

    def __init__(self, router: Router, codebook: Codebook) -> None:
        size = codebook.size
        self._segments, self._count = size.segments, size.count
        bits = codebook.bits.detach()
        self.patterns, order = numbered(bits)
        # fp64: folding the two products rounds once, to fp32
        signs = 2 * torch.take_along_dim(bits, order[..., None], 1).double() - 1
        sizes = (size.segments, size.width, 2, -1)
        up, bias = (t.detach().double().view(sizes) for t in (router.up.weight, router.up.bias))
        self._w2 = (signs @ (up[:, :, 0] - up[:, :, 1])).float().flatten(0, 1)
        self._b2 = (signs @ (bias[:, :, 0] - bias[:, :, 1])).float().flatten()
        self._router = router
        self._w1, self._b1 = router.plain_down_weight().contiguous(), router.down.bias.detach()
        self._pieces = _in_bf16(self._w1)

    def choose(self, x: Tensor) -> Choice:
        """x [rows, D] -> the best pattern of each segment; arithmetic in fp32."""
        scores = F.linear(self._hidden(x), self._w2, self._b2).view(len(x), self._segments, self._count)
        return Choice(scores.argmax(-1).to(torch.int32), self.patterns)

    def _hidden(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.dtype is torch.bfloat16 and self._router.tap == "residual":
            # on tensor cores and as exact: x is bf16 as it is, the weight in three pieces, sums in fp32
            parts = torch.mm(x, self._pieces.t(), out_dtype=torch.float32)
            return parts.view(len(x), _PIECES, -1).sum(1) + self._b1
        return F.linear(self._router.features(x), self._w1, self._b1)


def _in_bf16(weight: Tensor) -> Tensor:
    """fp32 [r, D] -> bf16 [3 r, D], whose thirds add up to it."""
    pieces = []
    for _ in range(_PIECES):
        pieces.append(weight.to(torch.bfloat16))
        weight = weight - pieces[-1].float()
    return torch.cat(pieces)

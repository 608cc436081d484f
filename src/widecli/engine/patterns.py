"""Patterns of groups on the inference path: which one each row picks, and the numbers that rows are sorted by.

A pattern's score is linear in what the router's first product gives, so choosing one costs what deciding on groups
does. Patterns are numbered so that neighbours are alike: rows are sorted by number, and those that meet in a tile then
run few groups more than their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import wide_kernels as wk
from wide_kernels.norm_route.reference import pattern_mask
from widecli.engine.weights import Norm
from widecli.model.patterns import Codebook
from widecli.model.router import Router


@dataclass(frozen=True)
class Choice:
    """What rows picked: `ids` int32 [S, rows], one in each segment of the groups; `patterns` bool [S, C + 1, width].

    The last pattern of a segment runs nothing: padding's. `made` is the mask where it came with the choice.
    """

    ids: Tensor
    patterns: Tensor
    made: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """The decision group by group, bool [rows, N]."""
        return pattern_mask(self.ids, self.patterns) if self.made is None else self.made


def numbered(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Patterns bool [S, C, width] in their order here, with the empty one behind, and the order, int64 [S, C]."""
    order = torch.stack([wk.similar_order(segment) for segment in bits])
    chained = torch.take_along_dim(bits, order[..., None], 1)
    return F.pad(chained, (0, 0, 0, 1)), order


class PatternRouter:
    """A router, its codebook and the norm that shares its input: from rows of the residual stream to their choice.

    Scores come in the codebook's order, so that of equal ones the pattern that the codebook has first is picked.
    """

    def __init__(self, router: Router, codebook: Codebook, norm: Norm) -> None:
        size = codebook.size
        bits = codebook.bits.detach()
        self.patterns, order = numbered(bits)
        # fp64: folding the two products rounds once, to fp32
        signs = 2 * bits.double() - 1
        sizes = (size.segments, size.width, 2, -1)
        up, bias = (t.detach().double().view(sizes) for t in (router.up.weight, router.up.bias))
        self._first = (first_weight(router, norm), router.down.bias.detach())
        w2 = (signs @ (up[:, :, 0] - up[:, :, 1])).float()
        b2 = (signs @ (bias[:, :, 0] - bias[:, :, 1])).float().squeeze(-1)
        self._second = (w2, b2, order.argsort(1).to(torch.int32))
        self._norm = norm
        self._tap = router.tap

    def choose(self, x: Tensor, masked: bool) -> tuple[Tensor, Choice]:
        """x [rows, D] -> (normalised x, the best pattern of each segment, with its mask if `masked`)."""
        normalised, ids, mask = wk.norm_route_patterns(
            x, self._norm.weight, *self._first, *self._second, self._norm.eps,
            patterns=self.patterns if masked else None, tap=self._tap, early=True,
        )  # fmt: skip
        return normalised, Choice(ids, self.patterns, mask)


def first_weight(router: Router, norm: Norm) -> Tensor:
    """The router's first weight as `wk.norm_route` takes it for rows of the norm's dtype: in pieces for bf16."""
    weight = router.plain_down_weight().contiguous()
    return wk.in_pieces(weight, torch.bfloat16) if norm.weight.dtype is torch.bfloat16 else weight

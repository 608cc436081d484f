"""Decisions of the inference path: what the routers say, or masks given from outside while the routers still run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import wide_kernels as wk
from wide_kernels import RouteLayout
from wide_kernels.random_masks import random_masks
from widecli.engine.weights import Norm
from widecli.model.router import Router


@dataclass(frozen=True)
class Route:
    """One decision as the operators take it: sorted into a layout (prefill) or as a bare mask [rows, N] (decode).

    `reduced` [rows, r]: what the bypass around the part's skipped groups has read of them, where there is one.
    """

    mask: Tensor
    layout: RouteLayout | None = None
    reduced: Tensor | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Keywords for the operators that take either form."""
        return {"mask": self.mask} if self.layout is None else {"layout": self.layout}


class Masks(Protocol):
    """Decides in place of the routers."""

    def take(self, index: int, learned: Tensor) -> Tensor:
        """The mask of decision `index` in place of what its router says, bool [rows, N]; no host sync."""


class RandomMasks:
    """Masks that skip a given share of groups at random: for speed on models whose routers have learned nothing.

    Every row skips as many, see `random_masks`. The masks lie on the device and change with the decision and the row.
    They are drawn when a shape is first met, so a graph needs one plain run before it is captured; `redraw` and `skip`
    change what later runs and replays see.
    """

    def __init__(self, sparsity: float, seed: int = 0) -> None:
        self.sparsity = sparsity
        self.seed = seed
        self._masks: dict[tuple[int, int, int], Tensor] = {}

    def take(self, index: int, learned: Tensor) -> Tensor:
        """The mask of decision `index`, of the shape of `learned`."""
        key = (index, *learned.shape)
        if key not in self._masks:
            self._masks[key] = torch.empty_like(learned)
            self._draw(key)
        return self._masks[key]

    @torch.inference_mode()
    def redraw(self, seed: int) -> None:
        """Other masks, in the same memory."""
        self.seed = seed
        for key in self._masks:
            self._draw(key)

    def skip(self, sparsity: float) -> None:
        """Masks that skip this share, in the same memory."""
        if sparsity != self.sparsity:
            self.sparsity = sparsity
            self.redraw(self.seed)

    def forget(self) -> None:
        """Let go of the masks, when no session that met them runs any more."""
        self._masks.clear()

    def _draw(self, key: tuple[int, int, int]) -> None:
        mask = self._masks[key]
        generator = torch.Generator(mask.device).manual_seed(self.seed * 1_000_003 + key[0])
        mask.copy_(random_masks(mask.shape, self.sparsity, key[0], generator, mask.device))


class Decision:
    """One router with the norm that shares its input, ready to run on rows of the residual stream.

    `bypass` [r, D]: what else reads that input, with the norm's weight in it; None = nothing does.
    """

    def __init__(
        self, index: int, router: Router, norm: Norm, masks: Masks | None, bypass: Tensor | None = None
    ) -> None:
        self.index = index
        self.groups = router.groups
        self.masks = masks
        self._norm = norm
        self._tap = router.tap
        first, self.bypass = _beside(_first_weight(router, norm), bypass)
        self._router = (first, router.down.bias.detach(), router.up.weight.detach(), router.up.bias.detach())

    def take(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """x [rows, D] -> (normalised x, mask bool [rows, N], what the bypass reads [rows, r] or None)."""
        normalised, mask, *reduced = wk.norm_route(
            x, self._norm.weight, *self._router, self._norm.eps, tap=self._tap, bypass=self.bypass, early=True
        )
        if self.masks is not None:
            mask = self.masks.take(self.index, mask)
        return normalised, mask, reduced[0] if reduced else None


class Reduction:
    """A norm and a bypass where no decision is taken: the FFN's in layer mode, which follows the attention's.

    It is `norm_route` with a router of one group whose word nobody asks for, so that it takes the norm's launch alone.
    """

    def __init__(self, norm: Norm, bypass: Tensor) -> None:
        self._norm = norm
        self.bypass = bypass
        w1 = torch.zeros(1, len(norm.weight), device=bypass.device)
        rest = (w1.new_zeros(1), w1.new_zeros(2, 1), w1.new_zeros(2))
        self._router = (wk.in_pieces(w1, bypass.dtype) if bypass.element_size() == 2 else w1, *rest)

    def take(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [rows, D] -> (normalised x, what the bypass reads [rows, r])."""
        normalised, _, reduced = wk.norm_route(
            x, self._norm.weight, *self._router, self._norm.eps, bypass=self.bypass, early=True
        )
        return normalised, reduced


def _first_weight(router: Router, norm: Norm) -> Tensor:
    """The router's first weight as `wk.norm_route` takes it for rows of the norm's dtype: in pieces for bf16."""
    weight = router.plain_down_weight().contiguous()
    return wk.in_pieces(weight, torch.bfloat16) if norm.weight.dtype is torch.bfloat16 else weight


def _beside(weight: Tensor, bypass: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The same two, where they can be in one piece of memory, which `wk.norm_route` reads in one product."""
    if bypass is None or weight.dim() != 3:
        return weight, bypass
    return wk.side_by_side(weight, bypass)

"""Decisions of the inference path: what the routers say, or masks given from outside while the routers still run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

import wide_kernels as wk
from wide_kernels import RouteLayout
from widecli.engine.weights import Norm
from widecli.model.gate import Bits, Gate, margins
from widecli.model.patterns import Codebook
from widecli.model.router import Router


@dataclass(frozen=True)
class Route:
    """One decision as the operators take it: sorted into a layout (prefill) or as a bare mask [rows, N] (decode)."""

    mask: Tensor
    layout: RouteLayout | None

    @property
    def arguments(self) -> dict[str, Any]:
        """Keywords for the operators that take either form."""
        return {"mask": self.mask} if self.layout is None else {"layout": self.layout}


class Masks(Protocol):
    """Decides in place of the routers."""

    def take(self, index: int, learned: Tensor) -> Tensor:
        """The mask of decision `index` in place of what its router says, bool [rows, N]; no host sync."""


class RandomMasks:
    """Every group is skipped with the same chance: for speed on models whose routers have learned nothing.

    The masks lie on the device and change with the decision and the row. They are drawn when a shape is first met, so a
    graph needs one plain run before it is captured; `redraw` and `skip` change what later runs and replays see.
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
        mask.copy_(torch.rand(mask.shape, generator=generator, device=mask.device) >= self.sparsity)


class Decision:
    """One router with the norm that shares its input, ready to run on rows of the residual stream."""

    def __init__(
        self, index: int, router: Router, norm: Norm, masks: Masks | None, codebook: Codebook | None = None
    ) -> None:
        self.index = index
        self.groups = router.groups
        self.masks = masks
        self._norm = norm
        self._router = router
        self._gate: Gate = codebook or Bits(router.groups)
        self._fused = codebook is None and router.tap == "residual"
        self._w1 = router.plain_down_weight().contiguous()
        self._b1, self._w2, self._b2 = (t.detach() for t in (router.down.bias, router.up.weight, router.up.bias))

    def take(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [rows, D] -> (normalised x, mask bool [rows, N])."""
        if self._fused:
            weights = (self._norm.weight, self._w1, self._b1, self._w2, self._b2)
            normalised, mask = wk.norm_route(x, *weights, self._norm.eps)
        else:
            normalised, mask = normalise(x, self._norm), self._gate.decide(margins(self._router(x)))
        if self.masks is not None:
            mask = self.masks.take(self.index, mask)
        return normalised, mask


def normalise(x: Tensor, norm: Norm) -> Tensor:
    """RMSNorm over the last dimension."""
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)

"""Decisions of the inference path: what the routers say, or masks given from outside while the routers still run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

import wide_kernels as wk
from wide_kernels import PatternLayout, RouteLayout
from wide_kernels.random_masks import random_masks
from widecli.engine.patterns import Choice, PatternRouter, first_weight, numbered
from widecli.engine.weights import Norm
from widecli.model.patterns import Codebook
from widecli.model.router import Router


@dataclass(frozen=True)
class Route:
    """One decision as the operators take it: sorted into a layout (prefill) or as a bare mask [rows, N] (decode).

    Rows that picked patterns have a layout for each segment of the groups, and their mask may not be there. `reduced`
    [rows, r]: what the bypass around the part's skipped groups has read of them, where there is one.
    """

    mask: Tensor | None
    layouts: tuple[RouteLayout | PatternLayout, ...] = ()
    reduced: Tensor | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Keywords for the operators that take either form, where the groups are one segment."""
        (found,) = self.by_segment
        return found

    @property
    def by_segment(self) -> list[dict[str, Any]]:
        """Keywords for the operators, segment by segment."""
        return [{"layout": layout} for layout in self.layouts] or [{"mask": self.mask}]


class Masks(Protocol):
    """Decides in place of the routers."""

    def take(self, index: int, learned: Tensor) -> Tensor:
        """The mask of decision `index` in place of what its router says, bool [rows, N]; no host sync."""

    def choose(self, index: int, learned: Choice) -> Choice:
        """The same for rows that pick patterns."""


class RandomMasks:
    """Masks that skip a given share of groups at random: for speed on models whose routers have learned nothing.

    Every row skips as many, see `random_masks`. Where rows pick patterns, the patterns are random in this way and each
    is picked as often as the others.

    The masks lie on the device and change with the decision and the row. They are drawn when a shape is first met, so a
    graph needs one plain run before it is captured; `redraw` and `skip` change what later runs and replays see.
    """

    def __init__(self, sparsity: float, seed: int = 0) -> None:
        self.sparsity = sparsity
        self.seed = seed
        self._masks: dict[tuple[int, int, int], Tensor] = {}
        self._ids: dict[tuple[int, int, int], Tensor] = {}
        self._patterns: dict[int, Tensor] = {}
        self._chosen: dict[tuple[int, int, int], Tensor] = {}  # the masks of `_ids`, where they are asked for
        self._numbered: dict[tuple[int, float, int], Tensor] = {}  # by index, sparsity, seed: numbering takes a while

    def take(self, index: int, learned: Tensor) -> Tensor:
        """The mask of decision `index`, of the shape of `learned`."""
        key = (index, *learned.shape)
        if key not in self._masks:
            self._masks[key] = torch.empty_like(learned)
            self._draw(key)
        return self._masks[key]

    def choose(self, index: int, learned: Choice) -> Choice:
        """Random patterns and choices, of the shape of `learned`."""
        if index not in self._patterns:
            self._patterns[index] = torch.empty_like(learned.patterns)
            self._draw_patterns(index)
        key = (index, *learned.ids.shape)
        if key not in self._ids:
            self._ids[key] = torch.empty_like(learned.ids)
            self._draw_ids(key)
        choice = Choice(self._ids[key], self._patterns[index])
        if learned.made is None:
            return choice
        if key not in self._chosen:
            self._chosen[key] = choice.mask
        return replace(choice, made=self._chosen[key])

    @torch.inference_mode()
    def redraw(self, seed: int) -> None:
        """Other masks, in the same memory."""
        self.seed = seed
        for key in self._masks:
            self._draw(key)
        for index in self._patterns:
            self._draw_patterns(index)
        for key in self._ids:
            self._draw_ids(key)
        for key, mask in self._chosen.items():
            mask.copy_(Choice(self._ids[key], self._patterns[key[0]]).mask)

    def skip(self, sparsity: float) -> None:
        """Masks that skip this share, in the same memory."""
        if sparsity != self.sparsity:
            self.sparsity = sparsity
            self.redraw(self.seed)

    def forget(self) -> None:
        """Let go of the masks, when no session that met them runs any more."""
        self._masks.clear()
        self._ids.clear()
        self._chosen.clear()

    def _draw(self, key: tuple[int, int, int]) -> None:
        mask = self._masks[key]
        generator = self._generator(key[0], mask)
        mask.copy_(random_masks(mask.shape, self.sparsity, key[0], generator, mask.device))

    def _draw_ids(self, key: tuple[int, int, int]) -> None:
        ids = self._ids[key]
        count = self._patterns[key[0]].shape[1] - 1
        ids.random_(count, generator=self._generator(key[0], ids))

    def _draw_patterns(self, index: int) -> None:
        patterns = self._patterns[index]
        key = (index, self.sparsity, self.seed)
        if key not in self._numbered:
            generator = self._generator(index, patterns)
            drawn = random_masks(patterns[:, :-1].shape, self.sparsity, index, generator, patterns.device)
            self._numbered[key] = numbered(drawn)[0]
        patterns.copy_(self._numbered[key])

    def _generator(self, index: int, like: Tensor) -> torch.Generator:
        return torch.Generator(like.device).manual_seed(self.seed * 1_000_003 + index)


class Decision:
    """One router with the norm that shares its input, ready to run on rows of the residual stream.

    With a codebook rows pick patterns: `by_pattern` hands on what they picked, else it is made the mask that it is. A
    codebook with all patterns there are decides group by group.
    """

    def __init__(
        self,
        index: int,
        router: Router,
        norm: Norm,
        masks: Masks | None,
        codebook: Codebook | None = None,
        by_pattern: bool = False,
    ) -> None:
        self.index = index
        self.groups = router.groups
        self.masks = masks
        self._by_pattern = by_pattern
        self._norm = norm
        self._tap = router.tap
        self._patterns = None if codebook is None or codebook.size.complete else PatternRouter(router, codebook, norm)
        self._first = (first_weight(router, norm), router.down.bias.detach())
        self._second = (router.up.weight.detach(), router.up.bias.detach())

    def take(self, x: Tensor, masked: bool = False) -> tuple[Tensor, Tensor | Choice]:
        """x [rows, D] -> (normalised x, mask bool [rows, N] or the rows' choice, with its mask if `masked`)."""
        if self._patterns is not None:
            normalised, choice = self._patterns.choose(x, masked or not self._by_pattern)
            if self.masks is not None:
                choice = self.masks.choose(self.index, choice)
            return normalised, choice if self._by_pattern else choice.mask
        normalised, mask = wk.norm_route(
            x, self._norm.weight, *self._first, *self._second, self._norm.eps, tap=self._tap, early=True
        )
        if self.masks is not None:
            mask = self.masks.take(self.index, mask)
        return normalised, mask

    def take_and_reduce(self, x: Tensor, bypass: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same group by group, and what a bypass [r, D] (with the norm's weight in it) reads: [rows, r]."""
        normalised, mask, reduced = wk.norm_route(
            x, self._norm.weight, *self._first, *self._second, self._norm.eps, tap=self._tap, bypass=bypass, early=True
        )
        if self.masks is not None:
            mask = self.masks.take(self.index, mask)
        return normalised, mask, reduced


class Reduction:
    """A norm and a bypass where no decision is taken: the FFN's in layer mode, which follows the attention's.

    It is `norm_route` with a router of one group whose word nobody asks for, so that it takes the norm's launch alone.
    """

    def __init__(self, norm: Norm, bypass: Tensor) -> None:
        self._norm = norm
        self._bypass = bypass
        w1 = torch.zeros(1, len(norm.weight), device=bypass.device)
        w1 = wk.in_pieces(w1, bypass.dtype) if bypass.element_size() == 2 else w1
        self._first = (w1, w1.new_zeros(1, dtype=torch.float32))
        self._second = (w1.new_zeros(2, 1, dtype=torch.float32), w1.new_zeros(2, dtype=torch.float32))

    def take(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [rows, D] -> (normalised x, what the bypass reads [rows, r])."""
        normalised, _, reduced = wk.norm_route(
            x, self._norm.weight, *self._first, *self._second, self._norm.eps, bypass=self._bypass, early=True
        )
        return normalised, reduced

"""From pattern numbers to what the operators walk: rows sorted by pattern, and the groups each tile of them runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from wide_kernels.checks import same_device, shape_of
from wide_kernels.dispatch import Problem, choose
from wide_kernels.errors import UnsupportedError

TILE_ROWS = 128
HALF_ROWS = 64  # what one warpgroup multiplies; half of a tile

MOST_PATTERNS = 4096  # whose counts a program of the Triton kernels holds


@dataclass(frozen=True, eq=False)  # tensors have no one truth value: a layout equals itself
class PatternLayout:
    """Tokens that each chose one of C patterns of groups; made by `pattern_layout`, reused by every operator.

    `ids` int32 [T] and `patterns` bool [C, N_G] are the decision: token t runs group g where `patterns[ids[t], g]`.
    `order` int32 [T] lists the rows by id, ascending inside an id. Tiles are runs of TILE_ROWS rows of `order`, on a
    fixed grid, so there are T / TILE_ROWS of them whatever C is. `lists` int32 [tiles, N_G] holds first the groups that
    some row of the tile runs, ascending, as group * 4 + halves (bit 0: some of its rows 0..63 runs it, bit 1: some of
    64..127), then the groups that none runs, ascending, as group * 4. `listed` int32 [tiles] counts the first ones.
    `mixed` int32 [tiles] has bit h set where half h holds more than one pattern: only there must rows be told apart.
    `count` int32 [N_G] says how many rows run each group; operators need it not, and a layout made anew from what their
    registered forms take has none.
    """

    ids: Tensor
    patterns: Tensor
    order: Tensor
    lists: Tensor
    listed: Tensor
    mixed: Tensor
    count: Tensor | None = None

    @property
    def rows(self) -> int:
        """T, the number of tokens of all sequences together."""
        return self.ids.shape[0]

    @property
    def groups(self) -> int:
        """N_G."""
        return self.patterns.shape[1]

    @property
    def mask(self) -> Tensor:
        """The decision as a mask, bool [T, N_G]."""
        return chosen_mask(self.ids, self.patterns)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What the operators' registered forms take, in their order."""
        return self.ids, self.patterns, self.order, self.lists, self.listed, self.mixed


def chosen_mask(ids: Tensor, patterns: Tensor) -> Tensor:
    """The pattern of each row, bool [T, N_G]."""
    return patterns.index_select(0, ids)


def pattern_layout(ids: Tensor, patterns: Tensor, *, backend: str = "auto") -> PatternLayout:
    """Sort tokens by pattern once for all operators: ids int32 [T], patterns bool [C, N_G] -> PatternLayout.

    No host sync, fixed shapes. Ids must lie in 0..C-1: on a CPU others are refused, on a GPU, where looking would cost
    a sync, they are clamped. Tiles that hold several patterns run their union, so number similar patterns next to each
    other: see `similar_order`.
    """
    chosen = choose(pattern_layout_problem(ids, patterns), backend)
    patterns = patterns.contiguous()
    clamped, *sorted_rows = torch.ops.wide_kernels.pattern_layout(ids.contiguous(), patterns, chosen)
    return PatternLayout(clamped, patterns, *sorted_rows)


def pattern_layout_problem(ids: Tensor, patterns: Tensor) -> Problem:
    """The facts that decide the backend of `pattern_layout`; raises UnsupportedError for what is no decision."""
    if ids.dtype is not torch.int32:
        raise UnsupportedError(f"pattern_layout: ids must be int32, got {ids.dtype}; cast with .to(torch.int32)")
    shape_of("pattern_layout", "ids", ids, "T")
    if patterns.dtype is not torch.bool:
        raise UnsupportedError(f"pattern_layout: patterns must be bool (True = execute), got {patterns.dtype}")
    count, groups = shape_of("pattern_layout", "patterns", patterns, "C N_G")
    if count == 0 or groups == 0:
        raise UnsupportedError(
            f"pattern_layout: there must be patterns and groups, got patterns of shape {list(patterns.shape)}"
        )
    same_device("pattern_layout", ids, "patterns", patterns)
    refused = {"triton": f"it takes at most {MOST_PATTERNS} patterns, got {count}"} if count > MOST_PATTERNS else {}
    return Problem("pattern_layout", ids.device, torch.float32, refused=refused)


def pattern_layout_reference(ids: Tensor, patterns: Tensor) -> tuple[Tensor, ...]:
    """(ids, order, lists, listed, mixed, count) by a stable sort."""
    count, groups = patterns.shape
    rows = ids.shape[0]
    if not ids.is_cuda and rows:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= count:
            raise UnsupportedError(f"pattern_layout: ids must lie in 0..{count - 1}, got {low if low < 0 else high}")
    ids = ids.clamp(0, count - 1)
    order = torch.sort(ids, stable=True).indices
    tiles = -(-rows // TILE_ROWS)
    missing = tiles * TILE_ROWS - rows
    chosen = ids[order].long()
    runs = F.pad(patterns[chosen], (0, 0, 0, missing)).view(tiles, 2, HALF_ROWS, groups).any(2)
    lists = torch.arange(groups, device=ids.device) * 4 + runs[:, 0] + 2 * runs[:, 1].long()
    skipped = ~runs.any(1)
    lists = lists.gather(1, torch.sort(skipped.to(torch.uint8), dim=1, stable=True).indices)
    # Rows past the end count as more of the last pattern in the smallest number, and as less than any in the largest.
    smallest = F.pad(chosen, (0, missing), value=count).view(tiles, 2, HALF_ROWS).amin(2)
    largest = F.pad(chosen, (0, missing), value=-1).view(tiles, 2, HALF_ROWS).amax(2)
    several = smallest < largest
    mixed = several[:, 0] + 2 * several[:, 1].to(torch.int32)
    listed = groups - skipped.sum(1, dtype=torch.int32)
    executed = patterns[chosen].sum(0, dtype=torch.int32)
    return ids, order.to(torch.int32), lists.to(torch.int32), listed, mixed, executed


@torch.library.custom_op(
    "wide_kernels::pattern_layout",
    mutates_args=(),
    schema="(Tensor ids, Tensor patterns, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _pattern_layout(ids: Tensor, patterns: Tensor, backend: str) -> tuple[Tensor, ...]:
    if backend == "triton":
        from wide_kernels.pattern_sorting import sort_by_pattern

        return sort_by_pattern(ids, patterns)
    return pattern_layout_reference(ids, patterns)


@_pattern_layout.register_fake
def _(ids: Tensor, patterns: Tensor, backend: str) -> tuple[Tensor, ...]:
    tiles = (ids.shape[0] + TILE_ROWS - 1) // TILE_ROWS
    return (
        torch.empty_like(ids),
        torch.empty_like(ids),
        ids.new_empty(tiles, patterns.shape[1]),
        ids.new_empty(tiles),
        ids.new_empty(tiles),
        ids.new_empty(patterns.shape[1]),
    )

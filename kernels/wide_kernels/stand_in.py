"""What stands in for groups that a token skips: a vector for each of them, and a bypass around all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from wide_kernels.checks import same_kind, same_size, shape_of
from wide_kernels.errors import UnsupportedError
from wide_kernels.tuning.tiles import TILE


class StandIn(NamedTuple):
    """Adds [1 - m, u reduced] weight^T where a token has the mask m [N_G] and skips the share u = mean(1 - m).

    `weight` [N, P] as `stand_in_weight` makes it: N_G columns of means, Rb of the bypass, zeros. `reduced` [T, Rb] is
    what the bypass reads of each token (`norm_route` makes it); None without one.
    """

    weight: Tensor
    reduced: Tensor | None = None


def stand_in_weight(mean: Tensor | None, up: Tensor | None, groups: int, dtype: torch.dtype) -> Tensor:
    """The weight [N, P] of a `StandIn`, P the next multiple of 16: mean [N_G, N] and up [N, Rb], None = not there.

    Made once, where the weights are loaded. Raises UnsupportedError where both are missing or do not fit.
    """
    given = [tensor for tensor in (None if mean is None else mean.t(), up) if tensor is not None]
    if not given or any(tensor.dim() != 2 or len(tensor) != len(given[0]) for tensor in given):
        shapes = {"mean": mean, "up": up}
        found = ", ".join(f"{name} {None if t is None else list(t.shape)}" for name, t in shapes.items())
        raise UnsupportedError(f"stand_in_weight: give mean [N_G, N], up [N, Rb] or both, got {found}")
    if mean is not None:
        same_size("stand_in_weight", "N_G of mean", len(mean), groups)
    means = given[0].new_zeros(len(given[0]), groups) if mean is None else given[0]
    packed = torch.cat([means, *([] if up is None else [up])], 1).to(dtype)
    return F.pad(packed, (0, -packed.shape[1] % TILE)).contiguous()


def check_stand_in(op: str, first: Tensor, stand_in: StandIn, rows: int, groups: int, columns: int) -> dict[str, int]:
    """Raise UnsupportedError for what does not fit the operands; returns the sizes that tiles must divide."""
    weight, reduced = stand_in
    same_kind(op, first, **{"weight of stand_in": weight, "reduced of stand_in": reduced})
    weight_columns, width = shape_of(op, "weight of stand_in", weight, "N P")
    same_size(op, "N of the weight of stand_in", weight_columns, columns)
    rank = 0
    if reduced is not None:
        reduced_rows, rank = shape_of(op, "reduced of stand_in", reduced, "T Rb")
        same_size(op, "T of the reduced of stand_in", reduced_rows, rows)
    if width < groups + rank:
        raise UnsupportedError(
            f"{op}: the weight of stand_in must have a column for each of {groups} groups and {rank} of the bypass, "
            f"got {width}; see stand_in_weight"
        )
    return {"P of the weight of stand_in": width}


def coefficients(mask: Tensor, reduced: Tensor | None, columns: int, dtype: torch.dtype) -> Tensor:
    """[1 - m, u reduced, zeros] [T, columns]."""
    skipped = (~mask).to(dtype)
    parts = [skipped]
    if reduced is not None:
        share = (~mask).to(torch.promote_types(dtype, torch.float32)).mean(-1, keepdim=True)
        parts.append((reduced * share).to(dtype))
    together = torch.cat(parts, 1)
    return F.pad(together, (0, columns - together.shape[1]))


def stand_in_gradients(
    gradient: Tensor, weight: Tensor, mask: Tensor, reduced: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Those of (weight, reduced) that are needed."""
    to_weight = to_reduced = None
    if needs[0]:
        to_weight = gradient.t() @ coefficients(mask, reduced, weight.shape[1], gradient.dtype)
    if needs[1] and reduced is not None:
        groups = mask.shape[1]
        share = (~mask).to(gradient.dtype).mean(-1, keepdim=True)
        to_reduced = gradient @ weight[:, groups : groups + reduced.shape[1]] * share
    return to_weight, to_reduced

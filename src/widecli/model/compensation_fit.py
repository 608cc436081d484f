"""The start of a compensation, in closed form: means from the dense model, then a regression on routed passes.

1. M starts as what each group adds on average in the dense model, `W_g E[h_g]`.
2. With routers that skip, what a part lacks is `y = W ((1 - m) * h)`. Ridge regression of `y - (1 - m) M` on
   `[1 - m, u n]` gives a change of M and a matrix for n, cut to rank r as in the routers' start (reduced-rank
   regression); M is then fitted again with the bypass in place.
All parts are fitted at once: each on inputs that the others' old compensation made. So it is done in rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from widecli.model.compensation import Compensation
from widecli.model.plan import PartName
from widecli.model.routed import RoutedModel, Substitute, mask_groups
from widecli.model.thresholds import Batch, rows

RIDGE = 1e-2


@torch.no_grad()
def set_means(routed: RoutedModel, means: Mapping[tuple[int, PartName], Tensor]) -> None:
    """M = W_g E[h_g], from the mean input E[h] [K] of each part's output projection in the dense model.

    `means` has the FFN's channels in the order that they have now. The bypass is left as it is.
    """
    for (index, part), substitute in routed.substitutes.items():
        if substitute.compensation.mean is not None:
            _, output = routed.part_modules(routed.decoder_layers()[index], part)
            mean = means[index, part].view(substitute.compensation.groups, -1)
            substitute.compensation.mean.copy_(_added_by_groups(output.weight, mean))


def _added_by_groups(weight: Tensor, hidden: Tensor) -> Tensor:
    """W_g h_g of every group, fp32: weight [D, N k], of which each rank may hold some rows, hidden [N, k] -> [N, D]."""
    from torch.distributed.tensor import DTensor

    groups, width = hidden.shape
    held = weight.to_local() if isinstance(weight, DTensor) else weight
    place = torch.device(weight.device_mesh.device_type) if isinstance(weight, DTensor) else weight.device
    grouped = held.to(place).float().view(len(held), groups, width)
    added = torch.einsum("dnk,nk->dn", grouped, hidden.to(place))
    if isinstance(weight, DTensor):
        size = torch.Size((weight.shape[0], groups))
        whole = DTensor.from_local(
            added, weight.device_mesh, weight.placements, run_check=False, shape=size, stride=(groups, 1)
        )
        added = whole.full_tensor()
    return added.T


class _Moments:
    """Second moments of one part's regression, fp64: features [1 - m, u n] among themselves and against what lacks."""

    def __init__(self) -> None:
        self.xx: Tensor | None = None
        self.xy: Tensor | None = None

    def add(self, x: Tensor, y: Tensor) -> None:
        xx, xy = (x.T @ x).double(), (x.T @ y).double()
        self.xx = xx if self.xx is None else self.xx + xx
        self.xy = xy if self.xy is None else self.xy + xy


@torch.no_grad()
def fit_compensations(routed: RoutedModel, batches: Sequence[Batch], ridge: float = RIDGE) -> None:
    """Fit every compensation to what routed passes over `batches` lack, with the routers and compensation of now."""
    moments: dict[tuple[int, PartName], _Moments] = {key: _Moments() for key in routed.substitutes}
    inputs: dict[tuple[int, PartName], Tensor] = {}
    valid: list[Tensor | None] = [None]
    handles = []
    for key, substitute in routed.substitutes.items():
        norm, output = routed.part_modules(routed.decoder_layers()[key[0]], key[1])

        def read(_: nn.Module, args: object, n: Tensor, key: tuple[int, PartName] = key) -> None:
            inputs[key] = n

        def regress(
            module: nn.Linear,
            args: tuple[Tensor, ...],
            key: tuple[int, PartName] = key,
            substitute: Substitute = substitute,
        ) -> None:
            mask = substitute.decision.mask
            assert mask is not None
            skipped = ~mask.bool()
            lacking = F.linear(mask_groups(args[0], skipped), module.weight)
            some = rows(skipped, valid[0]).float()
            features = [some]
            if substitute.compensation.rank:
                features.append(rows(inputs.pop(key), valid[0]).float() * some.mean(-1, keepdim=True))
            y = rows(lacking, valid[0]).float()
            if substitute.compensation.mean is not None:
                y = y - some @ substitute.compensation.mean
            moments[key].add(torch.cat(features, -1), y)

        handles.append(norm.register_forward_hook(read))
        handles.append(output.register_forward_pre_hook(regress, prepend=True))
    for ids, mask in batches:
        valid[0] = mask
        routed.decoder(input_ids=ids, attention_mask=mask, use_cache=False)
    for handle in handles:
        handle.remove()
    for key, substitute in routed.substitutes.items():
        m = moments[key]
        assert m.xx is not None and m.xy is not None
        _solve(substitute.compensation, m.xx, m.xy, ridge)


def _solve(compensation: Compensation, xx: Tensor, xy: Tensor, ridge: float) -> None:
    """Set M and the bypass from the moments of [1 - m, u n] and what lacks beyond M."""
    groups, rank = compensation.groups, compensation.rank
    first = slice(0, groups if compensation.mean is not None else 0)
    second = slice(groups, len(xx))
    mean_change: Tensor | None = None
    if rank:
        kept = torch.cat([torch.arange(len(xx))[first], torch.arange(len(xx))[second]]).to(xx.device)
        solved = torch.zeros_like(xy)
        solved[kept] = _ridge(xx[kept][:, kept], xy[kept], ridge, first.stop)
        full, gram = solved[second], xx[second, second]
        fitted = full.T @ gram @ full
        right = torch.linalg.eigh((fitted + fitted.T) / 2).eigenvectors[:, -rank:]
        left = full @ right
        # A's rows as long as those of a random start: training takes steps of one size, which a smaller A would not
        # survive. B has the rest.
        length = left.norm(dim=0).clamp_min(1e-12)
        assert compensation.down is not None and compensation.up is not None
        compensation.down.copy_((left / length).T)
        compensation.up.copy_(right * length)
        if compensation.mean is not None:
            rest = xy[first] - xx[first, second] @ left @ right.T
            mean_change = _ridge(xx[first, first], rest, ridge, groups)
    elif compensation.mean is not None:
        mean_change = _ridge(xx[first, first], xy[first], ridge, groups)
    if mean_change is not None:
        assert compensation.mean is not None
        compensation.mean.add_(mean_change)


def _ridge(xx: Tensor, xy: Tensor, ridge: float, split: int) -> Tensor:
    """Ridge regression with a penalty of its own for the features before and from `split` on: their scales differ."""
    penalty = torch.zeros(len(xx), dtype=xx.dtype, device=xx.device)
    for block in (slice(0, split), slice(split, len(xx))):
        diagonal = xx.diagonal()[block]
        if len(diagonal):
            # groups that are never skipped have no moments at all: their change must stay zero, not undefined
            penalty[block] = ridge * diagonal.mean().clamp_min(1e-12)
    solved: Tensor = torch.linalg.solve(xx + penalty.diag(), xy)
    return solved

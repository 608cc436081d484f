"""Which FFN channels belong into one group: those that the same tokens need.

A token that runs the better half of its groups keeps most of its energy if the channels of a group are large for the
same tokens. So channels are clustered by their energy on some text, with equally many in every cluster:

1. Balanced k-means of the channels, each described by what it adds to every token (projected to fewer numbers).
2. Swaps that climb what counts: with each token's better half of groups held fixed, it is known what a channel is worth
   in every group. Pairs of channels swap places while both together gain; then the halves are chosen anew. Neither step
   can lower the energy captured, so this ends.

The result must not depend on the device or the number of threads, so no sum may depend on its order: shares of energy
are rounded to fp16, features to whole numbers, and both are added up in fp64, where such sums are exact. Ties go to the
lower index, by stable sorts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from widecli.errors import UsageError

TOKENS_PER_GROUP = 4  # with fewer, groups are made for these tokens and no others
_FEATURES = 512
_FEATURE_STEPS = 4096  # a feature of 1.0 in whole numbers
_KMEANS_ROUNDS = 10
_CLIMB_ROUNDS = 60
_SWAP_ROUNDS = 10
_SWAPS_PER_PAIR = 8  # candidates of one pair of groups in one round
_LEAST_GAIN = 2e-5  # captured energy that a round must add to go on


def cluster_channels(energy: Tensor, width: int, *, seed: int = 0, share: float = 0.5, starts: int = 1) -> Tensor:
    """Order the channels so that runs of `width` are groups that the same tokens need.

    `energy` [T, C], non-negative, any float dtype: what each channel adds to each token (its square). Only its shares
    of a token's sum count. `share`: the part of its groups that a token is expected to run. Returns `order` int64 [C]
    on energy's device: the channel that stands at each place. Groups come in the order of their lowest channel, and
    channels ascend within a group, so that equal groupings have equal orders. The best of `starts` k-means is kept.
    Raises UsageError when there are fewer than 4 tokens a group.
    """
    tokens, channels = energy.shape
    groups = group_count(channels, width)
    require_tokens(tokens, channels, width)
    if groups == 1 or width == 1:
        return torch.arange(channels, device=energy.device)
    shares = energy_shares(energy)
    by_channel = shares.T.double().contiguous()
    generator = torch.Generator().manual_seed(seed)
    best: tuple[float, Tensor] | None = None
    features = _features(by_channel, generator)
    for _ in range(starts):
        order = _balanced_kmeans(features, width, generator)
        captured, order = climb(by_channel, order, width, share)
        if best is None or captured > best[0]:
            best = captured, order
    assert best is not None
    return canonical(best[1], width)


def captured_energy(energy: Tensor, order: Tensor, width: int, share: float = 0.5) -> float:
    """Mean share of a token's energy [T, C] that its best `share` of the groups of `order` [C] holds."""
    grouped = energy_shares(energy).T[order].view(-1, width, len(energy)).sum(1, dtype=torch.float64)
    return float(_captured(grouped, _best_groups(grouped, share)))


def group_count(channels: int, width: int) -> int:
    """C / width. Raises UsageError when groups of that width do not fit."""
    if width < 1 or channels % width:
        raise UsageError(f"groups of {width} channels do not divide the {channels} channels of a layer")
    return channels // width


def require_tokens(tokens: int, channels: int, width: int) -> None:
    """Raise UsageError when there is too little text to say which channels belong together."""
    groups = group_count(channels, width)
    needed = TOKENS_PER_GROUP * groups
    if groups > 1 and tokens < needed:
        raise UsageError(
            f"regrouping {channels} channels into {groups} groups needs at least {needed} tokens, and there were "
            f"{tokens}; give more text or wider groups"
        )


def canonical(order: Tensor, width: int) -> Tensor:
    """The same groups with ascending channels, in the order of their lowest channel: [C] -> [C]."""
    groups = order.view(-1, width).sort(dim=1).values
    return groups[groups[:, 0].argsort()].flatten()


def energy_shares(energy: Tensor) -> Tensor:
    """Each token's energy as shares of its sum, fp16: multiples of 2^-24, so that fp64 adds them exactly. [T, C]."""
    if energy.dtype != torch.float32:
        energy = energy.float()
    return (energy / energy.sum(1, keepdim=True, dtype=torch.float64).float().clamp_min(1e-30)).half()


def climb(by_channel: Tensor, order: Tensor, width: int, share: float) -> tuple[float, Tensor]:
    """Swap channels between groups until a round gains next to nothing.

    `by_channel` fp64 [C, T]: shares of energy. Returns the mean share captured and the new order.
    """
    tokens = by_channel.shape[1]
    before = -1.0
    for _ in range(_CLIMB_ROUNDS):
        grouped = by_channel[order].view(-1, width, tokens).sum(1)
        runs = _best_groups(grouped, share)
        captured = float(_captured(grouped, runs))
        if captured < before + _LEAST_GAIN:
            break
        before = captured
        # not divided by the tokens: these stay exact sums
        order, moved = swap_pairs(by_channel @ runs.T.double(), order, width)
        if not moved:
            break
    return captured, order


def _best_groups(grouped: Tensor, share: float) -> Tensor:
    """grouped [N, T] -> bool [N, T]: the `share` of the groups that hold most of each token's energy."""
    groups = len(grouped)
    count = min(max(round(share * groups), 1), groups)
    best = grouped.sort(dim=0, descending=True, stable=True).indices[:count]
    return torch.zeros_like(grouped, dtype=torch.bool).scatter_(0, best, True)


def _captured(grouped: Tensor, runs: Tensor) -> Tensor:
    return (grouped * runs).sum() / grouped.shape[1]


def swap_pairs(value: Tensor, order: Tensor, width: int) -> tuple[Tensor, bool]:
    """Raise the sum of `value[c, group of c]` by swapping pairs of channels; value [C, N], order [C].

    For two groups, the channel that would gain most by moving over (or lose least) swaps with the one that would gain
    most by coming back, the second best with the second best, and so on. All pairs of groups are looked at together; a
    channel takes part in its best swap alone. Returns the new order and whether anything moved.
    """
    groups = len(order) // width
    depth = min(width, _SWAPS_PER_PAIR)
    first, second = torch.triu_indices(groups, groups, 1, device=order.device)
    moved = False
    for _ in range(_SWAP_ROUNDS):
        here = value[order].view(groups, width, groups)  # of the channel at a place, in every group
        own = here.diagonal(dim1=0, dim2=2).T
        gain, place = (here - own.unsqueeze(2)).transpose(1, 2).sort(dim=2, descending=True, stable=True)
        gain, place = gain[..., :depth], place[..., :depth]  # [from, to, depth]
        both = (gain[first, second] + gain[second, first]).flatten()
        a = (place[first, second] + first[:, None] * width).flatten()
        b = (place[second, first] + second[:, None] * width).flatten()
        best = both.argsort(descending=True, stable=True)
        best = best[: int((both > 0).sum())]
        a, b = a[best], b[best]
        rank = torch.arange(len(best), device=order.device)
        chosen = torch.full_like(order, len(best))
        chosen.scatter_reduce_(0, a, rank, "amin").scatter_reduce_(0, b, rank, "amin")
        free = (chosen[a] == rank) & (chosen[b] == rank)
        a, b = a[free], b[free]
        if not len(a):
            break
        moved = True
        order = order.clone()
        order[a], order[b] = order[b], order[a]
    return order, moved


def _features(by_channel: Tensor, generator: torch.Generator) -> Tensor:
    """Roots of the shares of energy, added up over random sets of tokens with random signs: whole numbers [C, F].

    Distances between channels stay what they were, nearly, as with any random projection, and it costs one pass.
    """
    tokens = by_channel.shape[1]
    per_feature = -(-tokens // _FEATURES)
    count = -(-tokens // per_feature)
    shuffled = torch.randperm(tokens, generator=generator)
    signs = torch.randint(0, 2, (tokens,), generator=generator) * 2 - 1
    roots = (by_channel.sqrt() * _FEATURE_STEPS).round()
    signed = (roots * signs.to(roots))[:, shuffled.to(roots.device)]
    return torch.nn.functional.pad(signed, (0, count * per_feature - tokens)).view(len(signed), count, -1).sum(2)


def _balanced_kmeans(features: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """Order [C] of channels whose runs of `width` are clusters of their `features` [C, F], whole numbers in fp64."""
    channels = len(features)
    groups = channels // width
    picked = torch.randperm(channels, generator=generator)[:groups]
    sums = features[picked.to(features.device)] * width
    order = torch.arange(channels, device=features.device)
    for _ in range(_KMEANS_ROUNDS):
        # minus the squared distance to the mean, times width^2, without what is the same for all clusters
        closeness = 2 * width * (features @ sums.T) - sums.square().sum(1)
        order = _fill(
            closeness, width
        )  # swaps here would cost more than they bring: what is climbed later is another sum
        sums = features[order].view(groups, width, -1).sum(1)
    return order


def _fill(closeness: Tensor, width: int) -> Tensor:
    """Deal channels to clusters, `width` to each: closeness [C, N] -> order [C].

    In rounds: every channel asks for the best cluster with room, and a cluster takes those to which their second
    choice would be the greatest loss.
    """
    channels, groups = closeness.shape
    owner = torch.full((channels,), groups, device=closeness.device)
    room = torch.full((groups,), width, device=closeness.device)
    waiting = torch.arange(channels, device=closeness.device)
    while len(waiting):
        open_only = closeness[waiting].masked_fill(room == 0, -torch.inf)
        top, wanted = open_only.max(1)
        second = open_only.scatter(1, wanted[:, None], -torch.inf).amax(1)
        loss = top - second  # infinite where one cluster alone has room
        queue = loss.argsort(descending=True, stable=True)
        queue = queue[wanted[queue].argsort(stable=True)]  # by cluster, then by loss
        cluster = wanted[queue]
        asked = torch.bincount(cluster, minlength=groups)
        place = torch.arange(len(queue), device=queue.device) - (asked.cumsum(0) - asked)[cluster]
        taken = place < room[cluster]
        owner[waiting[queue[taken]]] = cluster[taken]
        room -= asked.minimum(room)
        waiting = waiting[owner[waiting] == groups]
    return owner.argsort(stable=True)

"""Statistics of decisions: pure functions of boolean masks [T, N], T tokens by N groups, True = execute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from widecli.inspection.groups import Key, Regrouping, Substitution
from widecli.inspection.observe import Observation, binary_entropy
from widecli.model.plan import PARTS, PartName

TILE_TOKENS = 128
SEGMENT_GROUPS = 8
ALMOST = 0.01  # a group that at most this share of the tokens decides otherwise counts as constant


@dataclass(frozen=True)
class PartStatistics:
    """One part of one layer. Rates and densities in [0, 1], entropies in bits a decision (mean over groups).

    `decision_entropy`: of how often a group runs over the text (0 = the same for all tokens); `router_entropy`: of the
    router's probabilities (0 = it is sure). `union_natural`: share of a tile's groups that at least one of its 128
    tokens runs, tokens in their order; `union_sorted`: the same with the tokens sorted anew for each segment of 8
    groups, which is what a kernel can arrange.
    """

    skip_rate: float
    group_skip_rates: tuple[float, ...]
    always_on: tuple[int, ...]
    always_off: tuple[int, ...]
    decision_entropy: float
    router_entropy: float
    union_natural: float
    union_sorted: float


@dataclass(frozen=True)
class Word:
    """How often the tokens spelled like this run, mean over layers and groups of each part."""

    token: str
    count: int
    executed: dict[str, float]

    @property
    def mean(self) -> float:
        """Over the parts."""
        return sum(self.executed.values()) / len(self.executed)


@dataclass(frozen=True)
class Statistics:
    """Everything `wide inspect` shows. `token_shares`: share of groups that each token runs, by part [layers][T]."""

    layers: tuple[dict[PartName, PartStatistics], ...]
    correlation: dict[PartName, list[list[float | None]]]
    token_shares: dict[PartName, list[list[float | None]]]
    words: tuple[Word, ...]
    regroupings: tuple[Regrouping | None, ...] = ()
    substitutions: tuple[dict[PartName, Substitution], ...] = ()

    def overall(self, part: PartName) -> dict[str, float]:
        """One part over all layers that route it: means, and the shares of groups that are constant."""
        found = [layer[part] for layer in self.layers if part in layer]
        groups = sum(len(one.group_skip_rates) for one in found)
        means = ("skip_rate", "decision_entropy", "router_entropy", "union_natural", "union_sorted")
        return {
            **{name: sum(getattr(one, name) for one in found) / len(found) for name in means},
            "always_on": sum(len(one.always_on) for one in found) / groups,
            "always_off": sum(len(one.always_off) for one in found) / groups,
        }

    def as_dict(self, tokens: int) -> dict[str, Any]:
        """Plain data; the shares by token for the first `tokens` tokens."""
        return {
            "overall": {part: self.overall(part) for part in self.token_shares},
            "layers": [{part: _rounded(asdict(found)) for part, found in layer.items()} for layer in self.layers],
            "layer_correlation": _rounded(self.correlation),
            "token_shares": {part: _rounded([r[:tokens] for r in rows]) for part, rows in self.token_shares.items()},
            "words": [_rounded(asdict(word)) for word in self.words],
            # null where channels stand as stored, and where skipped groups leave nothing
            "grouping": [_rounded(asdict(one)) if one else None for one in self.regroupings] or None,
            "compensation": [
                {part: _rounded(asdict(found)) for part, found in layer.items()} for layer in self.substitutions
            ]
            or None,
        }


def statistics(seen: Observation) -> Statistics:
    """All statistics of an observation."""
    layers = tuple(
        {
            part: part_statistics(seen.masks[i, part], seen.certainty[i, part])
            for part in PARTS
            if (i, part) in seen.masks
        }
        for i in range(seen.num_layers)
    )
    routed = [part for part in PARTS if any(key[1] == part for key in seen.masks)]
    return Statistics(
        layers=tuple(layers),
        correlation={part: layer_correlation(seen.masks, part, seen.num_layers) for part in routed},
        token_shares={part: _token_shares(seen.masks, part, seen.num_layers) for part in routed},
        words=words(seen.tokens, seen.masks),
        regroupings=seen.regroupings,
        substitutions=_by_layer(seen),
    )


def _by_layer(seen: Observation) -> tuple[dict[PartName, Substitution], ...]:
    if not seen.substitutions:
        return ()
    found = seen.substitutions
    return tuple({part: found[i, part] for part in PARTS if (i, part) in found} for i in range(seen.num_layers))


def part_statistics(mask: Tensor, certainty: Tensor) -> PartStatistics:
    """One part of one layer, from its mask [T, N] and its router's entropies [N]."""
    skipped = 1 - mask.double().mean(0)
    return PartStatistics(
        skip_rate=float(skipped.mean()),
        group_skip_rates=tuple(skipped.tolist()),
        always_on=tuple(torch.nonzero(skipped <= ALMOST).flatten().tolist()),
        always_off=tuple(torch.nonzero(skipped >= 1 - ALMOST).flatten().tolist()),
        decision_entropy=float(binary_entropy(skipped).mean()),
        router_entropy=float(certainty.mean()),
        union_natural=union_density(mask),
        union_sorted=sorted_union_density(mask),
    )


def union_density(mask: Tensor, tile: int = TILE_TOKENS) -> float:
    """Share of (token, group) pairs that are computed when a tile runs every group that one of its tokens runs."""
    computed = 0
    for rows in torch.split(mask, tile):
        computed += int(rows.any(0).sum()) * len(rows)
    return computed / mask.numel()


def sorted_union_density(mask: Tensor, tile: int = TILE_TOKENS, segment: int = SEGMENT_GROUPS) -> float:
    """`union_density` with the tokens sorted by their pattern, anew for each segment of groups."""
    computed = 0.0
    for columns in torch.split(mask, segment, dim=1):
        powers = 2 ** torch.arange(columns.shape[1] - 1, -1, -1)
        order = torch.argsort((columns.long() * powers).sum(1), stable=True)
        computed += union_density(columns[order], tile) * columns.numel()
    return computed / mask.numel()


def layer_correlation(masks: dict[Key, Tensor], part: PartName, num_layers: int) -> list[list[float | None]]:
    """Pearson correlation over tokens of the share of groups run, layer by layer; None where a layer's is constant."""
    shares = torch.full((num_layers, len(next(iter(masks.values())))), float("nan"), dtype=torch.float64)
    for (layer, kind), mask in masks.items():
        if kind == part:
            shares[layer] = mask.double().mean(1)
    centred = shares - shares.mean(1, keepdim=True)
    # below this a share is constant up to rounding, and its direction means nothing
    norms = centred.norm(dim=1, keepdim=True)
    norms = torch.where(norms > 1e-9, norms, float("nan"))
    matrix = (centred / norms) @ (centred / norms).T
    return _plain(matrix)


def _token_shares(masks: dict[Key, Tensor], part: PartName, num_layers: int) -> list[list[float | None]]:
    tokens = len(next(iter(masks.values())))
    rows: list[list[float | None]] = []
    for layer in range(num_layers):
        mask = masks.get((layer, part))
        rows.append([None] * tokens if mask is None else mask.double().mean(1).tolist())
    return rows


def _plain(matrix: Tensor) -> list[list[float | None]]:
    return [[None if value != value else max(-1.0, min(1.0, value)) for value in row] for row in matrix.tolist()]


def _rounded(value: Any) -> Any:
    """Six digits are more than a text of some thousand tokens can tell, and a third of the file."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return round(value, 6) if isinstance(value, float) else value


def words(tokens: Sequence[str], masks: dict[Key, Tensor]) -> tuple[Word, ...]:
    """Tokens by how much of the model they run, most first; spaces around a token do not matter."""
    parts = [part for part in PARTS if any(key[1] == part for key in masks)]
    shares = {
        part: torch.stack([mask.double().mean(1) for (_, kind), mask in masks.items() if kind == part]).mean(0).tolist()
        for part in parts
    }
    places: dict[str, list[int]] = defaultdict(list)
    for place, token in enumerate(tokens):
        places[token.strip() or repr(token)].append(place)
    found = [
        Word(token, len(at), {part: sum(shares[part][i] for i in at) / len(at) for part in parts})
        for token, at in places.items()
    ]
    return tuple(sorted(found, key=lambda word: (-word.mean, word.token)))

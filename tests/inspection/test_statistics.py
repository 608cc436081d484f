from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from widecli.inspection.groups import Key
from widecli.inspection.observe import binary_entropy
from widecli.inspection.statistics import layer_correlation, part_statistics, sorted_union_density, union_density, words


def random_mask(tokens: int, groups: int, density: float = 0.5, seed: int = 0) -> Tensor:
    return torch.rand(tokens, groups, generator=torch.Generator().manual_seed(seed)) < density


def slow_union(rows: list[list[bool]], tile: int) -> float:
    """Counts every pair one by one."""
    computed = 0
    for start in range(0, len(rows), tile):
        inside = rows[start : start + tile]
        computed += sum(len(inside) for g in range(len(rows[0])) if any(row[g] for row in inside))
    return computed / (len(rows) * len(rows[0]))


def slow_sorted_union(rows: list[list[bool]], tile: int, segment: int) -> float:
    total, pairs = 0.0, 0
    for first in range(0, len(rows[0]), segment):
        part = sorted([row[first : first + segment] for row in rows])
        size = len(part) * len(part[0])
        total, pairs = total + slow_union(part, tile) * size, pairs + size
    return total / pairs


@given(
    tokens=st.integers(1, 40),
    groups=st.integers(1, 19),
    tile=st.integers(1, 16),
    density=st.floats(0, 1),
    seed=st.integers(0, 9),
)
def test_unions_equal_a_count_pair_by_pair(tokens: int, groups: int, tile: int, density: float, seed: int) -> None:
    mask = random_mask(tokens, groups, density, seed)
    assert union_density(mask, tile) == pytest.approx(slow_union(mask.tolist(), tile))
    assert sorted_union_density(mask, tile, 8) == pytest.approx(slow_sorted_union(mask.tolist(), tile, 8))
    assert mask.float().mean() - 1e-6 <= sorted_union_density(mask, tile, 8) <= 1


def test_sorting_makes_two_kinds_of_tokens_two_kinds_of_tiles() -> None:
    mask = torch.zeros(256, 8, dtype=torch.bool)
    mask[::2, :4] = True
    mask[1::2, 4:] = True
    assert union_density(mask) == 1.0
    assert sorted_union_density(mask) == 0.5


def test_constant_groups_and_both_entropies() -> None:
    mask = torch.zeros(200, 4, dtype=torch.bool)
    mask[:, 0] = True
    mask[:100, 1] = True
    mask[:199, 2] = True  # all but one of 200: as good as always
    found = part_statistics(mask, torch.tensor([0.0, 1.0, 0.5, 0.5]))
    assert (found.always_on, found.always_off) == ((0, 2), (3,))
    assert found.group_skip_rates == pytest.approx((0, 0.5, 0.005, 1))
    assert found.skip_rate == pytest.approx((0 + 0.5 + 0.005 + 1) / 4)
    rare = -(0.005 * math.log2(0.005) + 0.995 * math.log2(0.995))
    assert found.decision_entropy == pytest.approx((1 + rare) / 4)
    assert found.router_entropy == 0.5


def test_entropy_is_zero_when_certain_and_one_bit_at_a_coin_toss() -> None:
    assert binary_entropy(torch.tensor([0.0, 0.5, 1.0])).tolist() == [0.0, 1.0, 0.0]


def test_correlation_between_layers_is_pearsons_and_empty_for_a_constant_layer() -> None:
    masks: dict[Key, Tensor] = {(layer, "ffn"): random_mask(50, 6, seed=layer) for layer in (0, 1)}
    masks[2, "ffn"] = torch.ones(50, 6, dtype=torch.bool)
    masks[1, "attention"] = random_mask(50, 2, seed=7)
    found = layer_correlation(masks, "ffn", 4)  # layer 3 is not routed
    shares = [masks[layer, "ffn"].float().mean(1).numpy() for layer in (0, 1)]
    assert found[0][1] == pytest.approx(float(np.corrcoef(shares[0], shares[1])[0, 1]), abs=1e-6)
    assert found[0][0] == pytest.approx(1.0) and found[0][1] == found[1][0]
    assert found[2] == [None] * 4 and found[3] == [None] * 4 and found[0][2] is None


def test_words_are_counted_without_their_spaces_and_sorted_by_what_they_run() -> None:
    masks: dict[Key, Tensor] = {
        (0, "ffn"): torch.tensor([[1, 1], [0, 0], [1, 0], [0, 0]], dtype=torch.bool),
        (0, "attention"): torch.tensor([[1], [0], [1], [0]], dtype=torch.bool),
    }
    found = words(["fox", " the", " fox", "the"], masks)
    assert [(word.token, word.count) for word in found] == [("fox", 2), ("the", 2)]
    assert found[0].executed == {"attention": 1.0, "ffn": 0.75}
    assert found[1].mean == 0

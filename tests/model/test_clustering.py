from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from widecli.errors import UsageError
from widecli.model.clustering import canonical, captured_energy, climb, cluster_channels, energy_shares, swap_pairs


def random_energy(tokens: int, channels: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, channels, generator=torch.Generator().manual_seed(seed)).pow(4)


def planted(tokens: int, groups: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Energy [T, C] of channels that come and go in groups, scattered; and their canonical order."""
    generator = torch.Generator().manual_seed(seed)
    runs = torch.rand(tokens, groups, generator=generator) < 0.4
    strength = 0.05 + runs * torch.rand(tokens, groups, generator=generator)
    noise = 0.7 + 0.6 * torch.rand(tokens, groups * width, generator=generator)
    scattered = torch.randperm(groups * width, generator=generator)
    energy = strength.repeat_interleave(width, 1) * noise
    return energy[:, scattered], canonical(scattered.argsort(), width)


@given(
    seed=st.integers(0, 1000),
    groups=st.integers(1, 9),
    width=st.integers(1, 9),
    tokens=st.integers(36, 70),
    share=st.sampled_from([0.25, 0.5, 0.9]),
)
@settings(deadline=None, max_examples=40)
def test_the_order_is_a_canonical_permutation(seed: int, groups: int, width: int, tokens: int, share: float) -> None:
    order = cluster_channels(random_energy(tokens, groups * width, seed), width, seed=seed, share=share)
    assert order.dtype == torch.int64
    assert sorted(order.tolist()) == list(range(groups * width))
    members = order.view(groups, width)
    assert (members.diff(dim=1) > 0).all(), "channels of a group do not ascend"
    assert (members[:, 0].diff() > 0).all(), "groups are not in the order of their lowest channel"


def test_equal_groupings_have_equal_orders() -> None:
    order = torch.tensor([5, 1, 4, 0, 3, 2])
    assert canonical(order, 2).tolist() == [0, 4, 1, 5, 2, 3]
    assert torch.equal(canonical(torch.tensor([3, 2, 1, 5, 4, 0]), 2), canonical(order, 2))


@pytest.mark.parametrize(("groups", "width"), [(4, 16), (12, 8), (3, 40), (24, 4)])
def test_planted_groups_are_found(groups: int, width: int) -> None:
    energy, expected = planted(600, groups, width)
    assert torch.equal(cluster_channels(energy, width), expected)


def test_dead_channels_and_silent_tokens_do_no_harm() -> None:
    energy, _ = planted(300, 4, 8)
    energy[:, :5] = 0
    energy[7] = 0
    order = cluster_channels(energy, 8)
    assert sorted(order.tolist()) == list(range(32))
    assert captured_energy(energy, order, 8) > captured_energy(energy, torch.arange(32), 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_only_shares_of_a_token_count_whatever_the_dtype(dtype: torch.dtype) -> None:
    energy, expected = planted(600, 4, 16)
    scale = 2.0 ** torch.randint(-3, 4, (600, 1), generator=torch.Generator().manual_seed(1))
    assert torch.equal(cluster_channels((energy * scale).to(dtype), 16), expected)


def test_the_order_is_the_same_at_every_call_and_thread_count() -> None:
    energy = random_energy(700, 192)
    before = torch.get_num_threads()
    try:
        orders = []
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            orders.append(cluster_channels(energy, 16, seed=3))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(order, orders[0]) for order in orders)


def test_the_order_does_not_depend_on_the_order_of_tokens_in_a_sum() -> None:
    # climbing alone: features are random sets of tokens, which another order of the text changes
    by_channel = energy_shares(random_energy(500, 96)).T.double().contiguous()
    shuffled = by_channel[:, torch.randperm(500, generator=torch.Generator().manual_seed(0))].contiguous()
    assert torch.equal(climb(by_channel, torch.arange(96), 8, 0.5)[1], climb(shuffled, torch.arange(96), 8, 0.5)[1])


@given(seed=st.integers(0, 1000), groups=st.integers(2, 8), width=st.integers(1, 8), share=st.floats(0.1, 0.9))
@settings(deadline=None, max_examples=40)
def test_swaps_never_lower_the_energy_captured(seed: int, groups: int, width: int, share: float) -> None:
    channels = groups * width
    energy = random_energy(64, channels, seed)
    order = torch.randperm(channels, generator=torch.Generator().manual_seed(seed))
    _, climbed = climb(energy_shares(energy).T.double().contiguous(), order, width, share)
    assert sorted(climbed.tolist()) == list(range(channels))
    assert captured_energy(energy, climbed, width, share) >= captured_energy(energy, order, width, share)


def test_swaps_end_where_no_pair_gains() -> None:
    value = torch.randn(24, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    order, moved = swap_pairs(value, torch.arange(24), 6)
    assert moved
    group = order.argsort() // 6
    own = value[torch.arange(24), group]
    gain = value[:, group] - own[:, None]  # of c in the group of d
    assert float((gain + gain.T).max()) <= 0
    assert not swap_pairs(value, order, 6)[1]


def test_clustering_beats_the_stored_order_and_sorting_by_mean() -> None:
    energy, _ = planted(600, 12, 8)
    found = captured_energy(energy, cluster_channels(energy, 8), 8)
    assert found > captured_energy(energy, torch.arange(96), 8) + 0.05
    assert found > captured_energy(energy, energy.mean(0).argsort(), 8) + 0.05


def test_captured_energy_by_hand() -> None:
    energy = torch.tensor([[8.0, 0.0, 4.0, 4.0], [0.0, 0.0, 1.0, 3.0]])
    # groups {0, 1} and {2, 3} hold 1/2 and 1/2 of the first token, 0 and 1 of the second
    assert captured_energy(energy, torch.arange(4), 2) == 0.75
    # {0, 2} and {1, 3}: 3/4 and 1/4, 1/4 and 3/4
    assert captured_energy(energy, torch.tensor([0, 2, 1, 3]), 2) == 0.75
    assert captured_energy(energy, torch.arange(4), 2, share=1.0) == 1.0


def test_too_few_tokens_are_refused_with_the_number_needed() -> None:
    with pytest.raises(UsageError, match=r"96 channels into 12 groups needs at least 48 tokens, and there were 47"):
        cluster_channels(random_energy(47, 96), 8)
    assert len(cluster_channels(random_energy(48, 96), 8)) == 96


def test_a_width_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UsageError, match="groups of 7 channels do not divide the 96 channels"):
        cluster_channels(random_energy(50, 96), 7)

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from widecli.data.stream import SequenceStream, epoch_order
from widecli.errors import UsageError

sizes = st.integers(1, 40)


@settings(deadline=None)  # shared machines
@given(sizes, sizes, st.integers(0, 5))
def test_every_epoch_sees_every_sequence_once(num_sequences: int, batch_size: int, seed: int) -> None:
    stream = SequenceStream(num_sequences, batch_size, seed)
    steps = -(-3 * num_sequences // batch_size)
    seen = np.concatenate([stream.batch(step) for step in range(steps)])
    for epoch in range(3):
        part = seen[epoch * num_sequences : (epoch + 1) * num_sequences]
        assert sorted(part.tolist()) == list(range(num_sequences))


@settings(deadline=None)  # shared machines
@given(sizes, sizes, st.integers(0, 50), st.integers(1, 5))
def test_ranks_share_the_global_batch_without_overlap(num: int, batch_size: int, step: int, world: int) -> None:
    stream = SequenceStream(num, batch_size, seed=3)
    shares = [stream.batch(step, rank, world) for rank in range(world)]
    assert Counter(np.concatenate(shares).tolist()) == Counter(stream.batch(step).tolist())
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_fresh_stream_gives_the_same_batch_at_any_step() -> None:
    walked = [SequenceStream(17, 5, seed=1).batch(step) for step in range(30)]
    epoch_order.cache_clear()
    assert (SequenceStream(17, 5, seed=1).batch(29) == walked[29]).all()


def test_the_order_is_the_one_of_earlier_versions() -> None:
    assert SequenceStream(8, 8, seed=0).batch(0).tolist() == [0, 3, 7, 5, 1, 2, 6, 4]


def test_epochs_and_seeds_differ() -> None:
    orders = [epoch_order(50, seed, epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert all(one != other for one, other in pairwise(orders))
    assert orders[0] != list(range(50))


def test_epoch_counts_from_the_first_sequence_of_the_step() -> None:
    stream = SequenceStream(10, 4, seed=0)
    assert [stream.epoch(step) for step in range(6)] == [0, 0, 0, 1, 1, 2]


def test_the_cached_order_cannot_be_changed_by_a_caller() -> None:
    batch = SequenceStream(6, 6, seed=0).batch(0)
    before = batch.copy()
    batch[:] = 0
    assert (SequenceStream(6, 6, seed=0).batch(0) == before).all()


def test_no_sequences_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="0 sequences"):
        SequenceStream(0, 4, seed=0)

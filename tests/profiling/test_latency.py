"""Quantiles, turns, and what a sample of decode is."""

from __future__ import annotations

import pytest
import torch

from tiny_models import random_ids, tiny_model
from widecli.engine.model import InferenceModel
from widecli.profiling.latency import Call, Times, first_token, further_tokens, interleaved


def test_quantiles() -> None:
    times = Times.of([float(x) for x in range(100, -1, -1)])
    assert times == Times(p50_ms=50.0, p90_ms=90.0, p99_ms=99.0, min_ms=0.0, mean_ms=50.0, n=101)
    assert Times.of([3.0]).as_dict() == {
        "p50_ms": 3.0,
        "p90_ms": 3.0,
        "p99_ms": 3.0,
        "min_ms": 3.0,
        "mean_ms": 3.0,
        "n": 1,
    }


def test_candidates_take_turns_and_warm_up_is_not_counted() -> None:
    order: list[str] = []

    def call(name: str, value: float) -> Call:
        def run() -> list[float]:
            order.append(name)
            return [1000.0 if order.count(name) <= 2 else value] * 2

        return run

    a, b, c = interleaved([call("a", 1.0), call("b", 2.0), call("c", 3.0)], seconds=1e-9)
    assert "".join(order) == "abcabc" + "abc" + "bca" + "cab"
    assert [t.p50_ms for t in (a, b, c)] == [1.0, 2.0, 3.0]
    assert a.n == 6 and a.p99_ms == 1.0


def test_more_turns_where_time_allows_up_to_a_limit() -> None:
    (found,) = interleaved([lambda: [1.0]], seconds=1000.0, most=7)
    assert found.n == 7


def test_a_sample_is_a_pass_or_a_token() -> None:
    session = InferenceModel.from_dense(tiny_model()).session(2, 12)
    ids = random_ids(2, 6)
    (time,) = first_token(session, ids)
    assert time > 0 and session.lengths.tolist() == [6, 6]
    first = session.token.clone()
    again: list[list[int]] = []
    for _ in range(2):
        samples = further_tokens(session, 6, first, 5)
        assert len(samples) == 5 and min(samples) > 0
        assert session.lengths.tolist() == [11, 11]
        again.append(session.token.tolist())
    assert again[0] == again[1]  # every turn starts from the same place


def test_rewinding_gives_the_same_tokens_again_and_refuses_other_places() -> None:
    from widecli.errors import UsageError

    session = InferenceModel.from_dense(tiny_model()).session(1, 12)
    session.prefill(random_ids(1, 6))
    first = session.token.clone()
    told = []
    for _ in range(2):
        session.rewind(6, first)
        told.append([int(session.decode().argmax(-1)) for _ in range(5)])
    assert told[0] == told[1]
    with pytest.raises(UsageError, match="12 slots"):
        session.rewind(13, first)


def test_models_can_take_turns_on_one_cache() -> None:
    from widecli.errors import UsageError

    model = InferenceModel.from_dense(tiny_model())
    one = model.session(2, 12)
    ids = random_ids(2, 6)
    expected = one.prefill(ids)
    other = InferenceModel.from_dense(model.weights).session(2, 12, cache=one.cache)
    assert other.cache is one.cache
    torch.testing.assert_close(other.prefill(ids), expected)
    with pytest.raises(UsageError, match="2 sequences of 12 tokens cannot serve 2 of 11"):
        model.session(2, 11, cache=one.cache)

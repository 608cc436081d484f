"""Counters that outlive a launch: who may share them."""

from __future__ import annotations

import pytest
import torch

from wide_kernels import counters


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    state = {"stream": 1, "capturing": 0, "capture": 0}

    class Stream:
        def __init__(self) -> None:
            self.cuda_stream = state["stream"]

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, device=None, **k: zeros(*a, **k))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: Stream())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(state["capturing"]))
    monkeypatch.setattr(counters, "capture_number", lambda stream: state["capture"] or None)
    for name in ("_of_stream", "_for_graphs", "_of_capture"):
        monkeypatch.setattr(counters, name, {})
    return state


def test_streams_and_captured_calls_have_counters_of_their_own(pretended_gpu: dict[str, int]) -> None:
    device = torch.device("cuda", 0)
    first = counters.counters("a", device, 4)
    assert counters.counters("a", device, 9).data_ptr() == first.data_ptr()
    assert counters.counters("b", device, 4).data_ptr() != first.data_ptr()
    pretended_gpu["stream"] = 2
    assert counters.counters("a", device, 4).data_ptr() != first.data_ptr()
    pretended_gpu["capturing"] = 1
    one, two = counters.counters("a", device, 4), counters.counters("a", device, 3)
    assert two.data_ptr() - one.data_ptr() == 4 * 4
    rest = counters.counters("a", device, counters.CAPTURED)  # more than there is: cleared by the graph itself
    assert rest.numel() == counters.CAPTURED
    assert not bool(rest.any())


def test_a_large_launch_gets_enough_counters(pretended_gpu: dict[str, int]) -> None:
    device = torch.device("cuda", 0)
    counters.counters("a", device, 1)
    assert counters.counters("a", device, counters.EAGER + 1).numel() > counters.EAGER


def test_what_takes_many_counters_has_some_set_aside_for_a_whole_graph(
    pretended_gpu: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "CAPTURED", 8)
    monkeypatch.setattr(counters, "CAPTURED_LAUNCHES", 3)
    device = torch.device("cuda", 0)
    counters.counters("few", device, 2)
    counters.counters("many", device, 100)
    pretended_gpu["capturing"] = 1
    places = [counters.counters("many", device, 100).data_ptr() for _ in range(3)]
    assert [place - places[0] for place in places] == [0, 400, 800]
    assert counters.counters("few", device, 2).data_ptr() not in range(places[0], places[0] + 1200)


def test_launches_of_one_capture_share_counters_where_captures_can_be_told_apart(
    pretended_gpu: dict[str, int],
) -> None:
    device = torch.device("cuda", 0)
    counters.counters("a", device, 4)
    pretended_gpu |= {"capturing": 1, "capture": 7}
    first = counters.counters("a", device, 4)
    assert counters.counters("a", device, 4).data_ptr() == first.data_ptr()
    assert counters.counters("a", device, 5).data_ptr() == first.data_ptr() + 16, "it needs more"
    assert counters.counters("b", device, 4).data_ptr() != first.data_ptr()
    pretended_gpu["capture"] = 8
    second = counters.counters("a", device, 4)
    assert second.data_ptr() == first.data_ptr() + 16 + 20
    pretended_gpu["stream"] = 2
    assert counters.counters("a", device, 4).data_ptr() == second.data_ptr() + 16


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_nothing_is_captured_without_a_gpu() -> None:
    assert counters.capture_number(0) is None

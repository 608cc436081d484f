"""Counters at which programs wait for each other: their arithmetic, and who may share them."""

from __future__ import annotations

import pytest
import torch

from wide_kernels import meeting


@pytest.mark.parametrize("programs", [1, 2, 8, 1000])
def test_the_last_to_arrive_flips_the_top_bit_and_clears_the_others(programs: int) -> None:
    counter = 0
    for round_ in range(3):
        before = counter
        for program in reversed(range(programs)):  # the first program's number comes last, or anywhere
            assert program == programs - 1 or (before ^ counter) >> 31 == 0
            counter = (counter + (0x7FFFFFFF - (programs - 2) if program == 0 else 1)) % 2**32
        assert counter == (0x80000000 if round_ % 2 == 0 else 0)


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    state = {"stream": 1, "capturing": 0}

    class Stream:
        def __init__(self) -> None:
            self.cuda_stream = state["stream"]

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, device=None, **k: zeros(*a, **k))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: Stream())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(state["capturing"]))
    for name in ("_by_stream", "_reserve", "_taken"):
        monkeypatch.setattr(meeting, name, {})
    return state


def test_streams_and_captured_calls_have_counters_of_their_own(pretended_gpu: dict[str, int]) -> None:
    device = torch.device("cuda", 0)
    first = meeting.counters(device, 4)
    assert meeting.counters(device, 9).data_ptr() == first.data_ptr()
    pretended_gpu["stream"] = 2
    assert meeting.counters(device, 4).data_ptr() != first.data_ptr()
    pretended_gpu["capturing"] = 1
    one, two = meeting.counters(device, 4), meeting.counters(device, 3)
    assert two.data_ptr() - one.data_ptr() == 4 * 4
    rest = meeting.counters(device, meeting.RESERVE)  # more than there is: cleared by the graph itself
    assert rest.numel() == meeting.RESERVE
    assert not bool(rest.any())


def test_a_large_launch_gets_enough_counters(pretended_gpu: dict[str, int]) -> None:
    device = torch.device("cuda", 0)
    meeting.counters(device, 1)
    assert meeting.counters(device, meeting.EAGER + 1).numel() > meeting.EAGER

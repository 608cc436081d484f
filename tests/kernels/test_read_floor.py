"""The floor of decode attention without a GPU: its readers read what they say, its rows are complete, its errors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from wide_kernels.benchmarks import read_floor, timing
from wide_kernels.benchmarks.read_floor import READERS, Reader, candidates, check_reader, timed

MASK = torch.tensor([[False, True, True, False, True, False, False, True]])


def keys_and_values(device: str, keys: int = 320) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(keys)
    k, v = (torch.randn(1, keys, 8, 32, generator=generator).half().to(device) for _ in range(2))
    return k, v


@pytest.mark.parametrize("reader", READERS, ids=str)
def test_a_reader_reads_every_word_of_the_executed_heads_once(reader: Reader, device: str) -> None:
    k, v = keys_and_values(device)
    check_reader(reader, k, v, MASK.to(device))
    check_reader(reader, k, v, torch.zeros_like(MASK, device=device))


def test_a_reader_that_leaves_keys_out_is_found(device: str) -> None:
    k, v = keys_and_values(device, keys=352)  # half a tile is left over
    check_reader(replace(READERS[0], keys=32), k, v, MASK.to(device))
    with pytest.raises(RuntimeError, match="it has not read what it should"):
        check_reader(READERS[0], k, v, MASK.to(device))


def test_readers_operator_and_dense_calls_are_timed_alone_and_in_a_graph(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "captured", lambda call: call)

    def times(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, timing.Times]:
        for call in calls.values():
            call()
        made = len(calls["counted"]())  # type: ignore[arg-type]
        return {name: timing.Times(0.004 * made, 1.0, 0.003, rounds) for name in calls}

    monkeypatch.setattr(timing, "interleaved", times)
    monkeypatch.setattr(read_floor, "READERS", READERS[3:5])
    k, v = keys_and_values(device, keys=64)
    calls = candidates([(torch.randn(1, 1, 16, 32, device=device).half(), k, v)] * 2, MASK.to(device))
    assert {"empty launch", "attention_decode, triton", *map(str, READERS[3:5])} <= set(calls)
    assert any(name.startswith("dense, ") for name in calls)
    rows = timed(calls | {"counted": [lambda: None] * 2}, rounds=2)
    assert [row["what"] for row in rows] == [*calls, "counted"]
    assert rows[0]["us"] == pytest.approx(4.0)
    assert rows[0]["min_us"] == pytest.approx(3.0)
    assert rows[0]["us_in_graph"] == pytest.approx(4.0)  # two calls take twice as long


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--keys", "100"], "--keys must be a multiple of 64, got 100"),
        (["--keys", "0"], "--keys must be a multiple of 64, got 0"),
        (["--calls", "0"], "--calls must be at least 1, got 0"),
        (["--rounds", "-1"], "--rounds must be at least 1, got -1"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["read_floor", *arguments])
    with pytest.raises(SystemExit) as stopped:
        read_floor.main()
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["read_floor"])
    assert read_floor.main() == 2
    assert "timed on a CUDA GPU and this machine has none" in capsys.readouterr().err


def test_every_reader_takes_the_tiles_of_a_cache_that_is_accepted() -> None:
    assert {read_floor.KEYS_A_TILE % reader.keys for reader in READERS} == {0}

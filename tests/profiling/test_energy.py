"""Joules from the counter, and a reason where there is none."""

from __future__ import annotations

import sys

import pytest
import torch

from widecli.profiling import energy
from widecli.profiling.energy import EnergyMeter


def test_without_a_gpu_it_says_so() -> None:
    meter, reason = EnergyMeter.open(torch.device("cpu"))
    assert meter is None and "there is none here" in reason


def test_without_nvml_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    meter, reason = EnergyMeter.open(torch.device("cuda"))
    assert meter is None and "pip install nvidia-ml-py" in reason


def test_joules_are_the_counters_difference_by_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Counter:
        def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
            assert handle == "first"
            return 5_000 + 3_000 * len(calls)  # millijoules

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    clock = iter([0.0, 0.5, 1.5, 2.5])
    monkeypatch.setattr(energy.time, "perf_counter", lambda: next(clock))
    meter = EnergyMeter(Counter(), "first", torch.device("cuda"))
    assert meter.joules(lambda: calls.append(1)) == pytest.approx(3.0)
    assert len(calls) == 3

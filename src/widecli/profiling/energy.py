"""Joules by the GPU's own counter (NVML), where there is one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

_SECONDS = 2.0  # the counter moves every few tens of milliseconds


class EnergyMeter:
    """Reads the energy counter of one GPU."""

    def __init__(self, library: Any, handle: Any, device: torch.device) -> None:
        self._library = library
        self._handle = handle
        self._device = device

    @classmethod
    def open(cls, device: torch.device) -> tuple[EnergyMeter | None, str]:
        """The meter, or None and why there is none."""
        if device.type != "cuda":
            return None, "energy is not measured: NVML counts a GPU's energy, and there is none here"
        try:
            import pynvml
        except ImportError:
            return None, "energy is not measured: NVML's Python package is missing (pip install nvidia-ml-py)"
        try:
            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except Exception as error:  # NVML has an error class for each of its codes, and drivers differ
            return None, f"energy is not measured: NVML says {error}"
        return cls(pynvml, handle, device), ""

    def joules(self, call: Callable[[], object]) -> float:
        """Joules of one call, averaged over about two seconds of calls."""
        torch.cuda.synchronize(self._device)
        before, started, calls = self._read(), time.perf_counter(), 0
        while not calls or time.perf_counter() - started < _SECONDS:
            call()
            torch.cuda.synchronize(self._device)
            calls += 1
        return (self._read() - before) / calls

    def _read(self) -> float:
        return float(self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3

"""Kernels go to the range that launched them; what is left of a step is its launch gaps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tiny_models import random_ids, tiny_model
from widecli.engine.model import InferenceModel
from widecli.model.plan import ModelShape
from widecli.profiling.trace import breakdown, device_times, fixed_share, host_times, range_times


def event(cat: str, name: str, ts: float, dur: float, correlation: int | None = None) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


EVENTS = [
    event("user_annotation", "wide::down", 200, 50),
    event("user_annotation", "wide::qkv", 100, 50),
    event("user_annotation", "ProfilerStep#1", 0, 1000),
    event("user_annotation", "wide::qkv", 300, 20),
    event("cuda_runtime", "cudaLaunchKernel", 110, 5, 1),
    event("cuda_driver", "cuLaunchKernel", 150, 5, 2),
    event("cuda_runtime", "cudaLaunchKernel", 170, 5, 3),  # between two ranges
    event("cuda_runtime", "cudaMemcpyAsync", 210, 5, 4),
    event("cuda_runtime", "cudaLaunchKernel", 305, 5, 5),
    # the device runs them later, when the host is in another range
    event("kernel", "gemm", 400, 1000, 1),
    event("kernel", "triton", 1400, 500, 2),
    event("kernel", "argmax", 1900, 100, 3),
    event("gpu_memcpy", "Memcpy", 2000, 30, 4),
    event("kernel", "gemm", 2100, 200, 5),
    event("kernel", "stray", 2300, 7),
    event("gpu_user_annotation", "wide::qkv", 400, 5000),
    {"ph": "M", "name": "process_name"},
]


def test_device_time_belongs_to_the_range_that_launched_it() -> None:
    assert device_times(EVENTS) == pytest.approx({"qkv": 1.7, "other": 0.107, "down": 0.03})


def test_a_kernel_that_waits_for_the_one_before_counts_from_its_end() -> None:
    events = [
        event("user_annotation", "wide::o", 0, 10),
        event("user_annotation", "wide::down", 10, 10),
        event("cuda_runtime", "cudaLaunchKernelExC", 1, 2, 1),
        event("cuda_runtime", "cudaLaunchKernelExC", 11, 2, 2),
        event("cuda_runtime", "cudaLaunchKernelExC", 13, 2, 3),
        event("kernel", "last", 150, 250, 3),
        event("kernel", "first", 100, 200, 1),
        event("kernel", "within", 120, 50, 2),
    ]
    assert device_times(events) == pytest.approx({"o": 0.2, "down": 0.1})


def test_on_a_cpu_the_ranges_stand_for_themselves() -> None:
    assert host_times(EVENTS) == pytest.approx({"qkv": 0.07, "down": 0.05})


def test_what_is_left_of_a_step_is_launch_gaps() -> None:
    parts = breakdown({"down": 2.0, "other": 0.5, "qkv": 1.0}, 4.0)
    assert list(parts) == ["qkv", "down", "other", "launch_gaps"]
    assert parts["launch_gaps"] == pytest.approx(0.5)
    assert breakdown({"down": 2.0}, 1.9)["launch_gaps"] == 0.0
    assert breakdown({}, 1.9) == {}  # a profiler that may not see the device


def test_the_fixed_share_keeps_k_and_v_of_the_fused_product() -> None:
    shape = ModelShape(1, 8, 32, 4, 2, 4, 50)
    parts = {"qkv": 2.0, "attention": 1.0, "o": 1.0, "gate_up": 2.0, "down": 1.0, "lm_head": 1.0, "launch_gaps": 2.0}
    assert fixed_share(parts, shape) == pytest.approx(4.0 / 10.0)


def test_a_real_step_names_its_parts(capfd: pytest.CaptureFixture[str]) -> None:
    session = InferenceModel.from_dense(tiny_model()).session(1, 20)
    ids = random_ids(1, 8)
    found = range_times(lambda: session.prefill(ids), torch.device("cpu"), 2)
    assert set(found) == {
        "embed",
        "norm_route",
        "qkv",
        "rope_cache",
        "attention",
        "o",
        "gate_up",
        "down",
        "lm_head",
        "statistics",
    }
    assert min(found.values()) > 0
    assert capfd.readouterr().err == ""

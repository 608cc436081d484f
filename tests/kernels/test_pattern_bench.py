"""The benchmark of patterns without a GPU: its decisions, its cases, its record and table, its errors."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import wide_kernels as wk
from wide_kernels import bench
from wide_kernels.benchmarks import pattern_bench, timing
from wide_kernels.benchmarks.cases import Sizes
from wide_kernels.benchmarks.pattern_cases import (
    BITS,
    PATTERN_OPS,
    PatternSizes,
    pattern_cases,
    read_histogram,
    resampled,
    wasted,
)
from wide_kernels.benchmarks.shapes import model_shape

TINY = model_shape("32x64")


def point(device: str, rows: int = 140, count: int = 3, frequency: str = "even") -> PatternSizes:
    return PatternSizes(Sizes(TINY, rows, 16, 0.5, torch.float16, device), count, frequency)


def test_every_timed_case_is_right_on_every_backend(device: str) -> None:
    found = list(pattern_cases(point(device), set(PATTERN_OPS)))
    assert [case.op for case in found] == list(PATTERN_OPS)
    for case in found:
        assert case.check() < 1e-3, case.name
        assert case.compare is not None
        for name, call in case.backends.items():
            assert case.compare(call()) < 1e-3, f"{case.name} {name}"
        assert case.op in ("pattern_layout", "ffn") or {"triton", "torch"} <= set(case.backends)
        for call in case.dense.values():
            call()
        assert set(case.others) == (set() if case.op == "pattern_layout" else {BITS})


def test_decisions_have_their_density_and_their_frequencies() -> None:
    sizes = Sizes(model_shape("32x1600"), 20000, 16, 0.25, torch.float16, "cpu")
    ids, patterns = PatternSizes(sizes, 4, "zipf").decision()
    assert patterns.sum(1).tolist() == [25] * 4
    counts = sorted(torch.bincount(ids, minlength=4).tolist(), reverse=True)
    total = 1 + 1 / 2 + 1 / 3 + 1 / 4
    assert counts == pytest.approx([20000 / total / rank for rank in (1, 2, 3, 4)], rel=0.05)
    again = PatternSizes(sizes, 4, "zipf").decision()
    assert torch.equal(ids, again[0]) and torch.equal(patterns, again[1])
    even, _ = PatternSizes(sizes, 4, "even").decision()
    assert torch.bincount(even, minlength=4).tolist() == pytest.approx([5000] * 4, rel=0.05)


def test_a_histogram_keeps_its_curve_at_other_lengths(tmp_path: Path) -> None:
    path = tmp_path / "histogram.json"
    path.write_text("[1, 6, 0, 3]")
    histogram = read_histogram(path)
    assert histogram == (6, 3, 1, 0)
    assert resampled(histogram, 4).tolist() == pytest.approx([0.6, 0.3, 0.1, 0])
    assert resampled(histogram, 2).tolist() == pytest.approx([0.9, 0.1])
    assert resampled(histogram, 8).tolist() == pytest.approx([0.3, 0.3, 0.15, 0.15, 0.05, 0.05, 0, 0])
    assert PatternSizes(point("cpu").sizes, 2, "measured", histogram).shares().tolist() == pytest.approx([0.9, 0.1])


@pytest.mark.parametrize("content", ["{", "[]", "[0, 0]", "[1, -1]", '["a"]', "3", None])
def test_what_is_no_histogram_is_refused(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "histogram.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(wk.UnsupportedError, match="is no JSON list of how often each pattern was taken"):
        read_histogram(path)


def test_waste_counts_what_tiles_run_beyond_their_rows() -> None:
    patterns = torch.tensor([[True, False], [False, True]])
    apart = torch.arange(128, dtype=torch.int32) // 64
    assert wasted(wk.pattern_layout(apart, patterns, backend="torch")) == 0
    border = torch.arange(128, dtype=torch.int32) // 96  # the second half runs both groups
    assert wasted(wk.pattern_layout(border, patterns, backend="torch")) == pytest.approx(0.5)
    assert wasted(wk.pattern_layout(apart[:32], patterns, backend="torch")) == pytest.approx(1.0)


def test_a_record_tells_times_against_dense_and_bits(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(timing, "captured", lambda call: call)
    monkeypatch.setattr(timing, "peak_extra_bytes", lambda call: 1)
    monkeypatch.setattr(timing, "launched_kernels", lambda call: ["pattern_kernel"])
    shown = {"linear": 3.0, BITS: 2.0}

    def times(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, timing.Times]:
        return {name: timing.Times(shown.get(name, 1.0), 3.0, 0.5, rounds) for name in calls}

    monkeypatch.setattr(timing, "interleaved", times)
    records = list(pattern_bench.measure_patterns([point(device)], {"gemm_k"}, 4, math.inf))
    assert len(records) == 1
    assert records[0]["speedup"] == 3.0
    assert (records[0]["patterns"], records[0]["frequency"]) == (3, "even")
    assert records[0]["waste"] > 0
    assert records[0]["bitwise_repeatable"]
    assert "torch" not in records[0]["backends"]
    text = pattern_bench.pattern_row(records[0])
    assert text.split()[:8] == ["gemm_k", "140", "16", "3", "even", "1000.0", "3.00x", "2.00x"]
    assert "NOT" in pattern_bench.pattern_row(records[0] | {"bitwise_repeatable": False})
    json.dumps(records)
    late = list(pattern_bench.measure_patterns([point(device)], {"gemm_k"}, 4, -math.inf))
    assert "left out, the time budget ended: T=140 G=16 density=0.5 C=3 even" in pattern_bench.pattern_row(late[0])


def test_the_grid_starts_where_the_targets_stand(tmp_path: Path) -> None:
    path = tmp_path / "histogram.json"
    path.write_text("[3, 1]")
    arguments = argparse.Namespace(model="llama-3.1-8b", points=None, counts=[64, 16], histogram=path)
    found = pattern_bench.pattern_points(arguments, torch.bfloat16)
    assert len(found) == 2 * 9 * 3
    assert [str(where) for where in found[:4]] == [
        "T=16384 G=16 density=0.5 C=64 even",
        "T=16384 G=16 density=0.5 C=64 zipf",
        "T=16384 G=16 density=0.5 C=64 measured",
        "T=16384 G=128 density=0.5 C=64 even",
    ]
    tasks = pattern_bench.warm_tasks(found, set(PATTERN_OPS))
    assert len(tasks) == 9 * 3 + 3 * 2
    same = [replace(where, frequency="even", histogram=()) for where in found]
    assert pattern_bench.warm_tasks(same, set(PATTERN_OPS)) == pattern_bench.warm_tasks(same[::3], set(PATTERN_OPS))


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["--patterns", "--counts", "0"], "--counts must be at least 1, got 0"),
        (["--patterns", "--tune", "gemm_k"], "--patterns makes its own decisions and tunes nothing"),
        (["--patterns", "--masks", "file"], "--patterns makes its own decisions and tunes nothing"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    given: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *given])
    with pytest.raises(SystemExit):
        bench.parse()
    assert complaint in capsys.readouterr().err

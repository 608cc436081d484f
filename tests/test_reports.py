"""The pages of measured kernels hold what the records hold."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def renderer(repository: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location("render_kernels", repository / "reports/render_kernels.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def document(**changes: Any) -> dict[str, Any]:
    times = {"p50_ms": 1.25, "p90_ms": 1.3, "min_ms": 1.2, "n": 20}
    record = {
        "op": "gemm_mn",
        "model": "llama-3.1-8b",
        "rows": 16384,
        "group_size": 128,
        "density": 0.5,
        "masks": "random",
        "structure": None,
        "backend": "triton",
        "explain": "gemm_mn runs on triton: because\n  not gluon: there is none",
        "error": 0.0017,
        "bitwise_repeatable": True,
        "routed": times,
        "baselines": {"linear": times | {"p50_ms": 2.5}, "gather-scatter all": times | {"p50_ms": 12.5}},
        "backends": {"triton": times | {"chosen": True}, "torch": times | {"p50_ms": 3.0, "chosen": False}},
        "refused": {"gluon": "it needs sm_90"},
        "best_dense": "linear",
        "speedup": 2.0,
        "tflops": 600.0,
        "peak_extra_bytes": {"routed": 2**20, "linear": 2**20, "gather-scatter all": 2**24},
        "kernels": ["tile_kernel"],
    }
    entry = {"name": "GEMM-MN, G=128", "must": 1.4, "goal": 1.65, "ideal": 2.0, "unit": "x", "level": "goal"}
    entry |= {"reached": 2.0, "with_layout": 1.98, "error": 0.0017, "backend": "triton", "variants": {"gemm_mn": 2.0}}
    missing = {"name": "other", "must": 1, "goal": 2, "ideal": None, "unit": "us", "level": "not measured"}
    return {
        "schema": "wide_kernels.bench/1",
        "environment": {"gpu": "NVIDIA H200", "torch": "2.11", "revision": None},
        "checks": {"done": 10, "wrong": []},
        "results": [record, {"left_out": "T=1 G=128 density=0.5"}],
        "summary": [entry, missing | {"reached": None}],
        **changes,
    }


def test_a_page_holds_targets_figures_backends_and_what_ran(renderer: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "h200.json").write_text(json.dumps(document()))
    (tmp_path / "limits.json").write_text(json.dumps({"GEMM-MN, G=128": "feed from L2"}))
    (tmp_path / "other.json").write_text("{}")
    assert renderer.render(tmp_path) == [tmp_path / "h200.md"]
    text = (tmp_path / "h200.md").read_text()
    for row in (
        "| GEMM-MN, G=128 | 1.4x | 1.65x | 2x | 2.00x | 1.98x | goal | 1.7e-03 | triton |  | feed from L2 |",
        "| other | 1 us | 2 us |  |  |  | not measured |  |  |  |  |",
        "| 1,250.0 | 2,500.0 (linear) | 2.00x | 600 | 1.7e-03 | yes | 1.0 | 1.0 | triton |",
        "| gather-scatter all | 12,500.0 | 10.0x | 16.0 | 16.0x |",
        "**triton 1,250.0**, torch 3,000.0 | it needs sm_90 |",
        "gemm_mn runs on triton: because;   not gluon: there is none | `tile_kernel` |",
    ):
        assert row in text
    assert "Left out when the time ended: T=1 G=128 density=0.5." in text
    assert "gpu NVIDIA H200, torch 2.11." in text


def test_the_records_of_the_repository_are_rendered(renderer: ModuleType, repository: Path) -> None:
    folder = repository / "reports/kernels"
    found = [path for path in sorted(folder.glob("*.json")) if "results" in json.loads(path.read_text())]
    assert found
    for path in found:
        page = renderer.page(path.stem, json.loads(path.read_text()), {}, "")
        assert page.count("\n| `") > 10

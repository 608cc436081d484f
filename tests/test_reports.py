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


def decode_document() -> dict[str, Any]:
    def row(what: str, us: float, **more: Any) -> dict[str, Any]:
        return {"what": what, "us": us, "min_us": us - 1, **more}

    point = {"batch": 1, "keys": 16384, "pairs": 8, "executed_pairs": 3, "bytes": 100, "calls": 1}
    readers = [row(f"read, loads, {each} x 4", us, form="read, loads") for each, us in ((132, 20.0), (264, 16.0))]
    cases = {"cases": 4, "wrong": 0, "largest_error": 0.002}
    checks = {"tolerance": 0.006, "calls_compared": 20, "graph_replays": 5}
    entry = {"name": "GEMM-MN, G=128", "must": 1.4, "goal": 1.65, "ideal": 2.0, "unit": "x", "level": "below"}
    return {
        "schema": "wide_kernels.decode/1",
        "environment": {"gpu": "NVIDIA H200", "date": "2026-11-30"},
        "made_by": "a script",
        "model": "llama-3.1-8b",
        "dtype": "bf16",
        "summary": [entry | {"reached": 1.5, "error": 0.002, "backend": "gluon"}],
        "times": [point | row("attention_decode, gluon", 20.0), point | row("dense, cudnn", 30.0)],
        "by_shape": [{"batch": 2, "keys": 1024, "calls": 16, "triton_us": 6.0, "gluon_us": 8.0}],
        "floor": {
            "keys": 16384,
            "calls": 16,
            "executed_heads": 4,
            "heads": 8,
            "bytes": 32_000_000,
            "rows": [
                row("empty launch", 4.0, us_in_graph=1.0),
                *readers,
                row("dense, cudnn", 32.0, us_in_graph=30.0),
            ],
        },
        "checks": checks | {"configurations": [{"configuration": "8 warps", "settings": {"num_warps": 8}, **cases}]},
    }


def test_a_page_of_decode_attention_holds_times_shapes_the_floor_and_checks(
    renderer: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "decode.json").write_text(json.dumps(decode_document()))
    (tmp_path / "notes.json").write_text(json.dumps({"decode": "Dense is a library's."}))
    assert renderer.render(tmp_path) == [tmp_path / "decode.md"]
    text = (tmp_path / "decode.md").read_text()
    for row in (
        "Made by a script.",
        "Dense is a library's.",
        "| us, speedup over dense | 1 x 16,384 keys, 3 of 8 heads, alone |",
        "| attention_decode, gluon | 20.00, 1.50x |",
        "| 2 x 1,024 | 16 | 6.00 | 8.00 | 0.75x |",
        "| empty launch | 1 | 4.00 |  |  | 1.00 |  |  |",
        "| read, loads, 264 x 4 | 2 | 16.00 | 2.00 | 2.00x |  |  |  |",
        "| dense, cudnn | 1 | 32.00 |  | 1.00x | 30.00 |  | 1.00x |",
        "| 8 warps | num_warps 8 | 4 | 0 | 2.0e-03 |",
    ):
        assert row in text
    assert "132 x 4" not in text  # the slower variant of a form


def test_the_floor_alone_is_a_page_too(renderer: ModuleType, tmp_path: Path) -> None:
    whole = decode_document()
    part = {key: whole[key] for key in ("schema", "environment", "model", "dtype", "floor")}
    (tmp_path / "floor.json").write_text(json.dumps(part))
    renderer.render(tmp_path)
    text = (tmp_path / "floor.md").read_text()
    assert text.count("## ") == 1 and "## Only reading the same bytes" in text


def test_a_later_record_takes_the_place_of_a_target_in_the_readme(renderer: ModuleType) -> None:
    first, later = document(), decode_document()
    other = first["summary"][0] | {"name": "decode", "reached": 1.3}
    first["summary"].append(other)
    assert "| GEMM-MN, G=128 | 2.00x | 1.7e-03 | triton |" in renderer.short(first)
    text = renderer.short(first, later)
    assert text.count("GEMM-MN") == 1
    assert "| GEMM-MN, G=128 | 1.50x | 2.0e-03 | gluon |\n| decode | 1.30x |" in text
    later["summary"][0]["reached"] = None  # it did not measure this one
    assert renderer.short(first, later) == renderer.short(first)


def test_the_readme_shows_what_the_records_hold(renderer: ModuleType, repository: Path) -> None:
    folder = repository / "reports/kernels"
    records = [json.loads((folder / f"{name}.json").read_text()) for name in ("h200", "h200_decode")]
    assert renderer.short(*records) in (repository / "docs/operators.md").read_text()
    pages = json.loads((folder / "limits.json").read_text()), json.loads((folder / "notes.json").read_text())
    made = renderer.decode_page("h200_decode", records[1], pages[0], pages[1]["h200_decode"])
    assert made == (folder / "h200_decode.md").read_text()


def test_the_records_of_the_repository_are_rendered(renderer: ModuleType, repository: Path) -> None:
    folder = repository / "reports/kernels"
    found = [path for path in sorted(folder.glob("*.json")) if "results" in json.loads(path.read_text())]
    assert found
    for path in found:
        page = renderer.page(path.stem, json.loads(path.read_text()), {}, "")
        assert page.count("\n| `") > 10

"""The benchmark without a GPU: its cases are right, its record is complete, its errors are sentences."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from wide_kernels import bench
from wide_kernels.benchmarks import cases, targets, timing
from wide_kernels.benchmarks.attention_cases import AttentionSizes, attention_case
from wide_kernels.benchmarks.measure import same_bits
from wide_kernels.benchmarks.shapes import MODELS, ModelShape, model_shape
from wide_kernels.benchmarks.whole_ffn import ffn_case
from wide_kernels.errors import UnsupportedError
from wide_kernels.gemm_k.configs import FEW_ROWS

TINY = model_shape("32x64")


@pytest.mark.parametrize("rows", [3, 140])
@pytest.mark.slow
def test_every_timed_case_is_right_and_so_are_its_baselines(rows: int, device: str) -> None:
    sizes = cases.Sizes(TINY, rows, 16, 0.5, torch.float16, device)
    found = [*cases.ffn_cases(sizes, set(bench.FFN_OPS), gather=True), ffn_case(sizes)]
    assert {case.op.split()[0] for case in found} == set(bench.FFN_OPS)
    assert all("deterministic" not in case.op for case in found) == (rows <= FEW_ROWS)
    for case in found:
        assert case.check() < 1e-3, case.name
        shape = case.routed()
        assert case.compare is not None
        assert {"triton", "torch"} == {*case.backends, *case.refused} - {"gluon"} or case.op == "ffn"
        for name, call in case.backends.items():
            assert case.compare(call()) < 1e-3, f"{case.name} {name}"
        for name, call in {**case.dense, **case.others}.items():
            result = call()
            if isinstance(shape, torch.Tensor) and isinstance(result, torch.Tensor):
                assert result.shape == shape.shape
                if name.startswith("gather-scatter"):
                    torch.testing.assert_close(result, shape, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("batch", "tokens", "density"), [(1, 40, 0.5), (2, 40, 1.0), (3, 1, 0.5)])
def test_every_timed_attention_is_right_and_so_is_its_baseline(
    batch: int, tokens: int, density: float, device: str
) -> None:
    shape = ModelShape("tiny", 64, 64, 4, 2, 16)
    case = attention_case(AttentionSizes(shape, batch, tokens, 40, density, torch.float16, device))
    assert case.check() < 1e-3
    routed = case.routed()
    for call in case.dense.values():
        dense = call()
        assert isinstance(dense, torch.Tensor) and isinstance(routed, torch.Tensor)
        executed = (routed != 0).any(-1)
        torch.testing.assert_close(routed[executed], dense[executed], rtol=2e-2, atol=2e-3)
    assert case.flops == pytest.approx(4 * 4 * 16 * batch * (820 if tokens > 1 else 40) * density, rel=0.6)


def test_a_record_holds_times_errors_memory_and_what_ran(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    def on_this_device(*arguments: object) -> cases.Sizes:
        return original(*arguments, device=device)  # type: ignore[arg-type]

    original = cases.Sizes
    monkeypatch.setattr(cases, "Sizes", on_this_device)
    monkeypatch.setattr(timing, "captured", lambda call: call)
    monkeypatch.setattr(timing, "peak_extra_bytes", lambda call: 1)
    monkeypatch.setattr(timing, "launched_kernels", lambda call: ["tile_kernel"])

    def times(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, timing.Times]:
        return {name: timing.Times(2.0 if name == "linear" else 1.0, 3.0, 0.5, rounds) for name in calls}

    monkeypatch.setattr(timing, "interleaved", times)
    arguments = argparse.Namespace(
        model="32x64",
        points=[(140, 16, 0.5), (3, 48, 0.5)],
        ops=["gemm_k"],
        dtype="fp16",
        rounds=4,
        gather=False,
        masks=None,
    )
    records = list(bench.measure(arguments, deadline=math.inf))
    assert [record["op"] for record in records] == ["gemm_k fp32", "gemm_k deterministic"]
    assert records[0]["speedup"] == 2.0
    assert records[0]["best_dense"] == "linear"
    assert records[0]["kernels"] == ["tile_kernel"]
    assert all(record["bitwise_repeatable"] for record in records)
    assert records[0]["checked_elements"] == 140 * 32
    backends = records[0]["backends"]
    assert isinstance(backends, dict)
    chosen = [name for name, entry in backends.items() if entry["chosen"]]
    assert chosen == [records[0]["backend"]]
    assert set(backends) >= {"torch"}
    assert bench.row(records[0]).split()[:4] == ["gemm_k", "fp32", "140", "16"]
    late = list(bench.measure(arguments, deadline=-math.inf))
    assert late == [{"left_out": "T=140 G=16 density=0.5"}]
    assert "left out" in bench.row(late[0])


def test_bits_are_compared_in_whatever_an_operator_returns() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 2**-20])
    assert same_bits((a, [a]), (a.clone(), [a.clone()]))
    assert not same_bits((a, [a]), (a, [b]))


def answer(op: str, us: float, speedup: float, **changes: object) -> dict[str, Any]:
    record = {"op": op, "rows": 16384, "group_size": 128, "density": 0.5, "model": "llama-3.1-8b", "masks": "random"}
    more = {"error": 1e-3, "backend": "triton", "best_dense": "linear", "bitwise_repeatable": True}
    return {**record, **more, "speedup": speedup, "routed": {"p50_ms": us / 1e3}, **changes}


def test_the_summary_holds_the_best_variant_against_must_and_goal() -> None:
    results = [
        {"left_out": "T=1"},
        answer("route_layout", 20, 5),
        answer("gemm_k fp32", 2000, 0.9),
        answer("gemm_k bf16", 1800, 1.2),
        answer("gemm_k bf16", 900, 9.0, density=0.25),
        answer("gemm_mn", 980, 1.7),
        answer("gated_mlp_up", 3000, 1.1),
    ]
    found = {entry["name"]: entry for entry in targets.summary(results)}
    assert (found["GEMM-K, G=128"]["reached"], found["GEMM-K, G=128"]["level"]) == (1.2, "must")
    assert found["GEMM-K, G=128"]["variants"] == {"gemm_k fp32": 0.9, "gemm_k bf16": 1.2}
    assert found["GEMM-MN, G=128"]["level"] == "goal"
    assert found["GEMM-MN, G=128"]["with_layout"] == pytest.approx(1.7 * 980 / 1000)
    assert found["fused gate/up/SwiGLU, G=128"]["level"] == "below"
    assert found["mask layout, 112 groups"]["level"] == "must"
    assert found["GEMM-K, G=512"]["level"] == "not measured"
    assert len(targets.lines(list(found.values()))) == 1 + len(targets.TARGETS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench"])
    assert bench.main() == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_shapes_have_names_or_are_written_by_hand() -> None:
    assert model_shape("Llama-3.1-8B") is MODELS["llama-3.1-8b"]
    assert (TINY.hidden_size, TINY.intermediate_size) == (32, 64)
    with pytest.raises(UnsupportedError, match="no model shape 'gpt'; name one of llama"):
        model_shape("gpt")


@pytest.mark.parametrize(
    ("kernel", "rows"), [("vector_mn", 1), ("norm_row", 1), ("few_rows_k", 16), ("gemm_mn", 16384)]
)
def test_a_kernel_is_tuned_for_the_rows_that_it_is_made_for_unless_told(kernel: str, rows: int) -> None:
    arguments = argparse.Namespace(tune=[kernel], points=[], model="smollm2-135m", dtype="bf16")
    ((name, sizes),) = bench.tuning_points(arguments)
    assert (name, sizes.rows, sizes.group, sizes.density) == (kernel, rows, 128, 0.5)
    arguments.points = [(3, 64, 0.25), (5, 64, 0.25)]
    assert [sizes.rows for _, sizes in bench.tuning_points(arguments)] == [3, 5]


def test_the_record_names_no_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setattr(sys, "argv", ["bench"])
    found = bench.environment()
    assert {"date", "torch", "triton", "gpu", "driver", "revision"} <= set(found)
    assert not any("host" in key or "user" in key for key in found)


def test_recorded_masks_are_read_and_described(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from wide_kernels.benchmarks.masks import read_masks, structure

    generator = torch.Generator().manual_seed(0)
    independent = torch.rand(4096, 10, generator=generator) < 0.5
    agreeing = independent[:, :1].expand(-1, 10).contiguous()
    save_file({"layer.0": independent, "layer.1": agreeing, "ids": torch.arange(4)}, tmp_path / "masks.safetensors")
    found = read_masks(tmp_path / "masks.safetensors")
    assert set(found) == {"layer.0", "layer.1"}
    assert torch.equal(found["layer.0"], independent)
    random, same = structure(found["layer.0"]), structure(found["layer.1"])
    assert random["union_natural"] == 1.0
    # 32 tiles tell 5 bits apart: a tile holds a pattern or two, which differ in one group.
    assert 0.5 < random["union_sorted"] < 0.65
    assert same["union_sorted"] == pytest.approx(0.5, abs=0.04)
    assert random["entropy"] == pytest.approx(1, abs=0.01)
    assert structure(torch.ones(200, 3, dtype=torch.bool))["constant"] == 1.0


def test_masks_of_attention_are_left_to_its_own_operators(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    masks = {"0.attention": torch.ones(8, 2, dtype=torch.bool), "0.ffn": torch.ones(8, 4, dtype=torch.bool)}
    save_file(masks, tmp_path / "m.safetensors")
    arguments = argparse.Namespace(model="32x64", dtype="fp16", masks=tmp_path / "m.safetensors", points=None)
    assert [(sizes.masks, sizes.point) for sizes in bench.points(arguments)] == [("0.ffn", (8, 16, 1.0))]


def test_a_file_that_holds_no_masks_is_refused(tmp_path: Path) -> None:
    from wide_kernels.benchmarks.masks import read_masks

    for content in (b"", b"not a file of tensors", (2).to_bytes(8, "little") + b"{}"):
        (tmp_path / "m.safetensors").write_bytes(content)
        with pytest.raises(UnsupportedError, match=r"m\.safetensors"):
            read_masks(tmp_path / "m.safetensors")

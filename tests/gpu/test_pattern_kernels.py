"""Tokens that follow patterns, on a GPU: right on awkward cases, repeatable, replayed as graphs, never a wild read."""

from __future__ import annotations

import pytest
import torch

import wide_kernels as wk
from wide_kernels.benchmarks.pattern_awkward import (
    LARGE_PATTERNS,
    SMALL_PATTERNS,
    PatternCase,
    pattern_errors,
    pattern_operands,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
BACKENDS = ("triton", "gluon")


def skip_without(backend: str) -> None:
    """Gluon needs Hopper."""
    if backend not in wk.available_backends()["gemm_mn"]:
        pytest.skip(f"{backend} does not run here")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", [*SMALL_PATTERNS, *LARGE_PATTERNS], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_agree_with_float64_and_only_what_is_executed_is_read(
    backend: str, case: PatternCase, dtype: torch.dtype
) -> None:
    skip_without(backend)
    found = list(pattern_errors(case, dtype, "cuda", backend))
    assert [f"{what}: {error:.2e}" for what, error, bound in found if not error <= bound] == []


@pytest.mark.parametrize("width", [16, 32, 48, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("rows", [129, 300, 3000])
def test_gluon_takes_every_width_and_ragged_rows(rows: int, width: int) -> None:
    skip_without("gluon")
    found = list(pattern_errors(PatternCase(rows, 320, 5, width, 7, "skewed"), torch.bfloat16, "cuda", "gluon"))
    assert len(found) == 11
    assert [f"{what}: {error:.2e}" for what, error, bound in found if not error <= bound] == []


@pytest.mark.parametrize("rows", [1, 48, 3000, 16384])
def test_a_captured_graph_follows_new_ids(rows: int) -> None:
    ids, patterns, x, gate, up, _ = pattern_operands(PatternCase(rows, 512, 64, 16, 64), torch.bfloat16, "cuda")
    x, gate, up = (torch.nan_to_num(tensor) for tensor in (x, gate, up))
    down = gate.t().contiguous()

    def ffn() -> torch.Tensor:
        return wk.gated_mlp(x, gate, up, down, wk.pattern_layout(ids, patterns), residual=x)

    ffn()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ffn()
    for power in (1, 6, 0.2):
        ids.copy_((torch.rand(rows, device="cuda") ** power * 64).int().clamp(max=63))
        graph.replay()
        got = y.clone()
        assert torch.equal(got, ffn())
        layout = wk.pattern_layout(ids, patterns, backend="torch")
        h = wk.gated_mlp_up(x.double(), gate.double(), up.double(), layout, backend="torch")
        expected = wk.gemm_k(h, down.double(), layout, residual=x.double(), backend="torch")
        assert float((got.double() - expected).norm()) <= 8e-3 * float(expected.norm())


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_ids_out_of_range_are_clamped(backend: str) -> None:
    _, patterns, *_ = pattern_operands(PatternCase(9, 16, 3, 16, 5), torch.bfloat16, "cuda")
    ids = torch.tensor([2**31 - 1, -(2**31), 4, 5, 0], dtype=torch.int32, device="cuda")
    layout = wk.pattern_layout(ids, patterns, backend=backend)
    assert layout.ids.tolist() == [4, 0, 4, 4, 0]
    assert layout.order.tolist() == [1, 4, 0, 2, 3]


@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_beyond_2_to_the_31_elements_are_addressed_right(backend: str) -> None:
    skip_without(backend)
    rows, columns, width = 135_000, 16_384, 128
    x = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(columns, 64, device="cuda", dtype=torch.bfloat16)
    down = torch.randn(64, columns, device="cuda", dtype=torch.bfloat16)
    patterns = torch.rand(16, columns // width, device="cuda") < 0.5
    ids = torch.randint(16, (rows,), device="cuda", dtype=torch.int32)
    layout = wk.pattern_layout(ids, patterns)
    y = wk.gemm_mn(x, weight, layout, backend=backend)
    assert y.numel() > 2**31
    mask = patterns[ids[-100:].long()]
    last = wk.gemm_mn(x[-100:], weight, mask=mask, backend="torch")
    torch.testing.assert_close(y[-100:], last, rtol=2e-2, atol=2e-2)
    z = wk.gemm_k(y, down, layout, backend=backend)
    last = wk.gemm_k(y[-100:], down, mask=mask, backend="torch")
    torch.testing.assert_close(z[-100:], last, rtol=2e-2, atol=2.0)  # sums of 8192 products of size 64


def test_attention_takes_patterns_of_heads() -> None:
    q, k = (torch.randn(2, 500, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2))
    patterns = torch.rand(6, 4, device="cuda") < 0.5
    layout = wk.pattern_layout(torch.randint(6, (1000,), device="cuda", dtype=torch.int32), patterns)
    expected = wk.attention_prefill(q, k, k, wk.route_layout(layout.mask))
    assert torch.equal(wk.attention_prefill(q, k, k, layout), expected)

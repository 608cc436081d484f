"""GEMM-K's kernel for Hopper: right on awkward cases with NaN wherever nothing may be read, replayed as a graph."""

from __future__ import annotations

import pytest
import torch

import wide_kernels as wk
from wide_kernels.benchmarks.awkward import (
    BF16_ACCUMULATION,
    Case,
    operands,
    poison_free_memory,
    relative_error,
)
from wide_kernels.gemm_k.reference import gemm_k_reference
from wide_kernels.tuning.table import force

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
CASES = (
    Case(165, 48, 4, 64, "one"),
    Case(129, 16, 1, 64, "all"),
    Case(150, 32, 3, 64, "none"),
    Case(1000, 576, 24, 64, "half"),
    Case(3000, 1040, 9, 192, "correlated"),
    Case(16385, 512, 16, 128, "half"),
    Case(4097, 1024, 28, 512, "half"),
)


@pytest.mark.parametrize("config", [{}, {"STAGES": 3, "BUFFERS": 2}, {"BN": 128, "STAGES": 2}], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_agrees_with_float64_and_reads_only_what_is_executed(case: Case, config: dict[str, int]) -> None:
    mask, _, weight, _, h = operands(case, torch.bfloat16, "cuda")
    down = weight.t().contiguous()
    residual = torch.linspace(-1, 1, case.rows * case.other, device="cuda").view(case.rows, case.other).bfloat16()
    layout = wk.route_layout(mask)
    for added in (None, residual):
        poison_free_memory(case.rows * case.other, torch.bfloat16, "cuda")
        with force("hopper_k", config):
            y = wk.gemm_k(h, down, layout, added, accumulate="bf16", backend="gluon")
        clean = (torch.nan_to_num(h.double()), torch.nan_to_num(down.double()))
        expected = gemm_k_reference(*clean, mask, None if added is None else added.double())
        assert relative_error(y, expected) <= BF16_ACCUMULATION


def test_auto_takes_it_and_a_captured_graph_follows_new_masks() -> None:
    mask, _, weight, _, h = operands(Case(4096, 512, 16, 64, "half"), torch.bfloat16, "cuda")
    h, down = torch.nan_to_num(h), torch.nan_to_num(weight).t().contiguous()
    assert wk.explain("gemm_k", h, down, mask=mask).backend == "gluon"
    wk.gemm_k(h, down, mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = wk.gemm_k(h, down, mask=mask)
    for density in (0.0, 0.3, 1.0):
        mask.copy_(torch.rand(mask.shape, device="cuda") < density)
        graph.replay()
        expected = gemm_k_reference(h.double(), down.double(), mask, None)
        assert float((y.double() - expected).norm()) <= BF16_ACCUMULATION * float(expected.norm())

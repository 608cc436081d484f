"""Every operator of the Triton backend against float64, with NaN wherever nothing may be read."""

from __future__ import annotations

import pytest
import torch

from wide_kernels.benchmarks.awkward import SMALL, Case, errors

FAST = {(0, torch.float16), (1, torch.float32), (3, torch.float16), (4, torch.float32), (6, torch.float16)}
CASES = [
    pytest.param(case, dtype, id=f"{case} {dtype}", marks=[] if (i, dtype) in FAST else [pytest.mark.slow])
    for i, case in enumerate(SMALL)
    for dtype in (torch.float32, torch.float16)
]


@pytest.mark.parametrize(("case", "dtype"), CASES)
def test_triton_agrees_with_float64_and_reads_only_what_is_executed(
    case: Case, dtype: torch.dtype, device: str
) -> None:
    wrong = [
        f"{what}: {error:.2e}" for what, error, bound in errors(case, dtype, device, "triton") if not error <= bound
    ]
    assert wrong == []


def test_the_cases_notice_a_wrong_result(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    from wide_kernels.gemm_k import launch

    honest = launch.gemm_k_reference
    monkeypatch.setattr(
        launch, "gemm_k_reference", lambda h, weight, mask, residual: honest(h, weight, ~mask, residual)
    )
    case = Case(7, 32, 3, 16, "half")
    found = {what: error for what, error, _ in errors(case, torch.float32, device, "torch")}
    assert found["gemm_k fp32"] > 0.1

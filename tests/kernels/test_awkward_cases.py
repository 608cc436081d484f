"""Every operator of the Triton backend against float64, with NaN wherever nothing may be read."""

from __future__ import annotations

import pytest
import torch

from wide_kernels.benchmarks import attention_awkward
from wide_kernels.benchmarks.attention_awkward import SMALL_ATTENTION, AttentionCase, attention_errors
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


ATTENTION_CASES = [
    pytest.param(
        case, dtype, id=f"{case} {dtype}", marks=[] if (i % 2 == 0) == (dtype is torch.float16) else [pytest.mark.slow]
    )
    for i, case in enumerate(SMALL_ATTENTION)
    for dtype in (torch.float32, torch.float16)
]


@pytest.mark.parametrize(("case", "dtype"), ATTENTION_CASES)
def test_attention_agrees_with_float64_and_reads_only_what_is_seen(
    case: AttentionCase, dtype: torch.dtype, device: str
) -> None:
    found = list(attention_errors(case, dtype, device, "triton"))
    assert len(found) >= 2
    assert [f"{what}: {error:.2e}" for what, error, bound in found if not error <= bound] == []


def test_the_attention_cases_notice_a_key_too_many(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    honest = attention_awkward.attention_decode_reference
    monkeypatch.setattr(
        attention_awkward,
        "attention_decode_reference",
        lambda q, k, v, mask, end, *rest: honest(q, k, v, mask, end - 1, *rest),
    )
    case = AttentionCase(1, 1, 9, 4, 2, 16, 2, "all")
    found = {what: error for what, error, _ in attention_errors(case, torch.float32, device, "triton")}
    assert found["attention_decode triton"] > 0.01
    assert found["attention_prefill triton"] < 1e-5

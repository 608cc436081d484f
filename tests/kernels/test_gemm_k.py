"""GEMM-K: the sort behind it, the ways partial sums meet, what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import wide_kernels as wk
from wide_kernels import dispatch
from wide_kernels.gemm_k import launch
from wide_kernels.gemm_k.configs import MANY_ROWS
from wide_kernels.tuning.table import force

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def example(rows: int, groups: int, columns: int = 48) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(h [rows, 16 groups], weight, residual, mask), float32."""
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, 16 * groups), (columns, 16 * groups), (rows, columns))
    h, weight, residual = (torch.randn(*shape, generator=generator).to(DEVICE) for shape in shapes)
    return h, weight, residual, (torch.rand(rows, groups, generator=generator) < 0.5).to(DEVICE)


def test_torch_multiplies_only_what_each_token_executes() -> None:
    h, weight, residual, mask = example(9, 3)
    y = residual.clone()
    for t, g in mask.nonzero().tolist():
        part = slice(16 * g, 16 * g + 16)
        y[t] += weight[:, part] @ h[t, part]
    layout = wk.route_layout(mask, backend="torch")
    torch.testing.assert_close(wk.gemm_k(h, weight, layout, residual, backend="torch"), y)
    h.view(9, 3, 16)[~mask] = float("nan")
    torch.testing.assert_close(wk.gemm_k(h, weight, layout, residual, backend="torch"), y)


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 400), groups=st.integers(1, 12), length=st.integers(1, 8), seed=st.integers(0, 99))
@pytest.mark.slow
def test_rows_of_a_segment_are_sorted_so_that_neighbours_differ_in_few_groups(
    rows: int, groups: int, length: int, seed: int
) -> None:
    from wide_kernels.gemm_k.sorting import sort_patterns

    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, groups, generator=generator) < 0.5).to(DEVICE)
    found = sort_patterns(mask, length)
    assert found.segments == -(-groups // length)
    gray = [i ^ (i >> 1) for i in range(1 << length)]
    for segment in range(found.segments):
        part = mask[:, segment * length : (segment + 1) * length].long()
        pattern = (part << torch.arange(part.shape[1], device=DEVICE)).sum(1)
        ranks = torch.tensor([gray.index(value) for value in pattern.tolist()])
        expected = torch.sort(ranks, stable=True).indices
        assert found.order[segment].tolist() == expected.tolist()
        assert found.patterns[segment].tolist() == pattern.cpu()[expected].tolist()
        halves = [0] * (2 * -(-rows // 128))
        for place, bits in enumerate(pattern.cpu()[expected].tolist()):
            halves[place // 64] |= bits
        assert found.needed[segment].flatten().tolist() == halves


@pytest.mark.parametrize(
    ("rows", "groups", "length"), [(1, 1, 1), (300, 112, 1), (16384, 112, 7), (16384, 24, 6), (9**6, 40, 8)]
)
def test_a_segment_has_a_bit_for_each_doubling_of_the_tiles(rows: int, groups: int, length: int) -> None:
    from wide_kernels.gemm_k.segments import segment_length

    assert segment_length(rows, groups) == length


@pytest.mark.parametrize("deterministic", [False, True])
def test_segments_of_several_groups_sum_up(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from wide_kernels.gemm_k import triton

    monkeypatch.setattr(triton, "FEW_FIXED_ROWS", 0)
    h, weight, residual, mask = example(140, 7)
    layout = wk.route_layout(mask)
    expected = wk.gemm_k(h, weight, layout, residual, backend="torch")
    h.view(140, 7, 16)[~mask] = float("nan")
    with force("gemm_k_order", {"S": 3}):
        y = wk.gemm_k(h, weight, layout, residual, deterministic=deterministic, backend="triton")
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 2])
def test_more_rows_than_a_tile_in_a_fixed_order(splits: int) -> None:
    h, weight, residual, mask = example(140, 3)
    mask[128:, 0] = False
    expected = wk.gemm_k(h, weight, mask=mask, residual=residual, backend="torch")
    h.view(140, 3, 16)[~mask] = float("nan")
    with force("few_rows_k", {"SPLITS": splits, "BN": 32}):
        y = wk.gemm_k(h, weight, mask=mask, residual=residual, deterministic=True, backend="triton")
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def test_slabs_of_the_output_leave_no_column_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from wide_kernels.gemm_k import configs

    monkeypatch.setattr(configs, "SLAB_BYTES", 140 * 4 * 32)  # two column tiles of 16
    h, weight, residual, mask = example(140, 2, columns=80)
    with force("gemm_k", {"BN": 16}):
        y = wk.gemm_k(h, weight, wk.route_layout(mask), residual, backend="triton")
    torch.testing.assert_close(
        y, wk.gemm_k(h, weight, mask=mask, residual=residual, backend="torch"), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("splits", [1, 3])
def test_a_few_rows_split_over_k_give_the_same_sum_every_time(splits: int) -> None:
    from wide_kernels.counters import counters

    h, weight, residual, mask = example(5, 9, columns=80)
    expected = wk.gemm_k(h, weight, mask=mask, residual=residual, backend="torch")
    h.view(5, 9, 16)[~mask] = float("nan")
    weight.view(80, 9, 16)[:, ~mask.any(0)] = float("nan")
    with force("few_rows_k", {"SPLITS": splits}):
        first, second = (wk.gemm_k(h, weight, mask=mask, residual=residual, backend="triton") for _ in range(2))
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(first, second)
    assert not counters(
        "last to arrive", h.device, 2
    ).any()  # a graph that replays the launch finds them as it left them


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("listed", [0, 1])
@pytest.mark.parametrize(("groups", "width"), [(28, 16), (6, 64), (3, 128), (4, 48)])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_one_row_reads_what_runs_and_nothing_else(
    groups: int, width: int, share: float, listed: int, early: bool
) -> None:
    h, weight, residual, _ = example(1, groups * width // 16, columns=16)
    mask = (torch.rand(1, groups, generator=torch.Generator().manual_seed(5)) < share).to(DEVICE)
    expected = wk.gemm_k(h, weight, mask=mask, residual=residual, backend="torch")
    h.view(1, groups, width)[~mask] = float("nan")
    weight.view(16, groups, width)[:, ~mask[0]] = float("nan")
    with force("vector_k", {"BC": 16, "LISTED": listed}):  # 128 values a step
        y = wk.gemm_k(h, weight, mask=mask, residual=residual, early=early, backend="triton")
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunks", [16, 64])
def test_one_row_walks_over_k_in_steps_that_need_not_divide_it(chunks: int) -> None:
    h, weight, residual, mask = example(1, 27, columns=16)
    expected = wk.gemm_k(h, weight, mask=mask, residual=residual, backend="torch")
    h.view(1, 27, 16)[~mask] = float("nan")
    weight.view(16, 27, 16)[:, ~mask.any(0)] = float("nan")
    with force("vector_k", {"BC": chunks, "BN": 4}):
        y = wk.gemm_k(h, weight, mask=mask, residual=residual, backend="triton")
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_rows_give_no_rows(backend: str) -> None:
    h, weight, residual, mask = example(3, 2)
    assert wk.gemm_k(h[:0], weight, mask=mask[:0], residual=residual[:0], backend=backend).shape == (0, 48)


def test_auto_adds_in_bf16_only_for_many_bf16_rows_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    many, few = torch.empty(MANY_ROWS, 16, dtype=torch.bfloat16), torch.empty(MANY_ROWS - 1, 16, dtype=torch.bfloat16)
    assert launch.partial_sums(many, "auto", False) == "fp32"
    monkeypatch.setattr(launch, "is_hopper", lambda device: True)
    assert launch.partial_sums(many, "auto", False) == "bf16"
    assert launch.partial_sums(many, "fp32", False) == "fp32"
    assert launch.partial_sums(many, "auto", True) == "fp32"
    assert launch.partial_sums(many.half(), "auto", False) == "fp32"
    assert launch.partial_sums(few, "auto", False) == "fp32"


@pytest.mark.parametrize(
    ("rows", "dtype", "groups", "accumulate", "complaint"),
    [
        (300, torch.bfloat16, 2, "bf16", None),
        (300, torch.float16, 2, "fp32", "it takes bfloat16, not torch.float16"),
        (128, torch.bfloat16, 2, "bf16", "more than 128 rows, got 128"),
        (300, torch.bfloat16, 2, "fp32", "adds partial sums in bf16, here accumulate is fp32"),
        (300, torch.bfloat16, 4, "bf16", "must be a multiple of 64, got 32"),
    ],
)
def test_what_the_hopper_kernel_does_not_take_is_named(
    rows: int, dtype: torch.dtype, groups: int, accumulate: str, complaint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_capability", lambda index: (9, 0))
    monkeypatch.setattr(dispatch, "TRITON_VERSION", (3, 6))
    h, weight = torch.empty(rows, 128, dtype=dtype), torch.empty(48, 128, dtype=dtype)
    problem = launch.gemm_k_problem(h, weight, accumulate=accumulate, mask=torch.ones(rows, groups, dtype=torch.bool))
    refusal = dispatch._REFUSALS["gluon"](replace(problem, device=torch.device("cuda", 0)))
    assert refusal is None if complaint is None else complaint in str(refusal)


H, WEIGHT, RESIDUAL, MASK = (tensor.cpu() for tensor in example(3, 2))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"accumulate": "fp8"}, "one of auto, fp32, bf16, got 'fp8'"),
        ({"accumulate": "bf16"}, "needs bfloat16 operands, got torch.float32"),
        ({"early": "no"}, "gemm_k: early must be True or False, got 'no'"),
        ({"deterministic": 1}, "gemm_k: deterministic must be True or False, got 1"),
        ({"residual": RESIDUAL[:2]}, "T of residual must be 3, got 2"),
        ({"residual": RESIDUAL.half()}, "residual is torch.float16"),
        ({"mask": MASK[:, :0]}, "no groups"),
        ({"weight": WEIGHT[:, :16]}, "K of weight must be 32, got 16"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(wk.UnsupportedError, match=complaint):
        wk.gemm_k(**({"h": H, "weight": WEIGHT, "mask": MASK} | arguments))

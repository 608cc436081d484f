"""GEMM-MN and its gated form: what they refuse, and the plain torch form against a loop over groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import wide_kernels as wk


def example(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(x [9, 32], gate weight and up weight [48, 32], bias [48], mask [9, 3])."""
    generator = torch.Generator().manual_seed(1)
    x, gate, up, bias = (
        torch.randn(*shape, generator=generator, dtype=dtype) for shape in ((9, 32), (48, 32), (48, 32), (48,))
    )
    return x, gate, up, bias, torch.rand(9, 3, generator=generator) < 0.5


def token_by_token(x: Tensor, weight: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
    y = torch.zeros(x.shape[0], weight.shape[0], dtype=x.dtype)
    width = weight.shape[0] // mask.shape[1]
    for t, g in mask.nonzero().tolist():
        part = slice(g * width, (g + 1) * width)
        y[t, part] = weight[part] @ x[t] + (0 if bias is None else bias[part])
    return y


def test_torch_multiplies_only_what_each_token_executes() -> None:
    x, gate, up, bias, mask = example()
    layout = wk.route_layout(mask, backend="torch")
    y = wk.gemm_mn(x, gate, layout, bias, backend="torch")
    torch.testing.assert_close(y, token_by_token(x, gate, mask, bias))
    assert not y.view(9, 3, 16)[~mask].any()
    y = wk.gated_mlp_up(x, gate, up, layout, backend="torch")
    torch.testing.assert_close(y, F.silu(token_by_token(x, gate, mask)) * token_by_token(x, up, mask))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_triton_fuses_the_same_activation(activation: str, device: str) -> None:
    x, gate, up, bias, mask = (tensor.to(device) for tensor in example())
    layout = wk.route_layout(mask)
    x32, gate32, up32, bias32 = (tensor.float() for tensor in (x, gate, up, bias))
    expected = wk.gemm_mn(x, gate, layout, bias, activation, backend="torch")
    got = wk.gemm_mn(x32, gate32, None, bias32, activation, mask=mask, backend="triton")
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    expected = wk.gated_mlp_up(x, gate, up, layout, activation, backend="torch")
    got = wk.gated_mlp_up(x32, gate32, up32, layout, activation, backend="triton")
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_rows_give_no_rows(backend: str, device: str) -> None:
    x, gate, up, _, mask = (tensor.to(device) for tensor in example(torch.float32))
    layout = wk.route_layout(mask[:0], backend=backend)
    assert wk.gemm_mn(x[:0], gate, layout, backend=backend).shape == (0, 48)
    assert wk.gated_mlp_up(x[:0], gate, up, layout, backend=backend).shape == (0, 48)


def test_rows_of_a_wider_tensor_need_no_copy_by_the_caller(device: str) -> None:
    x, gate, _, _, mask = (tensor.to(device) for tensor in example(torch.float32))
    wider = torch.full((9, 64), float("nan"), device=device)
    wider[:, :32] = x
    layout = wk.route_layout(mask)
    got = wk.gemm_mn(wider[:, :32], gate, layout, backend="triton")
    torch.testing.assert_close(got, wk.gemm_mn(x, gate, layout, backend="torch"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 140])
@pytest.mark.parametrize("always", [1, 3])
def test_groups_behind_the_mask_run_always(always: int, rows: int, early: bool, device: str) -> None:
    x, gate, up, bias, mask = (tensor.to(device) for tensor in example(torch.float32))
    x, mask = x[:1].repeat(rows, 1), mask[:1, : 3 - always].repeat(rows, 1)
    whole = torch.cat((mask, torch.ones(rows, always, dtype=torch.bool, device=device)), 1)
    given = {"mask": mask, "always": always, "early": early}
    for backend in ("torch", "triton"):
        found = wk.gemm_mn(x, gate, bias=bias, backend=backend, **given)
        expected = wk.gemm_mn(x, gate, bias=bias, mask=whole, backend="torch")
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        found = wk.gated_mlp_up(x, gate, up, backend=backend, **given)
        torch.testing.assert_close(
            found, wk.gated_mlp_up(x, gate, up, mask=whole, backend="torch"), rtol=1e-5, atol=1e-5
        )


def test_gradients_reach_the_groups_behind_the_mask() -> None:
    x, gate, _, _, mask = example(torch.float32)
    found, expected = gate.clone().requires_grad_(), gate.clone().requires_grad_()
    wk.gemm_mn(x, found, mask=mask[:, :2], always=1, backend="torch").sum().backward()
    whole = torch.cat((mask[:, :2], torch.ones(len(mask), 1, dtype=torch.bool)), 1)
    wk.gemm_mn(x, expected, mask=whole, backend="torch").sum().backward()
    assert found.grad is not None and expected.grad is not None and torch.equal(found.grad, expected.grad)


def bad_calls() -> list[Any]:
    x, gate, up, bias, mask = example(torch.float32)
    layout = wk.route_layout(mask, backend="torch")
    return [
        pytest.param(lambda: wk.gemm_mn(x, gate), "give either a layout or mask=, one of them", id="neither"),
        pytest.param(lambda: wk.gemm_mn(x, gate, layout, mask=mask), "not both", id="both"),
        pytest.param(lambda: wk.gemm_mn(x, gate, layout, always=1), "always=1 goes with mask=", id="always, layout"),
        pytest.param(lambda: wk.gemm_mn(x, gate, mask=mask, always=-1), "mask=, got -1", id="always below 0"),
        pytest.param(lambda: wk.gemm_mn(x, gate, mask=mask, always=1.0), "mask=, got 1.0", id="always no integer"),
        pytest.param(lambda: wk.gemm_mn(x, gate, mask=mask, always=2), "5 groups do not divide N = 48", id="always"),
        pytest.param(lambda: wk.gemm_mn(x, gate, mask=mask[:, :0]), "the mask has no groups", id="no groups"),
        pytest.param(lambda: wk.gemm_mn(x, gate, mask=mask.float()), "mask must be bool", id="float mask"),
        pytest.param(lambda: wk.gemm_mn(x, gate, mask=mask[:4]), "number of rows must be 9, got 4", id="rows"),
        pytest.param(lambda: wk.gemm_mn(x, gate[:47], mask=mask), "3 groups do not divide N = 47", id="groups"),
        pytest.param(lambda: wk.gemm_mn(x, gate[:, :16], layout), "K of weight must be 32, got 16", id="depth"),
        pytest.param(lambda: wk.gemm_mn(x[None], gate, layout), r"x must be \[T, K\], got 3 dim", id="dims"),
        pytest.param(lambda: wk.gemm_mn(x, gate.half(), layout), "weight is torch.float16, the first", id="dtypes"),
        pytest.param(lambda: wk.gemm_mn(x.int(), gate.int(), layout), "must be floating point", id="integers"),
        pytest.param(lambda: wk.gemm_mn(x, gate, layout, bias[:3]), "size of bias must be 48, got 3", id="bias"),
        pytest.param(lambda: wk.gemm_mn(x, gate, layout, None, "tanh"), "one of silu, gelu", id="activation"),
        pytest.param(lambda: wk.gemm_mn(x, gate, layout, early="no"), "gemm_mn: early must be True or", id="early"),
        pytest.param(lambda: wk.gated_mlp_up(x, gate, up, layout, early=1), "True or False, got 1", id="early up"),
        pytest.param(lambda: wk.gemm_mn(x, gate.to("meta"), layout), "weight is on meta", id="devices"),
        pytest.param(lambda: wk.gemm_mn(x, gate, mask), "must be a RouteLayout, got Tensor", id="layout type"),
        pytest.param(lambda: wk.gated_mlp_up(x, gate, up[:32], layout), "D' of w_up must be 48", id="up"),
        pytest.param(
            lambda: wk.gemm_mn(x, gate.t().contiguous().t(), layout, backend="triton"),
            "weight must be contiguous",
            id="transposed weight",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the example lies on the CPU"),
        ),
    ]


@pytest.mark.parametrize(("call", "complaint"), bad_calls())
def test_what_does_not_fit_is_refused_by_name(call: Any, complaint: str) -> None:
    with pytest.raises(wk.UnsupportedError, match=complaint):
        call()


def test_gluon_refuses_few_rows_and_a_ragged_depth() -> None:
    from wide_kernels.gemm_mn.launch import gated_mlp_up_problem, gemm_mn_problem

    def refused(rows: int, depth: int) -> list[str | None]:
        x, weight, mask = torch.ones(rows, depth), torch.ones(32, depth), torch.ones(rows, 2, dtype=torch.bool)
        plain = gemm_mn_problem(x, weight, mask=mask)
        return [plain.refused.get("gluon"), gated_mlp_up_problem(x, weight, weight, mask=mask).refused.get("gluon")]

    assert refused(129, 64) == [None, None]
    assert refused(128, 64) == ["it needs more than 128 rows"] * 2
    assert refused(129, 80) == ["K must be a multiple of 64, got 80"] * 2

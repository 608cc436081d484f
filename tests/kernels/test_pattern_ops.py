"""Operators on tokens that follow patterns: awkward cases, equality with masks, gradients, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import wide_kernels as wk
from wide_kernels import dispatch
from wide_kernels.benchmarks.pattern_awkward import SMALL_PATTERNS, PatternCase, pattern_errors, pattern_operands
from wide_kernels.tuning.table import force


@pytest.mark.parametrize("case", SMALL_PATTERNS, ids=str)
def test_results_agree_with_float64_and_only_what_is_executed_is_read(case: PatternCase, device: str) -> None:
    found = list(pattern_errors(case, torch.float16, device, "triton"))
    assert len(found) == 11
    assert [f"{what}: {error:.2e}" for what, error, bound in found if not error <= bound] == []


def test_tiles_and_steps_need_not_divide_a_group(device: str) -> None:
    with force("pattern_k", {"BK": 32, "BAND": 1, "BN": 32}), force("pattern_mn", {"BN": 32, "BAND": 1}):
        found = list(pattern_errors(PatternCase(140, 48, 3, 48, 3), torch.float32, device, "triton"))
    assert [what for what, error, bound in found if not error <= bound] == []


def operands(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """T = 9, three patterns of 2 groups x 16 channels, the other side 16."""
    generator = torch.Generator().manual_seed(5)
    shapes = {"x": (9, 16), "gate": (32, 16), "up": (32, 16), "bias": (32,), "h": (9, 32)}
    shapes |= {"down": (16, 32), "residual": (9, 16)}
    found = {name: torch.randn(*shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}
    found["patterns"] = torch.tensor([[True, False], [False, False], [True, True]])
    found["ids"] = torch.randint(3, (9,), generator=generator, dtype=torch.int32)
    return found


def layout_of(e: dict[str, Tensor], backend: str = "torch") -> wk.PatternLayout:
    return wk.pattern_layout(e["ids"], e["patterns"], backend=backend)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_rows_give_no_rows(backend: str, device: str) -> None:
    e = {name: tensor.to(device) for name, tensor in operands().items()}
    layout = wk.pattern_layout(e["ids"][:0], e["patterns"], backend=backend)
    assert wk.gemm_mn(e["x"][:0], e["gate"], layout, backend=backend).shape == (0, 32)
    assert wk.gated_mlp_up(e["x"][:0], e["gate"], e["up"], layout, backend=backend).shape == (0, 32)
    assert wk.gemm_k(e["h"][:0], e["down"], layout, e["residual"][:0], backend=backend).shape == (0, 16)
    assert wk.gated_mlp(e["x"][:0], e["gate"], e["up"], e["down"], layout, backend=backend).shape == (0, 16)


def test_results_are_those_of_the_mask() -> None:
    e, mask = operands(), operands()["patterns"][operands()["ids"].long()]
    layout = layout_of(e)
    assert torch.equal(
        wk.gemm_mn(e["x"], e["gate"], layout, e["bias"], "relu", backend="torch"),
        wk.gemm_mn(e["x"], e["gate"], None, e["bias"], "relu", mask=mask, backend="torch"),
    )
    assert torch.equal(
        wk.gated_mlp_up(e["x"], e["gate"], e["up"], layout, backend="torch"),
        wk.gated_mlp_up(e["x"], e["gate"], e["up"], mask=mask, backend="torch"),
    )
    assert torch.equal(
        wk.gemm_k(e["h"], e["down"], layout, e["residual"], backend="torch"),
        wk.gemm_k(e["h"], e["down"], mask=mask, residual=e["residual"], backend="torch"),
    )


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_attention_takes_patterns_of_heads(backend: str, device: str) -> None:
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(2, 5, heads, 16, generator=generator).to(device) for heads in (4, 2))
    patterns = torch.tensor([[True, False], [True, True], [False, False]], device=device)
    ids = torch.randint(3, (10,), generator=generator, dtype=torch.int32).to(device)
    layout = wk.pattern_layout(ids, patterns, backend=backend)
    expected = wk.attention_prefill(q, k, k, wk.route_layout(patterns[ids.long()], backend="torch"), backend="torch")
    assert wk.explain("attention_prefill", q, k, k, layout, backend=backend).backend == backend
    torch.testing.assert_close(wk.attention_prefill(q, k, k, layout, backend=backend), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", ["gemm_mn", "gated_mlp_up", "gemm_k", "gated_mlp"])
def test_the_registration_is_sound(op: str) -> None:
    e = {name: tensor.requires_grad_(tensor.is_floating_point()) for name, tensor in operands().items()}
    layout = layout_of(e).tensors
    assert all(callable(getattr(wk, name)) for name in wk.__all__)  # loading a name registers its operator
    ops = torch.ops.wide_kernels
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "gemm_mn": (ops.gemm_mn_patterns, (e["x"], e["gate"], *layout, e["bias"], "silu", "torch")),
        "gated_mlp_up": (ops.gated_mlp_up_patterns, (e["x"], e["gate"], e["up"], *layout, "silu", "torch")),
        "gemm_k": (ops.gemm_k_patterns, (e["h"], e["down"], *layout, e["residual"], "torch")),
        "gated_mlp": (
            ops.gated_mlp_patterns,
            (e["x"], e["gate"], e["up"], e["down"], *layout, e["residual"], "silu", "torch"),
        ),
    }
    function, arguments = calls[op]
    torch.library.opcheck(function.default, arguments)


@pytest.mark.parametrize("rows", [0, 200])
def test_the_layout_is_registered_soundly(rows: int) -> None:
    e = operands()
    ids = torch.zeros(rows, dtype=torch.int32)
    assert callable(wk.pattern_layout)
    torch.library.opcheck(torch.ops.wide_kernels.pattern_layout.default, (ids, e["patterns"], "torch"))


@pytest.mark.parametrize("activation", [None, "silu"])
def test_gradients_agree_with_finite_differences(activation: str | None) -> None:
    e = operands(torch.float64)
    layout = layout_of(e)

    def ffn(*given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, gate, up, bias, h, down, residual = given
        return (
            wk.gemm_mn(x, gate, layout, bias, activation, backend="torch"),
            wk.gated_mlp_up(x, gate, up, layout, backend="torch"),
            wk.gemm_k(h, down, layout, residual, backend="torch"),
        )

    names = ("x", "gate", "up", "bias", "h", "down", "residual")
    assert torch.autograd.gradcheck(ffn, [e[name].requires_grad_() for name in names], fast_mode=True)


def test_a_whole_ffn_compiles_without_a_break() -> None:
    e = operands()
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(200, 16, generator=generator)
    ids = torch.randint(3, (200,), generator=generator, dtype=torch.int32)

    def ffn(x: Tensor, ids: Tensor) -> Tensor:
        layout = wk.pattern_layout(ids, e["patterns"], backend="torch")
        h = wk.gated_mlp_up(x, e["gate"], e["up"], layout, backend="torch")
        return wk.gemm_k(h, e["down"], layout, residual=x, backend="torch")

    compiled = torch.compile(ffn, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, ids), ffn(x, ids))


@pytest.mark.parametrize(
    ("rows", "depth", "dtype", "op", "complaint"),
    [
        (300, 128, torch.bfloat16, "gemm_mn", None),
        (300, 128, torch.bfloat16, "gemm_k", None),
        (300, 128, torch.float32, "gemm_k", "it takes float16, bfloat16, not float32"),
        (128, 128, torch.bfloat16, "gemm_mn", "more than 128 rows"),
        (128, 128, torch.bfloat16, "gemm_k", "more than 128 rows, got 128"),
        (300, 80, torch.bfloat16, "gemm_mn", "K must be a multiple of 64, got 80"),
    ],
)
def test_what_the_hopper_kernels_do_not_take_is_named(
    rows: int, depth: int, dtype: torch.dtype, op: str, complaint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_capability", lambda index: (9, 0))
    monkeypatch.setattr(dispatch, "TRITON_VERSION", (3, 6))
    layout = wk.pattern_layout(torch.zeros(rows, dtype=torch.int32), torch.ones(2, 3, dtype=torch.bool))
    from wide_kernels.gemm_k.launch import gemm_k_problem
    from wide_kernels.gemm_mn.launch import gemm_mn_problem

    up, down = torch.empty(48, depth, dtype=dtype), torch.empty(depth, 48, dtype=dtype)
    if op == "gemm_mn":
        problem = gemm_mn_problem(torch.empty(rows, depth, dtype=dtype), up, layout)
    else:
        problem = gemm_k_problem(torch.empty(rows, 48, dtype=dtype), down, layout)
    refusal = dispatch._REFUSALS["gluon"](replace(problem, device=torch.device("cuda", 0)))
    assert refusal is None if complaint is None else complaint in str(refusal)


def bad_calls() -> list[Any]:
    e = operands()
    layout, mask = layout_of(e), torch.ones(9, 2, dtype=torch.bool)
    x, h, gate, down = e["x"], e["h"], e["gate"], e["down"]
    three = wk.pattern_layout(e["ids"], torch.ones(3, 3, dtype=torch.bool), backend="torch")
    meta = replace(layout, ids=layout.ids.to("meta"))
    half = h.bfloat16(), down.bfloat16()
    wrong: Any = (e["ids"], e["patterns"])
    return [
        pytest.param(lambda: wk.gemm_mn(x, gate, layout, mask=mask), "not both", id="both"),
        pytest.param(lambda: wk.gemm_mn(x[:4], gate, layout), "number of rows must be 4, got 9", id="rows"),
        pytest.param(lambda: wk.gemm_mn(x, gate, three), "3 groups do not divide N = 32", id="groups"),
        pytest.param(lambda: wk.gemm_k(h, down, meta), "the layout is on meta", id="device"),
        pytest.param(lambda: wk.gemm_k(h, down, wrong), "must be a RouteLayout or a PatternLayout", id="pair"),
        pytest.param(lambda: wk.gemm_k(*half, layout, accumulate="bf16"), "always added in fp32", id="bf16 sums"),
        pytest.param(lambda: wk.gemm_k(h, down, layout, backend="gluon"), "needs a Hopper GPU", id="gluon"),
        pytest.param(
            lambda: wk.gated_mlp_up(x, gate, e["up"][:16], layout), "D' of w_up must be 32, got 16", id="weights"
        ),
    ]


@pytest.mark.parametrize(("call", "complaint"), bad_calls())
def test_what_does_not_fit_is_refused_by_name(call: Any, complaint: str) -> None:
    with pytest.raises(wk.UnsupportedError, match=complaint):
        call()


def test_explain_tells_which_backend_takes_patterns(device: str) -> None:
    ids, patterns, x, weight, _, h = pattern_operands(SMALL_PATTERNS[4], torch.float16, device)
    layout = wk.pattern_layout(ids, patterns)
    assert wk.explain("gemm_mn", x, weight, layout).backend in ("triton", "gluon")
    assert wk.explain("gemm_k", h, weight.t().contiguous(), layout, backend="torch").backend == "torch"

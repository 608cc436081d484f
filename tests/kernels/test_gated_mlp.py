"""A whole gated MLP, for every form of the decision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import wide_kernels as wk
from wide_kernels import dispatch
from wide_kernels.gated_mlp.launch import gated_mlp_problem


def operands(rows: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, Tensor]:
    """Five patterns of 3 groups x 16 channels, the other sides 32 and 48."""
    generator = torch.Generator().manual_seed(rows)
    shapes = {"x": (rows, 32), "gate": (48, 32), "up": (48, 32), "down": (64, 48), "residual": (rows, 64)}
    found = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    found = {name: tensor.to(device, dtype) for name, tensor in found.items()}
    found["patterns"] = (torch.rand(5, 3, generator=generator) < 0.5).to(device)
    found["ids"] = torch.randint(5, (rows,), generator=generator, dtype=torch.int32).to(device)
    return found


@pytest.mark.parametrize("form", ["patterns", "layout", "mask"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("rows", [0, 1, 3, 140])
def test_every_form_of_the_decision_gives_the_masked_mlp(rows: int, backend: str, form: str, device: str) -> None:
    e = operands(rows, torch.float16, device)
    mask = e["patterns"][e["ids"].long()]
    forms: dict[str, wk.PatternLayout | wk.RouteLayout | None] = {
        "patterns": wk.pattern_layout(e["ids"], e["patterns"], backend="torch"),
        "layout": wk.route_layout(mask, backend="torch"),
        "mask": None,
    }
    expected = masked_mlp(e, mask)
    for down in (e["down"], e["down"].t().contiguous().t()):
        y = wk.gated_mlp(
            e["x"], e["gate"], e["up"], down, forms[form], e["residual"], "relu",
            mask=mask if form == "mask" else None, backend=backend,
        )  # fmt: skip
        assert y.dtype is torch.float16 and y.shape == expected.shape
        # two roundings to fp16 of 2^-11 each: of the hidden channels, and of the result
        assert float((y.double() - expected).norm()) <= 1e-3 * float(expected.norm())


def masked_mlp(e: dict[str, Tensor], mask: Tensor) -> Tensor:
    """In float64, from the formula: relu(x Wg^T) * (x Wu^T), masked channel by channel, times Wd^T, plus residual."""
    x, gate, up, down, residual = (e[name].double() for name in ("x", "gate", "up", "down", "residual"))
    hidden = (x @ gate.t()).clamp_min(0) * (x @ up.t()) * mask.repeat_interleave(16, 1)
    return hidden @ down.t() + residual


def test_the_registered_form_for_patterns_gives_the_masked_mlp() -> None:
    e = operands(9)
    layout = wk.pattern_layout(e["ids"], e["patterns"], backend="torch")
    op = torch.ops.wide_kernels.gated_mlp_patterns
    y = op(e["x"], e["gate"], e["up"], e["down"], *layout.tensors, e["residual"], "relu", "torch")
    torch.testing.assert_close(y.double(), masked_mlp(e, layout.mask), rtol=1e-5, atol=1e-3)


def test_gradients_agree_with_finite_differences() -> None:
    e = operands(9, torch.float64)
    layout = wk.pattern_layout(e["ids"], e["patterns"], backend="torch")
    given = [e[name].requires_grad_() for name in ("x", "gate", "up", "down", "residual")]

    def composed(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, residual: Tensor) -> Tensor:
        return wk.gated_mlp(x, gate, up, down, layout, residual, backend="torch")

    def registered(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, residual: Tensor) -> Tensor:
        op = torch.ops.wide_kernels.gated_mlp_patterns
        y: Tensor = op(x, gate, up, down, *layout.tensors, residual, "silu", "torch")
        return y

    assert torch.autograd.gradcheck(composed, given, fast_mode=True)
    assert torch.autograd.gradcheck(registered, given, fast_mode=True)
    only_down = [tensor.detach().requires_grad_(i == 3) for i, tensor in enumerate(given)]
    (found,) = torch.autograd.grad(registered(*only_down).sum(), only_down[3:4])
    torch.testing.assert_close(found, torch.autograd.grad(composed(*given).sum(), given)[3])


@pytest.mark.parametrize(
    ("rows", "by_channel", "complaint"),
    [(300, False, None), (300, True, None), (128, False, "more than 128 rows")],
)
def test_hopper_takes_many_rows_that_follow_patterns(
    rows: int, by_channel: bool, complaint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_capability", lambda index: (9, 0))
    monkeypatch.setattr(dispatch, "TRITON_VERSION", (3, 6))
    layout = wk.pattern_layout(torch.zeros(rows, dtype=torch.int32), torch.ones(2, 3, dtype=torch.bool))
    gate, down = torch.empty(48, 64).bfloat16(), torch.empty(80, 48).bfloat16()
    if by_channel:
        down = down.t().contiguous().t()
    problem = gated_mlp_problem(torch.empty(rows, 64).bfloat16(), gate, gate, down, layout)
    refusal = dispatch._REFUSALS["gluon"](replace(problem, device=torch.device("cuda", 0)))
    assert refusal is None if complaint is None else complaint in str(refusal)
    part = torch.empty(80, 96).bfloat16()[:, :48]
    problem = gated_mlp_problem(torch.empty(rows, 64).bfloat16(), gate, gate, part, layout)
    refusal = dispatch._REFUSALS["gluon"](replace(problem, device=torch.device("cuda", 0)))
    assert "w_down must be contiguous" in str(refusal)


@pytest.mark.parametrize(
    ("rows", "width", "by_channel", "passed_over"),
    [(1024, 16, False, True), (1025, 16, False, False), (300, 16, True, False), (300, 64, False, False)],
)
def test_few_rows_do_not_pay_for_transposing_a_weight(
    rows: int, width: int, by_channel: bool, passed_over: bool
) -> None:
    layout = wk.pattern_layout(torch.zeros(rows, dtype=torch.int32), torch.ones(2, 3, dtype=torch.bool))
    gate, down = torch.empty(3 * width, 64).bfloat16(), torch.empty(80, 3 * width).bfloat16()
    if by_channel:
        down = down.t().contiguous().t()
    problem = gated_mlp_problem(torch.empty(rows, 64).bfloat16(), gate, gate, down, layout)
    assert ("need the weight transposed" in problem.passed_over.get("gluon", "")) == passed_over


def test_what_does_not_fit_is_refused_by_name() -> None:
    e = operands(9)
    layout = wk.pattern_layout(e["ids"], e["patterns"], backend="torch")
    mask = layout.mask
    forms: list[dict[str, Any]] = [
        {"layout": layout},
        {"layout": wk.route_layout(mask, backend="torch")},
        {"mask": mask},
    ]
    for form in forms:
        with pytest.raises(wk.UnsupportedError, match="gated_mlp: D' of w_down must be 48, got 32"):
            wk.gated_mlp(e["x"], e["gate"], e["up"], e["down"][:, :32], **form)
    with pytest.raises(wk.UnsupportedError, match="N of residual must be 64, got 32"):
        wk.gated_mlp(e["x"], e["gate"], e["up"], e["down"], layout, e["x"])
    with pytest.raises(wk.UnsupportedError, match="needs a Hopper GPU"):
        wk.gated_mlp(e["x"], e["gate"], e["up"], e["down"], layout, backend="gluon")


def test_it_compiles_without_a_break() -> None:
    e = operands(200)

    def ffn(x: Tensor, ids: Tensor) -> Tensor:
        layout = wk.pattern_layout(ids, e["patterns"], backend="torch")
        return wk.gated_mlp(x, e["gate"], e["up"], e["down"], layout, e["residual"], backend="torch")

    compiled = torch.compile(ffn, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(e["x"], e["ids"]), ffn(e["x"], e["ids"]))

"""The operators as torch sees them: registered, traceable, differentiable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import wide_kernels as wk


def example(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    mask = torch.rand(6, 2, generator=generator) < 0.5
    mask[0] = torch.tensor([True, False])
    found = {"x": normal(6, 16), "gate": normal(32, 16), "up": normal(32, 16), "bias": normal(32), "h": normal(6, 32)}
    return found | {"down": normal(16, 32), "residual": normal(6, 16), "mask": mask}


def registered_calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Operator -> (its registered form, arguments), with gradients wanted where there are some."""
    e = {name: tensor.requires_grad_(tensor.is_floating_point()) for name, tensor in example(torch.float32).items()}
    layout = wk.route_layout(e["mask"], backend="torch")
    rows = (layout.index, layout.count)
    ops = torch.ops.wide_kernels
    assert all(callable(getattr(wk, name)) for name in wk.__all__)  # loading a name registers its operator
    plain = [torch.randn(*shape) for shape in ((6, 16), (16,), (4, 16), (4,), (4, 4), (4,))]
    standing = [torch.randn(*shape).requires_grad_() for shape in ((16, 16), (6, 3))]
    q, k, mask = torch.randn(2, 3, 4, 64), torch.randn(2, 5, 2, 64), torch.rand(6, 2) < 0.5
    start = torch.tensor([1, 2])
    attended = wk.route_layout(mask, backend="torch")
    sorted_mask = (attended.index, attended.count)
    return {
        "route_layout": (ops.route_layout, (e["mask"], "torch")),
        "gemm_mn": (ops.gemm_mn, (e["x"], e["gate"], e["mask"], *rows, e["bias"], "silu", 0, False, "torch")),
        "gated_mlp_up": (
            ops.gated_mlp_up,
            (e["x"], e["gate"], e["up"], e["mask"], None, None, "silu", 0, True, "torch"),
        ),
        "gemm_mn always": (
            ops.gemm_mn,
            (e["x"], e["gate"], e["mask"][:, :1], None, None, e["bias"], "silu", 1, True, "torch"),
        ),
        "gemm_k": (
            ops.gemm_k,
            (e["h"], e["down"], e["mask"], e["residual"], None, None, "auto", False, True, "torch"),
        ),
        "gemm_k stand-in": (
            ops.gemm_k,
            (e["h"], e["down"], e["mask"], e["residual"], *standing, "auto", False, True, "torch"),
        ),
        "compensate": (ops.compensate, (e["residual"], standing[0], e["mask"], standing[1], "torch")),
        "compensate means": (ops.compensate, (e["residual"], standing[0], e["mask"], None, "torch")),
        "norm_route": (ops.norm_route, (*plain, None, 1e-5, "residual", True, "torch")),
        "norm_route bypass": (ops.norm_route, (*plain, torch.randn(3, 16), 1e-5, "residual", True, "torch")),
        "attention_prefill": (ops.attention_prefill, (q, k, k, mask, *sorted_mask, True, start, start, None, "torch")),
        "attention_decode": (ops.attention_decode, (q[:, :1].contiguous(), k, k, mask[:2], start, None, None, "torch")),
    }


@pytest.mark.parametrize("op", list(registered_calls()))
def test_the_registration_is_sound(op: str) -> None:
    function, arguments = registered_calls()[op]
    torch.library.opcheck(function.default, arguments)


def differentiable(e: dict[str, Tensor], backend: str) -> dict[str, tuple[Callable[..., Tensor], list[str]]]:
    """Operator -> (it as a function of tensors, which ones)."""
    layout = wk.route_layout(e["mask"])
    calls: dict[str, tuple[Callable[..., Tensor], list[str]]] = {}
    for activation in (None, "silu", "gelu", "gelu_tanh", "relu"):
        calls[f"gemm_mn {activation}"] = (
            lambda x, w, b, activation=activation: wk.gemm_mn(x, w, layout, b, activation, backend=backend),
            ["x", "gate", "bias"],
        )
    calls["gated_mlp_up"] = (lambda x, g, u: wk.gated_mlp_up(x, g, u, layout, backend=backend), ["x", "gate", "up"])
    calls["gemm_k"] = (lambda h, w, r: wk.gemm_k(h, w, layout, r, backend=backend), ["h", "down", "residual"])
    return calls


@pytest.mark.parametrize("op", list(differentiable(example(torch.float64), "torch")))
def test_gradients_agree_with_finite_differences(op: str) -> None:
    e = example(torch.float64)
    function, names = differentiable(e, "torch")[op]
    assert torch.autograd.gradcheck(function, [e[name].requires_grad_() for name in names])


@pytest.mark.parametrize("op", ["gemm_mn silu", "gated_mlp_up", "gemm_k"])
def test_triton_passes_gradients_too(op: str, device: str) -> None:
    found = []
    for backend in ("torch", "triton"):
        e = {name: tensor.to(device) for name, tensor in example(torch.float32).items()}
        function, names = differentiable(e, backend)[op]
        inputs = [e[name].requires_grad_() for name in names]
        function(*inputs).square().sum().backward()
        found.append([tensor.grad for tensor in inputs])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_frozen_operands_get_no_gradient() -> None:
    e = example(torch.float32)
    x = e["x"].requires_grad_()
    wk.gemm_k(wk.gated_mlp_up(x, e["gate"], e["up"], mask=e["mask"]), e["down"], mask=e["mask"]).sum().backward()
    assert x.grad is not None
    assert e["gate"].grad is None


def test_a_whole_ffn_compiles_without_a_break() -> None:
    e = example(torch.float32)

    def ffn(x: Tensor, mask: Tensor) -> Tensor:
        layout = wk.route_layout(mask, backend="torch")
        h = wk.gated_mlp_up(x, e["gate"], e["up"], layout, backend="torch")
        return wk.gemm_k(h, e["down"], layout, residual=x, backend="torch")

    compiled = torch.compile(ffn, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(e["x"], e["mask"]), ffn(e["x"], e["mask"]))

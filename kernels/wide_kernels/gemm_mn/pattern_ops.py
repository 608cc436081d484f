"""The registered forms of `gemm_mn` and `gated_mlp_up` for a PatternLayout."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from wide_kernels.gemm_mn.configs import FEW_ROWS
from wide_kernels.gemm_mn.gradients import gated_mlp_up_gradients, gemm_mn_gradients
from wide_kernels.gemm_mn.reference import gated_mlp_up_reference, gemm_mn_reference
from wide_kernels.pattern_layout import PatternLayout, chosen_mask

_LAYOUT = "Tensor ids, Tensor patterns, Tensor order, Tensor lists, Tensor listed, Tensor mixed"


def gemm_mn_patterns(
    x: Tensor, weight: Tensor, layout: PatternLayout, bias: Tensor | None, activation: str | None, backend: str
) -> Tensor:
    """`gemm_mn` on a backend that was chosen."""
    y = torch.ops.wide_kernels.gemm_mn_patterns(x, weight, *layout.tensors, bias, activation, backend)
    return cast(Tensor, y)


def gated_mlp_up_patterns(
    x: Tensor, w_gate: Tensor, w_up: Tensor, layout: PatternLayout, activation: str, backend: str
) -> Tensor:
    """`gated_mlp_up` on a backend that was chosen."""
    y = torch.ops.wide_kernels.gated_mlp_up_patterns(x, w_gate, w_up, *layout.tensors, activation, backend)
    return cast(Tensor, y)


def _project(
    x: Tensor,
    weight: Tensor,
    weight_up: Tensor | None,
    layout: PatternLayout,
    bias: Tensor | None,
    activation: str | None,
    backend: str,
) -> Tensor:
    if backend == "gluon":
        from wide_kernels.gemm_mn import pattern_gluon

        return pattern_gluon.project(x, weight, weight_up, layout, bias, activation)
    if x.shape[0] > FEW_ROWS:
        from wide_kernels.gemm_mn import pattern_triton

        return pattern_triton.project(x, weight, weight_up, layout, bias, activation)
    from wide_kernels.gemm_mn import few_rows

    return few_rows.project(x, weight, weight_up, layout.mask, bias, activation)


@torch.library.custom_op(
    "wide_kernels::gemm_mn_patterns",
    mutates_args=(),
    schema=f"(Tensor x, Tensor weight, {_LAYOUT}, Tensor? bias, str? activation, str backend) -> Tensor",
)
def _gemm_mn(
    x: Tensor,
    weight: Tensor,
    ids: Tensor,
    patterns: Tensor,
    order: Tensor,
    lists: Tensor,
    listed: Tensor,
    mixed: Tensor,
    bias: Tensor | None,
    activation: str | None,
    backend: str,
) -> Tensor:
    if backend == "torch":
        return gemm_mn_reference(x, weight, chosen_mask(ids, patterns), bias, activation)
    layout = PatternLayout(ids, patterns, order, lists, listed, mixed)
    return _project(x, weight, None, layout, bias, activation, backend)


@_gemm_mn.register_fake
def _(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _save_gemm_mn(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ids, patterns, *_, bias, activation, _ = inputs
    ctx.save_for_backward(x, weight, ids, patterns, bias)
    ctx.activation = activation


def _gemm_mn_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, ids, patterns, bias = ctx.saved_tensors
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 8)]
    mask = chosen_mask(ids, patterns)
    to_x, to_weight, to_bias = gemm_mn_gradients(gradient, x, weight, mask, bias, ctx.activation, needs)
    return to_x, to_weight, None, None, None, None, None, None, to_bias, None, None


_gemm_mn.register_autograd(_gemm_mn_backward, setup_context=_save_gemm_mn)


@torch.library.custom_op(
    "wide_kernels::gated_mlp_up_patterns",
    mutates_args=(),
    schema=f"(Tensor x, Tensor w_gate, Tensor w_up, {_LAYOUT}, str activation, str backend) -> Tensor",
)
def _gated_mlp_up(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    ids: Tensor,
    patterns: Tensor,
    order: Tensor,
    lists: Tensor,
    listed: Tensor,
    mixed: Tensor,
    activation: str,
    backend: str,
) -> Tensor:
    if backend == "torch":
        return gated_mlp_up_reference(x, w_gate, w_up, chosen_mask(ids, patterns), activation)
    layout = PatternLayout(ids, patterns, order, lists, listed, mixed)
    return _project(x, w_gate, w_up, layout, None, activation, backend)


@_gated_mlp_up.register_fake
def _(x: Tensor, w_gate: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape[0], w_gate.shape[0])


def _save_gated_mlp_up(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w_gate, w_up, ids, patterns, *_, activation, _ = inputs
    ctx.save_for_backward(x, w_gate, w_up, ids, patterns)
    ctx.activation = activation


def _gated_mlp_up_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, w_gate, w_up, ids, patterns = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    mask = chosen_mask(ids, patterns)
    found = gated_mlp_up_gradients(gradient, x, w_gate, w_up, mask, ctx.activation, needs)
    return *found, None, None, None, None, None, None, None, None


_gated_mlp_up.register_autograd(_gated_mlp_up_backward, setup_context=_save_gated_mlp_up)

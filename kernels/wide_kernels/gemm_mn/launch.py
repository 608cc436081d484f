"""The public operators `gemm_mn` and `gated_mlp_up`: checks, dispatch, registration, gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from wide_kernels.activations import check_activation
from wide_kernels.checks import group_width, is_bool, same_kind, same_size, shape_of, strided
from wide_kernels.dispatch import Problem, choose
from wide_kernels.gemm_mn.configs import FEW_ROWS, hopper_refusal
from wide_kernels.gemm_mn.gradients import gated_mlp_up_gradients, gemm_mn_gradients
from wide_kernels.gemm_mn.reference import gated_mlp_up_reference, gemm_mn_reference
from wide_kernels.layout import RouteLayout, decision, extended, sorted_rows


def gemm_mn(
    x: Tensor,
    weight: Tensor,
    layout: RouteLayout | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    mask: Tensor | None = None,
    always: int = 0,
    early: bool = False,
    backend: str = "auto",
) -> Tensor:
    """A projection whose output channels are routed (paper: GEMM-MN): activation(x weight^T + bias).

    x [T, K], weight [N, K], bias [N] -> [T, N] in the dtype of x; the N channels are cut into N_G groups and those that
    a token skips are exact zeros. Give `layout`, or for a few rows `mask` bool [T, N_G] instead, behind whose groups
    `always` more may follow that every row executes (with all of them there, the mask has no columns: a dense product).
    `activation`: silu, gelu, gelu_tanh, relu or None. Differentiable in x, weight and bias. Raises UnsupportedError.

    `early` vouches that the weight was complete before the launch that precedes this one: on a Hopper GPU one
    row's dense product then fetches its first weights while that launch still runs.
    """
    problem = gemm_mn_problem(x, weight, layout, bias, activation, mask=mask, always=always, early=early)
    chosen = choose(problem, backend)
    routed = decision("gemm_mn", x, layout, mask, always)
    rows = sorted_rows(layout)
    y = torch.ops.wide_kernels.gemm_mn(x, weight, routed, *rows, bias, activation, always, early, chosen)
    return cast(Tensor, y)


def gated_mlp_up(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    layout: RouteLayout | None = None,
    activation: str = "silu",
    *,
    mask: Tensor | None = None,
    always: int = 0,
    early: bool = False,
    backend: str = "auto",
) -> Tensor:
    """The first half of a gated MLP in one pass over x: activation(x w_gate^T) * (x w_up^T).

    x [T, D], both weights [D', D] -> [T, D'], exact zeros in the groups that a token skips. `layout`, `mask`,
    `always`, `early` and `activation` as in `gemm_mn`. Differentiable in x and both weights. Raises UnsupportedError.
    """
    problem = gated_mlp_up_problem(x, w_gate, w_up, layout, activation, mask=mask, always=always, early=early)
    chosen = choose(problem, backend)
    routed = decision("gated_mlp_up", x, layout, mask, always)
    rows = sorted_rows(layout)
    y = torch.ops.wide_kernels.gated_mlp_up(x, w_gate, w_up, routed, *rows, activation, always, early, chosen)
    return cast(Tensor, y)


def gemm_mn_problem(
    x: Tensor,
    weight: Tensor,
    layout: RouteLayout | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    mask: Tensor | None = None,
    always: int = 0,
    early: bool = False,
) -> Problem:
    """The facts that decide the backend of `gemm_mn`; raises UnsupportedError for what no backend takes."""
    problem = _problem("gemm_mn", "N K", x, {"weight": weight}, layout, mask, always, activation, early)
    same_kind("gemm_mn", x, bias=bias)
    if bias is not None:
        same_size("gemm_mn", "the size of bias", shape_of("gemm_mn", "bias", bias, "N")[0], weight.shape[0])
    return problem


def gated_mlp_up_problem(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    layout: RouteLayout | None = None,
    activation: str = "silu",
    *,
    mask: Tensor | None = None,
    always: int = 0,
    early: bool = False,
) -> Problem:
    """The facts that decide the backend of `gated_mlp_up`; raises UnsupportedError for what no backend takes."""
    return _problem(
        "gated_mlp_up", "D' D", x, {"w_gate": w_gate, "w_up": w_up}, layout, mask, always, activation, early
    )


def _problem(
    op: str,
    dims: str,
    x: Tensor,
    weights: Mapping[str, Tensor],
    layout: RouteLayout | None,
    mask: Tensor | None,
    always: int,
    activation: str | None,
    early: bool,
) -> Problem:
    """What both operators demand; `dims` names the sizes of a weight."""
    check_activation(op, activation)
    is_bool(op, early=early)
    same_kind(op, x, **weights)
    output, inner = dims.split()
    rows, depth = shape_of(op, "x", x, f"T {inner}")
    columns = None
    for name, weight in weights.items():
        weight_columns, weight_depth = shape_of(op, name, weight, dims)
        same_size(op, f"{inner} of {name}", weight_depth, depth)
        columns = weight_columns if columns is None else columns
        same_size(op, f"{output} of {name}", weight_columns, columns)
    assert columns is not None  # there is at least one weight
    groups = decision(op, x, layout, mask, always).shape[1] + always
    width = group_width(op, output, columns, groups)
    sizes = {inner: depth, "the group width": width}
    return Problem(op, x.device, x.dtype, sizes, strided(**weights), hopper_refusal(rows, depth, x.numel()))


def _triton(
    x: Tensor,
    weight: Tensor,
    weight_up: Tensor | None,
    mask: Tensor,
    index: Tensor | None,
    count: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
    always: int,
    early: bool,
) -> Tensor:
    from wide_kernels.gemm_mn import few_rows
    from wide_kernels.gemm_mn.triton import project

    if x.shape[0] <= FEW_ROWS:
        return few_rows.project(x, weight, weight_up, mask, bias, activation, always, early)
    return project(x, weight, weight_up, extended(mask, always), index, count, bias, activation)


@torch.library.custom_op(
    "wide_kernels::gemm_mn",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor mask, Tensor? index, Tensor? count, Tensor? bias, str? activation,"
    " int always, bool early, str backend) -> Tensor",
)
def _gemm_mn(
    x: Tensor,
    weight: Tensor,
    mask: Tensor,
    index: Tensor | None,
    count: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
    always: int,
    early: bool,
    backend: str,
) -> Tensor:
    if backend == "triton":
        return _triton(x, weight, None, mask, index, count, bias, activation, always, early)
    mask = extended(mask, always)
    if backend == "gluon":
        from wide_kernels.gemm_mn import gluon

        return gluon.project(x, weight, None, mask, index, count, bias, activation)
    return gemm_mn_reference(x, weight, mask, bias, activation)


@_gemm_mn.register_fake
def _(x: Tensor, weight: Tensor, mask: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _save_gemm_mn(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, mask, _, _, bias, activation, always, *_ = inputs
    ctx.save_for_backward(x, weight, extended(mask, always), bias)
    ctx.activation = activation


def _gemm_mn_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, mask, bias = ctx.saved_tensors
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 5)]
    to_x, to_weight, to_bias = gemm_mn_gradients(gradient, x, weight, mask, bias, ctx.activation, needs)
    return to_x, to_weight, None, None, None, to_bias, None, None, None, None


_gemm_mn.register_autograd(_gemm_mn_backward, setup_context=_save_gemm_mn)


@torch.library.custom_op(
    "wide_kernels::gated_mlp_up",
    mutates_args=(),
    schema="(Tensor x, Tensor w_gate, Tensor w_up, Tensor mask, Tensor? index, Tensor? count, str activation,"
    " int always, bool early, str backend) -> Tensor",
)
def _gated_mlp_up(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    mask: Tensor,
    index: Tensor | None,
    count: Tensor | None,
    activation: str,
    always: int,
    early: bool,
    backend: str,
) -> Tensor:
    if backend == "triton":
        return _triton(x, w_gate, w_up, mask, index, count, None, activation, always, early)
    mask = extended(mask, always)
    if backend == "gluon":
        from wide_kernels.gemm_mn import gluon

        return gluon.project(x, w_gate, w_up, mask, index, count, None, activation)
    return gated_mlp_up_reference(x, w_gate, w_up, mask, activation)


@_gated_mlp_up.register_fake
def _(x: Tensor, w_gate: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape[0], w_gate.shape[0])


def _save_gated_mlp_up(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w_gate, w_up, mask, _, _, activation, always, *_ = inputs
    ctx.save_for_backward(x, w_gate, w_up, extended(mask, always))
    ctx.activation = activation


def _gated_mlp_up_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, w_gate, w_up, mask = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    to_x, to_w_gate, to_w_up = gated_mlp_up_gradients(gradient, x, w_gate, w_up, mask, ctx.activation, needs)
    return to_x, to_w_gate, to_w_up, None, None, None, None, None, None, None


_gated_mlp_up.register_autograd(_gated_mlp_up_backward, setup_context=_save_gated_mlp_up)

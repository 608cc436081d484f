"""The public operator `gated_mlp`: checks, dispatch, registration, gradients."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from wide_kernels.checks import same_size, shape_of, strided
from wide_kernels.dispatch import Problem, choose
from wide_kernels.gated_mlp.reference import gated_mlp_gradients, gated_mlp_reference
from wide_kernels.gemm_k.launch import gemm_k, gemm_k_problem
from wide_kernels.gemm_mn.launch import gated_mlp_up, gated_mlp_up_problem
from wide_kernels.layout import RouteLayout
from wide_kernels.pattern_layout import PatternLayout, chosen_mask


def gated_mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    layout: RouteLayout | PatternLayout | None = None,
    residual: Tensor | None = None,
    activation: str = "silu",
    *,
    mask: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """A gated MLP whose hidden channels are routed: (activation(x w_gate^T) * (x w_up^T)) w_down^T + residual.

    x [T, D], w_gate and w_up [D', D], w_down [N, D'], residual [T, N] -> [T, N]; `layout`, `mask` and `activation` as
    in `gated_mlp_up`. It is `gated_mlp_up` and `gemm_k`, but for many rows that follow patterns on a Hopper GPU: there
    hidden channels that no row of a tile runs cause no memory traffic, and the second product gathers nothing. That
    form reads channels of w_down, so where the groups' width is no multiple of 64 it transposes w_down at each call,
    unless it comes as the transpose of a contiguous [D', N]; elsewhere such a w_down is copied at each call.
    Differentiable in x, the weights and residual. Raises UnsupportedError.
    """
    problem = gated_mlp_problem(x, w_gate, w_up, w_down, layout, residual, activation, mask=mask)
    if isinstance(layout, PatternLayout):
        chosen = choose(problem, backend)
        if chosen == "gluon":
            return _on_patterns(x, w_gate, w_up, w_down, layout, residual, activation, chosen)
    h = gated_mlp_up(x, w_gate, w_up, layout, activation, mask=mask, backend=backend)
    return gemm_k(h, w_down.contiguous(), layout, residual, mask=mask, backend=backend)


def gated_mlp_problem(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    layout: RouteLayout | PatternLayout | None = None,
    residual: Tensor | None = None,
    activation: str = "silu",
    *,
    mask: Tensor | None = None,
) -> Problem:
    """The facts that decide the backend of `gated_mlp`: those of its two halves together. Raises UnsupportedError."""
    up = gated_mlp_up_problem(x, w_gate, w_up, layout, activation, mask=mask)
    rows, channels = x.shape[0], w_gate.shape[0]
    _, depth = shape_of("gated_mlp", "w_down", w_down, "N D'")
    same_size("gated_mlp", "D' of w_down", depth, channels)
    hidden = x.new_empty(()).expand(rows, channels)  # its shape is asked for, no value
    down = gemm_k_problem(hidden, w_down, layout, residual, mask=mask)
    uneven = () if w_down.t().is_contiguous() else strided(w_down=w_down)
    return Problem(
        "gated_mlp", x.device, x.dtype, {**up.tile_sizes, **down.tile_sizes}, up.strided + uneven,
        {**down.refused, **up.refused}, {**down.passed_over, **up.passed_over},
    )  # fmt: skip


def _on_patterns(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    layout: PatternLayout,
    residual: Tensor | None,
    activation: str,
    backend: str,
) -> Tensor:
    y = torch.ops.wide_kernels.gated_mlp_patterns(
        x, w_gate, w_up, w_down, *layout.tensors, residual, activation, backend
    )
    return cast(Tensor, y)


@torch.library.custom_op(
    "wide_kernels::gated_mlp_patterns",
    mutates_args=(),
    schema="(Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down, Tensor ids, Tensor patterns, Tensor order,"
    " Tensor lists, Tensor listed, Tensor mixed, Tensor? residual, str activation, str backend) -> Tensor",
)
def _gated_mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    ids: Tensor,
    patterns: Tensor,
    order: Tensor,
    lists: Tensor,
    listed: Tensor,
    mixed: Tensor,
    residual: Tensor | None,
    activation: str,
    backend: str,
) -> Tensor:
    if backend == "gluon":
        from wide_kernels.gemm_k.pattern_gluon import project_packed
        from wide_kernels.gemm_mn.pattern_gluon import gated_packed

        layout = PatternLayout(ids, patterns, order, lists, listed, mixed)
        return project_packed(gated_packed(x, w_gate, w_up, layout, activation), w_down, layout, residual)
    return gated_mlp_reference(x, w_gate, w_up, w_down, chosen_mask(ids, patterns), residual, activation)


@_gated_mlp.register_fake
def _(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape[0], w_down.shape[0])


def _save_gated_mlp(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w_gate, w_up, w_down, ids, patterns, *_, residual, activation, _ = inputs
    ctx.save_for_backward(x, w_gate, w_up, w_down, ids, patterns)
    ctx.has_residual = residual is not None
    ctx.activation = activation


def _gated_mlp_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, w_gate, w_up, w_down, ids, patterns = ctx.saved_tensors
    needs = ctx.needs_input_grad
    mask = chosen_mask(ids, patterns)
    found = gated_mlp_gradients(gradient, x, w_gate, w_up, w_down, mask, ctx.activation, needs[:4])
    to_residual = gradient if ctx.has_residual and needs[10] else None
    return *found, None, None, None, None, None, None, to_residual, None, None


_gated_mlp.register_autograd(_gated_mlp_backward, setup_context=_save_gated_mlp)

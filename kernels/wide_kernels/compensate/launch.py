"""The public operator `compensate`: checks, dispatch, registration, gradients."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from wide_kernels.checks import shape_of, strided
from wide_kernels.compensate.reference import compensate_reference
from wide_kernels.dispatch import Problem, choose
from wide_kernels.layout import RouteLayout, decision
from wide_kernels.stand_in import StandIn, check_stand_in, stand_in_gradients


def compensate(
    residual: Tensor,
    stand_in: StandIn,
    layout: RouteLayout | None = None,
    *,
    mask: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """What stands in for skipped groups, added to the residual stream: residual + [1 - m, u reduced] weight^T [T, N].

    residual [T, N] in the dtype of `stand_in`; `layout` or `mask` bool [T, N_G] is the decision m, u = mean(1 - m). For
    products of whole inputs by a library; `gemm_k` takes a `stand_in` itself. Sums in fp32, rounded once.
    Differentiable in residual and stand_in. Raises UnsupportedError.
    """
    chosen = choose(compensate_problem(residual, stand_in, layout, mask=mask), backend)
    routed = decision("compensate", residual, layout, mask)
    y = torch.ops.wide_kernels.compensate(residual, stand_in.weight, routed, stand_in.reduced, chosen)
    return cast(Tensor, y)


def compensate_problem(
    residual: Tensor,
    stand_in: StandIn,
    layout: RouteLayout | None = None,
    *,
    mask: Tensor | None = None,
) -> Problem:
    """The facts that decide the backend of `compensate`; raises UnsupportedError for what no backend takes."""
    op = "compensate"
    rows, columns = shape_of(op, "residual", residual, "T N")
    groups = decision(op, residual, layout, mask).shape[1]
    sizes = check_stand_in(op, residual, stand_in, rows, groups, columns)
    return Problem(op, residual.device, residual.dtype, sizes, strided(stand_in=stand_in.weight))


@torch.library.custom_op(
    "wide_kernels::compensate",
    mutates_args=(),
    schema="(Tensor residual, Tensor weight, Tensor mask, Tensor? reduced, str backend) -> Tensor",
)
def _compensate(residual: Tensor, weight: Tensor, mask: Tensor, reduced: Tensor | None, backend: str) -> Tensor:
    if backend == "triton":
        from wide_kernels.compensate.triton import add

        return add(residual, weight, mask, reduced)
    return compensate_reference(residual, weight, mask, reduced)


@_compensate.register_fake
def _(residual: Tensor, *rest: object) -> Tensor:
    return residual.new_empty(residual.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight, mask, reduced, *_ = inputs
    ctx.save_for_backward(weight, mask, reduced)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    weight, mask, reduced = ctx.saved_tensors
    needs = ctx.needs_input_grad
    to_weight, to_reduced = stand_in_gradients(gradient, weight, mask, reduced, (needs[1], needs[3]))
    return gradient if needs[0] else None, to_weight, None, to_reduced, None


_compensate.register_autograd(_backward, setup_context=_save)

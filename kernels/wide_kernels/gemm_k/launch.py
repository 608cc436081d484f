"""The public operator `gemm_k`: checks, dispatch, registration, gradients."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from wide_kernels.checks import group_width, is_bool, same_kind, same_size, shape_of, strided
from wide_kernels.compensate.reference import compensate_reference
from wide_kernels.dispatch import Problem, choose, is_hopper
from wide_kernels.errors import UnsupportedError
from wide_kernels.gemm_k.configs import CHANNEL_STEP, FEW_ROWS, MANY_ROWS
from wide_kernels.gemm_k.reference import gemm_k_gradients, gemm_k_reference
from wide_kernels.layout import RouteLayout, decision
from wide_kernels.stand_in import StandIn, check_stand_in, stand_in_gradients

ACCUMULATE = ("auto", "fp32", "bf16")


def gemm_k(
    h: Tensor,
    weight: Tensor,
    layout: RouteLayout | None = None,
    residual: Tensor | None = None,
    accumulate: str = "auto",
    deterministic: bool = False,
    *,
    mask: Tensor | None = None,
    stand_in: StandIn | None = None,
    early: bool = False,
    backend: str = "auto",
) -> Tensor:
    """A projection whose input channels are routed (paper: GEMM-K): masked(h) weight^T + residual.

    h [T, K], weight [N, K], residual [T, N] -> [T, N] in the dtype of h. The K channels are cut into N_G groups; the
    ones that a token skips are never read, whatever stands there. Give `layout`, or for a few rows `mask` bool [T,
    N_G]. `accumulate`: how partial sums of many rows meet: in fp32, rounded once (relative error in bfloat16: 2e-3), or
    in bf16, rounded whenever a segment of groups is added (5e-3 at 16 segments; much faster, only for bfloat16
    operands). auto is bf16 for bfloat16 operands of at least MANY_ROWS rows on a Hopper GPU, else fp32. The order of
    the additions is not fixed, so results may differ in the last bits from run to run; `deterministic=True` fixes it
    bit for bit (and takes fp32). Differentiable in h, weight and residual. Raises UnsupportedError.

    With a `stand_in` what stands in for skipped groups is added, too: [1 - m, u reduced] weight^T, m the mask and u the
    share of the groups that a token skips. Few rows add it to the same fp32 sums; many rows start from residual plus
    it, rounded once more. Where nothing is skipped it adds exact zeros to each sum, if its weight is finite: of groups
    that a token runs it is read (and multiplied by 0) all the same.

    `early` vouches that weight, mask and stand_in were complete before the launch that precedes this one: on a Hopper
    GPU one row's product then fetches its first weights while that launch still runs, and a few rows have added what
    stands in by the time that h is there.
    """
    accumulate = partial_sums(h, accumulate, deterministic)
    problem = gemm_k_problem(
        h, weight, layout, residual, accumulate, deterministic, mask=mask, stand_in=stand_in, early=early
    )
    chosen = choose(problem, backend)
    routed = decision("gemm_k", h, layout, mask)
    standing, reduced = stand_in or (None, None)
    y = torch.ops.wide_kernels.gemm_k(
        h, weight, routed, residual, standing, reduced, accumulate, deterministic, early, chosen
    )
    return cast(Tensor, y)


def partial_sums(h: Tensor, accumulate: str, deterministic: bool) -> str:
    """How partial sums meet: `accumulate` itself, with auto decided."""
    if accumulate != "auto":
        return accumulate
    halves = h.dtype is torch.bfloat16 and h.dim() == 2 and h.shape[0] >= MANY_ROWS and not deterministic
    return "bf16" if halves and is_hopper(h.device) else "fp32"


def gemm_k_problem(
    h: Tensor,
    weight: Tensor,
    layout: RouteLayout | None = None,
    residual: Tensor | None = None,
    accumulate: str = "auto",
    deterministic: bool = False,
    *,
    mask: Tensor | None = None,
    stand_in: StandIn | None = None,
    early: bool = False,
) -> Problem:
    """The facts that decide the backend of `gemm_k`; raises UnsupportedError for what no backend takes."""
    op = "gemm_k"
    is_bool(op, deterministic=deterministic, early=early)
    same_kind(op, h, weight=weight, residual=residual)
    if accumulate not in ACCUMULATE:
        raise UnsupportedError(f"{op}: accumulate must be one of {', '.join(ACCUMULATE)}, got {accumulate!r}")
    if accumulate == "bf16" and h.dtype is not torch.bfloat16:
        raise UnsupportedError(f"{op}: accumulate='bf16' needs bfloat16 operands, got {h.dtype}; use fp32")
    if accumulate == "bf16" and deterministic:
        raise UnsupportedError(f"{op}: accumulate='bf16' has no fixed order; use fp32 with deterministic=True")
    rows, depth = shape_of(op, "h", h, "T K")
    columns, weight_depth = shape_of(op, "weight", weight, "N K")
    same_size(op, "K of weight", weight_depth, depth)
    if residual is not None:
        residual_rows, residual_columns = shape_of(op, "residual", residual, "T N")
        same_size(op, "T of residual", residual_rows, rows)
        same_size(op, "N of residual", residual_columns, columns)
    groups = decision(op, h, layout, mask).shape[1]
    width = group_width(op, "K", depth, groups)
    refusal = _gluon_refusal(h, width, partial_sums(h, accumulate, deterministic))
    sizes = {"N": columns, "the group width": width}
    if stand_in is not None:
        sizes |= check_stand_in(op, h, stand_in, rows, groups, columns)
    uneven = strided(weight=weight, **({} if stand_in is None else {"stand_in": stand_in.weight}))
    refused = {"gluon": refusal} if refusal else {}
    return Problem(op, h.device, h.dtype, sizes, uneven, refused)


def _gluon_refusal(h: Tensor, width: int, accumulate: str) -> str | None:
    """What the kernel for Hopper does not take: it is one for many rows that adds in bf16, in steps of 64 channels."""
    if h.dtype is not torch.bfloat16:
        return f"it takes bfloat16, not {h.dtype}"
    if h.shape[0] <= FEW_ROWS:
        return f"it is for more than {FEW_ROWS} rows, got {h.shape[0]}"
    if accumulate != "bf16":
        return f"it adds partial sums in bf16, here accumulate is {accumulate} (auto is bf16 from {MANY_ROWS} rows on)"
    if width % CHANNEL_STEP:
        return f"the group width must be a multiple of {CHANNEL_STEP}, got {width}"
    return None


@torch.library.custom_op(
    "wide_kernels::gemm_k",
    mutates_args=(),
    schema="(Tensor h, Tensor weight, Tensor mask, Tensor? residual, Tensor? standing, Tensor? reduced,"
    " str accumulate, bool deterministic, bool early, str backend) -> Tensor",
)
def _gemm_k(
    h: Tensor,
    weight: Tensor,
    mask: Tensor,
    residual: Tensor | None,
    standing: Tensor | None,
    reduced: Tensor | None,
    accumulate: str,
    deterministic: bool,
    early: bool,
    backend: str,
) -> Tensor:
    stand_in = None if standing is None else StandIn(standing, reduced)
    if backend == "gluon":
        from wide_kernels.gemm_k import gluon

        return gluon.project(h, weight, mask, residual, stand_in)
    if backend == "triton":
        from wide_kernels.gemm_k import few_rows
        from wide_kernels.gemm_k.triton import project

        if h.shape[0] <= FEW_ROWS:
            return few_rows.project(h, weight, mask, residual, early, stand_in)
        return project(h, weight, mask, residual, accumulate, deterministic, stand_in)
    if standing is not None:
        residual = compensate_reference(residual, standing, mask, reduced)
    return gemm_k_reference(h, weight, mask, residual)


@_gemm_k.register_fake
def _(h: Tensor, weight: Tensor, *rest: object) -> Tensor:
    return h.new_empty(h.shape[0], weight.shape[0])


def _save_gemm_k(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    h, weight, mask, residual, standing, reduced, *_ = inputs
    ctx.save_for_backward(h, weight, mask, standing, reduced)
    ctx.has_residual = residual is not None


def _gemm_k_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    h, weight, mask, standing, reduced = ctx.saved_tensors
    needs = ctx.needs_input_grad
    to_h, to_weight = gemm_k_gradients(gradient, h, weight, mask, needs)
    to_residual = gradient if ctx.has_residual and needs[3] else None
    to_standing = to_reduced = None
    if standing is not None:
        to_standing, to_reduced = stand_in_gradients(gradient, standing, mask, reduced, needs[4:6])
    return to_h, to_weight, None, to_residual, to_standing, to_reduced, None, None, None, None


_gemm_k.register_autograd(_gemm_k_backward, setup_context=_save_gemm_k)

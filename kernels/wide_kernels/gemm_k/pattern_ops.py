"""The registered form of `gemm_k` for a PatternLayout."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from wide_kernels.gemm_k.configs import FEW_ROWS
from wide_kernels.gemm_k.reference import gemm_k_gradients, gemm_k_reference
from wide_kernels.pattern_layout import PatternLayout, chosen_mask


def gemm_k_patterns(h: Tensor, weight: Tensor, layout: PatternLayout, residual: Tensor | None, backend: str) -> Tensor:
    """`gemm_k` on a backend that was chosen."""
    return cast(Tensor, torch.ops.wide_kernels.gemm_k_patterns(h, weight, *layout.tensors, residual, backend))


@torch.library.custom_op(
    "wide_kernels::gemm_k_patterns",
    mutates_args=(),
    schema="(Tensor h, Tensor weight, Tensor ids, Tensor patterns, Tensor order, Tensor lists, Tensor listed,"
    " Tensor mixed, Tensor? residual, str backend) -> Tensor",
)
def _gemm_k(
    h: Tensor,
    weight: Tensor,
    ids: Tensor,
    patterns: Tensor,
    order: Tensor,
    lists: Tensor,
    listed: Tensor,
    mixed: Tensor,
    residual: Tensor | None,
    backend: str,
) -> Tensor:
    layout = PatternLayout(ids, patterns, order, lists, listed, mixed)
    if backend == "torch":
        return gemm_k_reference(h, weight, layout.mask, residual)
    if backend == "gluon":
        from wide_kernels.gemm_k import pattern_gluon

        return pattern_gluon.project(h, weight, layout, residual)
    if h.shape[0] > FEW_ROWS:
        from wide_kernels.gemm_k import pattern_triton

        return pattern_triton.project(h, weight, layout, residual)
    from wide_kernels.gemm_k import few_rows

    return few_rows.project(h, weight, layout.mask, residual)


@_gemm_k.register_fake
def _(h: Tensor, weight: Tensor, *rest: object) -> Tensor:
    return h.new_empty(h.shape[0], weight.shape[0])


def _save_gemm_k(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    h, weight, ids, patterns, *_, residual, _ = inputs
    ctx.save_for_backward(h, weight, ids, patterns)
    ctx.has_residual = residual is not None


def _gemm_k_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    h, weight, ids, patterns = ctx.saved_tensors
    needs = ctx.needs_input_grad
    to_h, to_weight = gemm_k_gradients(gradient, h, weight, chosen_mask(ids, patterns), needs)
    to_residual = gradient if ctx.has_residual and needs[8] else None
    return to_h, to_weight, None, None, None, None, None, None, to_residual, None


_gemm_k.register_autograd(_gemm_k_backward, setup_context=_save_gemm_k)

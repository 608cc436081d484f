"""The public operator `attention_prefill`: checks, dispatch, registration."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from wide_kernels.attention_prefill.reference import attention_prefill_reference
from wide_kernels.checks import MAX_HEAD_DIM, attention_sizes, group_width, mask_sizes, per_sequence, same_device, same_size
from wide_kernels.dispatch import Problem, choose
from wide_kernels.layout import RouteLayout


def attention_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: RouteLayout,
    causal: bool = True,
    q_start: Tensor | None = None,
    kv_start: Tensor | None = None,
    scale: float | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """Attention of T query tokens a sequence, each running some groups of query heads.

    q [B, T, H_q, d], k and v [B, T_k, H_k, d], `layout` of the mask [B*T, N_G] -> [B, T, H_q, d], exact zeros in the
    heads of skipped groups. Query t of sequence b stands at key position q_start[b] + t (default: the queries are the
    last T keys) and sees keys from kv_start[b] (default 0: no left padding) to its own, or to the last if not `causal`;
    a query that sees none gives zeros. q_start, kv_start: int64 [B]. scale: 1 / sqrt(d) unless given. For inference: no
    gradients. Raises UnsupportedError.
    """
    chosen = choose(attention_prefill_problem(q, k, v, layout, causal, q_start, kv_start, scale), backend)
    o = torch.ops.wide_kernels.attention_prefill(
        q, k, v, layout.mask, layout.index, layout.count, causal, q_start, kv_start, scale, chosen
    )
    return cast(Tensor, o)


def attention_prefill_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: RouteLayout,
    causal: bool = True,
    q_start: Tensor | None = None,
    kv_start: Tensor | None = None,
    scale: float | None = None,
) -> Problem:
    """The facts that decide the backend of `attention_prefill`; raises UnsupportedError for what no backend takes."""
    op = "attention_prefill"
    batch, tokens, heads = attention_sizes(op, q, k, v)
    per_sequence(op, q, batch, q_start=q_start, kv_start=kv_start)
    rows, groups = mask_sizes(op, layout.mask)
    same_device(op, q, "the mask", layout.mask)
    same_size(op, "rows of the layout (B*T)", rows, batch * tokens)
    group_width(op, "H_q", heads, groups)
    return Problem(op, q.device, q.dtype, {"head_dim": q.shape[3]}, limits={"head_dim": (q.shape[3], MAX_HEAD_DIM)})


@torch.library.custom_op(
    "wide_kernels::attention_prefill",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor mask, Tensor index, Tensor count, bool causal, Tensor? q_start,"
    " Tensor? kv_start, float? scale, str backend) -> Tensor",
)
def _attention_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    index: Tensor,
    count: Tensor,
    causal: bool,
    q_start: Tensor | None,
    kv_start: Tensor | None,
    scale: float | None,
    backend: str,
) -> Tensor:
    if backend == "triton":
        from wide_kernels.attention_prefill.triton import attend

        return attend(q, k, v, index, count, causal, q_start, kv_start, scale)
    return attention_prefill_reference(q, k, v, mask, causal, q_start, kv_start, scale)


@_attention_prefill.register_fake
def _(q: Tensor, *rest: object) -> Tensor:
    return q.new_empty(q.shape)

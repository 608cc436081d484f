"""The public operator `attention_prefill`: checks, dispatch, registration."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from wide_kernels.attention_prefill.reference import attention_prefill_reference
from wide_kernels.checks import (
    attention_sizes,
    group_width,
    mask_sizes,
    per_sequence,
    same_device,
    same_size,
    too_long_heads,
)
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
    size = q.shape[3]
    refused = too_long_heads(size)
    if size not in (64, 128):
        refused["gluon"] = f"head_dim must be 64 or 128, got {size}"
    elif k.stride() != v.stride() or rows_of_keys(k) is None or rows_of_keys(v) is None:
        refused["gluon"] = f"k and v must both be rows of H_k * d or more numbers, their strides are {k.stride()}"
    return Problem(op, q.device, q.dtype, {"head_dim": size}, refused=refused)


def rows_of_keys(k: Tensor) -> int | None:
    """Rows from one sequence to the next if k [B, T_k, H_k, d] is a part of one matrix with a key a row, else None."""
    batch, keys, heads, size = k.shape
    to_sequence, to_key, to_head, to_channel = k.stride()
    if to_channel != 1 or to_key < (heads - 1) * to_head + size or to_key % 8 or to_head % 8 or k.storage_offset() % 8:
        return None
    if batch == 1:
        return keys
    return to_sequence // to_key if to_sequence % to_key == 0 else None


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
    if backend == "gluon":
        from wide_kernels.attention_prefill.gluon import attend as attend_on_hopper

        return attend_on_hopper(q, k, v, index, count, causal, q_start, kv_start, scale)
    if backend == "triton":
        from wide_kernels.attention_prefill.triton import attend

        return attend(q, k, v, index, count, causal, q_start, kv_start, scale)
    return attention_prefill_reference(q, k, v, mask, causal, q_start, kv_start, scale)


@_attention_prefill.register_fake
def _(q: Tensor, *rest: object) -> Tensor:
    return q.new_empty(q.shape)

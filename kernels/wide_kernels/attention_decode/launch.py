"""The public operator `attention_decode`: checks, dispatch, registration."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from wide_kernels.attention_decode.reference import attention_decode_reference
from wide_kernels.checks import (
    attention_sizes,
    group_width,
    mask_sizes,
    per_sequence,
    same_device,
    same_size,
    too_long_heads,
)
from wide_kernels.dispatch import Problem, choose, multiprocessors

MOST_SHARED = 16  # query heads of a KV head in the one-launch kernel
# Where one launch was faster than two on an H200 (reports/kernels/h200_decode.md; 8 KV heads of 128, half of them
# skipped, calls in a CUDA graph), in times of Triton's over its own: one sequence 0.97 at 1k keys, 1.15 at 4k, 1.21 at
# 8k, 1.13 at 16k, 1.05 at 64k; two 0.84 at 1k, 1.09 at 16k; four 0.97 at 4k, 1.02 at 16k; eight 0.83 at 1k, 0.93 at 4k.
# The kernel counts pairs, whichever sequence they belong to: 16 are two sequences of those heads.
FEW_PAIRS = 16
ENOUGH_KEYS = 4096  # times the batch


def attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    kv_len: Tensor | None = None,
    scale: float | None = None,
    *,
    kv_start: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention of one new token a sequence against its cache; only the executed groups of query heads run.

    q [B, 1, H_q, d], k and v [B, T_k, H_k, d] (T_k may be the cache's capacity), mask bool [B, N_G] -> [B, 1, H_q, d],
    exact zeros in the heads of skipped groups. Sequence b sees keys kv_start[b] (default 0) to kv_len[b] - 1 (default
    T_k - 1); kv_len and kv_start: int64 [B]. scale: 1 / sqrt(d) unless given. No gradients. Raises UnsupportedError.
    """
    chosen = choose(attention_decode_problem(q, k, v, mask, kv_len, scale, kv_start=kv_start), backend)
    o = torch.ops.wide_kernels.attention_decode(q, k, v, mask, kv_len, kv_start, scale, chosen)
    return cast(Tensor, o)


def attention_decode_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    kv_len: Tensor | None = None,
    scale: float | None = None,
    *,
    kv_start: Tensor | None = None,
) -> Problem:
    """The facts that decide the backend of `attention_decode`; raises UnsupportedError for what no backend takes."""
    op = "attention_decode"
    batch, tokens, heads = attention_sizes(op, q, k, v)
    same_size(op, "T of q, one new token a sequence,", tokens, 1)
    per_sequence(op, q, batch, kv_len=kv_len, kv_start=kv_start)
    rows, groups = mask_sizes(op, mask)
    same_device(op, q, "the mask", mask)
    same_size(op, "rows of the mask (B)", rows, batch)
    group_width(op, "H_q", heads, groups)
    refused = too_long_heads(q.shape[3])
    why = _not_on_hopper(heads // k.shape[2], k, v)
    if why:
        refused["gluon"] = why
    why = _not_worth_one_launch(batch, *k.shape[1:3])
    passed_over = {"gluon": why} if why else {}
    return Problem(op, q.device, q.dtype, {"head_dim": q.shape[3]}, refused=refused, passed_over=passed_over)


def _not_worth_one_launch(batch: int, keys: int, kv_heads: int) -> str | None:
    """Why auto leaves out the one-launch kernel, which could run; None where it was measured to be faster."""
    if batch * kv_heads > FEW_PAIRS:
        return f"it does not pay for more than {FEW_PAIRS} pairs of sequence and KV head, got {batch * kv_heads}"
    if keys < ENOUGH_KEYS * batch:
        return f"it does not pay for less than {ENOUGH_KEYS * batch} keys at batch {batch}, got {keys}"
    return None


def _not_on_hopper(shared: int, k: Tensor, v: Tensor) -> str | None:
    """What the one-launch kernel does not take: it copies keys 16 bytes at a time and holds 16 query heads at most."""
    kv_heads, size = k.shape[2:]
    if size not in (64, 128):
        return f"head_dim must be 64 or 128, got {size}"
    if shared > MOST_SHARED:
        return f"at most {MOST_SHARED} query heads may share a KV head, got {shared}"
    if kv_heads > multiprocessors(k.device):
        return f"there must be a multiprocessor for each KV head, got {kv_heads} heads"
    for name, tensor in (("k", k), ("v", v)):
        if not in_packets(tensor):
            return f"heads of {name} must be contiguous and 32-byte multiples apart, its strides are {tensor.stride()}"
    return None


def in_packets(tensor: Tensor) -> bool:
    """Whether every head of q, k or v [B, T, H, d] can be read 16 bytes at a time."""
    sizes, strides = tensor.shape, tensor.stride()
    apart = (stride % 16 == 0 for size, stride in zip(sizes[:3], strides[:3], strict=True) if size > 1)
    return strides[3] == 1 and all(apart) and tensor.storage_offset() % 8 == 0


@torch.library.custom_op(
    "wide_kernels::attention_decode",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor mask, Tensor? kv_len, Tensor? kv_start, float? scale, str backend)"
    " -> Tensor",
)
def _attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    kv_len: Tensor | None,
    kv_start: Tensor | None,
    scale: float | None,
    backend: str,
) -> Tensor:
    if backend == "gluon":
        from wide_kernels.attention_decode.gluon import attend as attend_on_hopper

        return attend_on_hopper(q, k, v, mask, kv_len, kv_start, scale)
    if backend == "triton":
        from wide_kernels.attention_decode.triton import attend

        return attend(q, k, v, mask, kv_len, kv_start, scale)
    return attention_decode_reference(q, k, v, mask, kv_len, kv_start, scale)


@_attention_decode.register_fake
def _(q: Tensor, *rest: object) -> Tensor:
    return q.new_empty(q.shape)

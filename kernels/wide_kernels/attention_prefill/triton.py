"""Triton: flash attention of gathered queries, one tile a program, each row of the output written once.

The softmax goes along with the keys, so that no scores are kept.

    index of rows --> q of BM rows that run the head --+
    K, V block by block ------------------------------> scores --> softmax so far --> x V --> rows of out, each once
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wide_kernels.attention_prefill.configs import tile_config
from wide_kernels.dispatch import on_device_of

LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["rows", "tokens", "steps"])
def bounds_kernel(index, count, bounds, rows, tokens, batch, steps, BLOCK: tl.constexpr):
    """bounds[g, b] = how many executing rows of group g stand before sequence b, by binary search; b from 0 to B."""
    group = tl.program_id(0)
    sequence = tl.arange(0, BLOCK)
    index += group.to(tl.int64) * rows
    low = tl.zeros((BLOCK,), tl.int32)
    high = low + tl.load(count + group)
    for _ in range(0, steps):
        open_ = low < high
        middle = (low + high) // 2
        before = tl.load(index + middle, mask=open_, other=0) < sequence * tokens
        low = tl.where(open_ & before, middle + 1, low)
        high = tl.where(open_ & ~before, middle, high)
    tl.store(bounds + group * (batch + 1) + sequence, low, mask=sequence <= batch)


@triton.jit
def tile_of(index, count, bounds, group, sequence, batch, rows, tokens, order, ROWS: tl.constexpr, ONE: tl.constexpr):
    """(executing list, skipping list, their border, first place) of the tile that comes `order`-th in its sequence.

    The places of a sequence are its executing rows and then its skipping ones. Tiles with executing rows come first,
    the last of them (the most keys) in front, so that what is left at the end of the launch is short.
    """
    executed = tl.load(count + group)
    before, live = 0, executed
    if not ONE:
        before = tl.load(bounds + group * (batch + 1) + sequence)
        live = tl.load(bounds + group * (batch + 1) + sequence + 1) - before
    tiles = tl.cdiv(live, ROWS)
    tile = tl.where(order < tiles, tiles - 1 - order, order)
    executing = index + group.to(tl.int64) * rows + before
    # Place p >= live holds entry p - live of the sequence's skipping rows.
    skipping = index + group.to(tl.int64) * rows + executed + sequence * tokens - before - live
    return executing, skipping, live, tile * ROWS


@triton.jit
def walk_keys(
    acc, total, peak, q, k, v, stride_k, stride_v, begin, end, position, scale,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, BORDER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys begin .. end - 1; only the BORDER form masks keys, in its loads and in its scores."""
    key = tl.arange(0, BN)
    depth = tl.arange(0, DP)
    k_tile = k + begin.to(tl.int64) * stride_k + key[None, :] * stride_k + depth[:, None]
    v_tile = v + begin.to(tl.int64) * stride_v + key[:, None] * stride_v + depth[None, :]
    for first in range(begin, end, BN):
        if BORDER:
            known = key < end - first
            keys = tl.load(k_tile, mask=known[None, :] & (depth < D)[:, None], other=0.0)
        elif D == DP:
            keys = tl.load(k_tile)
        else:
            keys = tl.load(k_tile, mask=(depth < D)[:, None], other=0.0)
        scores = tl.dot(q, keys, input_precision=PRECISION)
        if BORDER:
            scores = tl.where((first + key)[None, :] <= position[:, None], scores * scale, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, 1))
            floor = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen no key yet
            p = tl.exp2(scores - floor[:, None])
            shrink = tl.exp2(peak - floor)
        else:
            higher = tl.maximum(peak, tl.max(scores, 1) * scale)
            p = tl.exp2(scores * scale - higher[:, None])
            shrink = tl.exp2(peak - higher)
        if BORDER:
            values = tl.load(v_tile, mask=known[:, None] & (depth < D)[None, :], other=0.0)
        elif D == DP:
            values = tl.load(v_tile)
        else:
            values = tl.load(v_tile, mask=(depth < D)[None, :], other=0.0)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(values.dtype), values, acc, input_precision=PRECISION)
        peak = higher
        k_tile += BN * stride_k
        v_tile += BN * stride_v
    return acc, total, peak


@triton.jit(do_not_specialize=["rows", "tokens", "keys", "batch"])
def tile_kernel(
    q,
    k,
    v,
    o,
    index,
    count,
    bounds,
    q_start,
    kv_start,
    rows,
    tokens,
    keys,
    batch,
    scale,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    H: tl.constexpr,
    SHARED: tl.constexpr,
    GROUP: tl.constexpr,
    N_D: tl.constexpr,
    DP: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_Q_START: tl.constexpr,
    HAS_KV_START: tl.constexpr,
    ONE: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PACK: tl.constexpr,
):
    """BM / PACK tokens of one sequence x PACK query heads that share a group (GROUP heads) and a KV head (SHARED).

    `scale` holds log2 e. Row m of the tile is token m // PACK, head m % PACK.
    """
    packs: tl.constexpr = H // PACK
    pid = tl.program_id(0)
    head = (pid % packs) * PACK
    sequence = (pid // packs) % batch
    executing, skipping, live, first = tile_of(
        index, count, bounds, head // GROUP, sequence, batch, rows, tokens, pid // packs // batch, BM // PACK, ONE
    )
    place = first + tl.arange(0, BM) // PACK
    runs = place < live
    inside = place < tokens
    row = tl.load(tl.where(runs, executing, skipping) + place, mask=inside, other=0) - sequence * tokens
    heads = head + tl.arange(0, BM) % PACK
    depth = tl.arange(0, DP)
    target = o + sequence.to(tl.int64) * tokens * (H * N_D)
    target += row[:, None].to(tl.int64) * (H * N_D) + heads[:, None] * N_D + depth[None, :]
    written = inside[:, None] & (depth < N_D)[None, :]
    if first < live:
        lowest = tl.load(executing + first) - sequence * tokens
        highest = tl.load(executing + tl.minimum(first + BM // PACK, live) - 1) - sequence * tokens
        # Rows behind the border read the tile's first query: their own values are never touched.
        source = tl.where(runs, row, lowest)
        q_tile = q + sequence.to(tl.int64) * stride_qb + source[:, None].to(tl.int64) * stride_qt
        q_tile += heads[:, None] * stride_qh + depth[None, :]
        if N_D == DP:
            queries = tl.load(q_tile)
        else:
            queries = tl.load(q_tile, mask=(depth < N_D)[None, :], other=0.0)
        begin = 0
        if HAS_KV_START:
            begin = tl.maximum(tl.load(kv_start + sequence), 0).to(tl.int32)
        seen_by_all = keys
        end = keys
        position = source * 0 + (keys - 1)
        if CAUSAL:
            start = keys - tokens
            if HAS_Q_START:
                start = tl.load(q_start + sequence).to(tl.int32)
            seen_by_all = tl.minimum(start + lowest + 1, keys)
            end = tl.minimum(start + highest + 1, keys)
            position = tl.minimum(start + source, keys - 1)
        border = begin + tl.maximum(seen_by_all - begin, 0) // BN * BN
        kv = head // SHARED
        k += sequence.to(tl.int64) * stride_kb + kv * stride_kh
        v += sequence.to(tl.int64) * stride_vb + kv * stride_vh
        acc = tl.zeros((BM, DP), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        peak = tl.full((BM,), float("-inf"), tl.float32)
        acc, total, peak = walk_keys(
            acc, total, peak, queries, k, v, stride_kt, stride_vt, begin, border, position, scale,
            N_D, DP, BN, False, PRECISION,
        )  # fmt: skip
        acc, total, peak = walk_keys(
            acc, total, peak, queries, k, v, stride_kt, stride_vt, border, end, position, scale,
            N_D, DP, BN, True, PRECISION,
        )  # fmt: skip
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        acc = tl.where(runs[:, None], acc, 0.0)
        tl.store(target, acc.to(o.dtype.element_ty), mask=written)
    else:
        tl.store(target, tl.zeros((BM, DP), o.dtype.element_ty), mask=written)


def sequence_bounds(index: Tensor, count: Tensor, batch: int) -> Tensor:
    """[N_G, B + 1]: where each sequence begins in each group's list of executing rows; for one sequence unused."""
    if batch == 1:
        return count
    groups, rows = index.shape
    bounds = torch.empty(groups, batch + 1, dtype=torch.int32, device=index.device)
    bounds_kernel[(groups,)](
        index, count, bounds, rows, rows // batch, batch, rows.bit_length(), triton.next_power_of_2(batch + 1)
    )
    return bounds


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    count: Tensor,
    causal: bool,
    q_start: Tensor | None,
    kv_start: Tensor | None,
    scale: float | None,
) -> Tensor:
    """`attention_prefill` for q [B, T, H_q, d] and a layout's index and count."""
    batch, tokens, heads, size = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if o.numel() == 0:
        return o
    q, k, v = (tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in (q, k, v))
    scale = size**-0.5 if scale is None else scale
    if scale < 0:  # the kernel takes the largest score before it scales
        q, scale = -q, -scale
    shared, group = heads // kv_heads, heads // index.shape[0]
    tile = tile_config(tokens, group, shared, size, q.dtype)
    grid = triton.cdiv(tokens * tile["PACK"], tile["BM"]) * batch * (heads // tile["PACK"])
    with on_device_of(q):
        bounds = sequence_bounds(index, count, batch)
        tile_kernel[(grid,)](
            q, k, v, o, index, count, bounds,
            count if q_start is None else q_start.contiguous(), count if kv_start is None else kv_start.contiguous(),
            batch * tokens, tokens, keys, batch, scale * LOG2_E,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            heads, shared, group, size, triton.next_power_of_2(size),
            causal, q_start is not None, kv_start is not None, batch == 1,
            "ieee" if q.dtype is torch.float32 else "tf32", **tile,
        )  # fmt: skip
    return o

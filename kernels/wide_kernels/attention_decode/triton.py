"""Triton: flash decoding whose programs share the executed work evenly, whatever the mask and the lengths are.

Work is counted in blocks of BN keys of an active pair: a sequence and a KV head of which some query head runs. All
blocks in order are cut into PROGRAMS equal runs, which cross from pair to pair. Every program finds its own run from
the mask, so nothing of a skipped pair is read, no processor idles because others' heads are skipped, and the host knows
nothing. Program p leaves its partial result of the i-th active pair in slot p + i (along the runs p and i only grow, so
no two share a slot); a second launch merges the slots of each head and writes zeros where it is skipped.

    mask, lengths --> active pairs --> blocks of keys in order --> PROGRAMS equal runs
    q, K, V of a run --> partial (max, sum, o) --> slot p + i --(second launch)--> merged, zeros where skipped --> out
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from wide_kernels.attention_decode.configs import MAX_PAIRS, decode_config
from wide_kernels.dispatch import is_hopper, on_device_of
from wide_kernels.tuning.tiles import padded_rows

LOG2_E = 1.4426950408889634
MERGED = 64  # slots merged at a time


@triton.jit
def first_key(kv_start, sequence, inside, HAS_KV_START: tl.constexpr):
    """The first visible key of each sequence."""
    if HAS_KV_START:
        return tl.maximum(tl.load(kv_start + sequence, mask=inside, other=0).to(tl.int32), 0)
    return sequence * 0


@triton.jit
def end_key(kv_len, sequence, keys, inside, HAS_KV_LEN: tl.constexpr):
    """One past the last visible key of each sequence."""
    if HAS_KV_LEN:
        return tl.minimum(tl.load(kv_len + sequence, mask=inside, other=0).to(tl.int32), keys)
    return sequence * 0 + keys


@triton.jit
def all_work(
    mask, kv_len, kv_start, batch, keys,
    H_K: tl.constexpr, SHARED: tl.constexpr, GROUP: tl.constexpr, HAS_KV_LEN: tl.constexpr, HAS_KV_START: tl.constexpr,
    PAIRS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """For every pair b * H_k + h: (blocks to do, blocks before it, active pairs before it)."""
    pair = tl.arange(0, PAIRS)
    inside = pair < batch * H_K
    sequence = pair // H_K
    first_group = pair % H_K * SHARED // GROUP
    last_group = (pair % H_K * SHARED + SHARED - 1) // GROUP
    groups: tl.constexpr = H_K * SHARED // GROUP
    runs = tl.zeros((PAIRS,), tl.int32)
    for j in tl.static_range((SHARED + GROUP - 2) // GROUP + 1):  # a KV head meets no more groups than these
        group = tl.minimum(first_group + j, last_group)
        runs |= tl.load(mask + sequence * groups + group, mask=inside, other=0).to(tl.int32)
    seen = end_key(kv_len, sequence, keys, inside, HAS_KV_LEN) - first_key(kv_start, sequence, inside, HAS_KV_START)
    blocks = tl.where(inside & (runs != 0), tl.maximum(seen + BN - 1, 0) // BN, 0)
    active = (blocks > 0).to(tl.int32)
    return blocks, tl.cumsum(blocks, 0) - blocks, tl.cumsum(active, 0) - active


@triton.jit
def picked(values, chosen):
    """The one value where `chosen` is true."""
    return tl.sum(tl.where(chosen, values, 0), 0)


@triton.jit(do_not_specialize=["batch", "keys"])
def split_kernel(
    q,
    k,
    v,
    mask,
    kv_len,
    kv_start,
    acc_out,
    peak_out,
    total_out,
    batch,
    keys,
    scale,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    H_K: tl.constexpr,
    SHARED: tl.constexpr,
    GROUP: tl.constexpr,
    N_D: tl.constexpr,
    DP: tl.constexpr,
    HAS_KV_LEN: tl.constexpr,
    HAS_KV_START: tl.constexpr,
    PAIRS: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One run of blocks: for each pair that it meets, softmax statistics and weighted values of all its query heads.

    The heads of a pair are rows of one tile and share every read of keys and values. `scale` holds log2 e.
    """
    if PDL:
        gdc_launch_dependents()
    blocks, before, rank = all_work(
        mask, kv_len, kv_start, batch, keys, H_K, SHARED, GROUP, HAS_KV_LEN, HAS_KV_START, PAIRS, BN
    )
    work = tl.sum(blocks, 0)
    program = tl.program_id(0)
    share, extra = work // PROGRAMS, work % PROGRAMS
    at = program * share + tl.minimum(program, extra)
    stop = at + share + (program < extra).to(tl.int32)
    pair_number = tl.arange(0, PAIRS)
    head = tl.arange(0, BM)
    depth = tl.arange(0, DP)
    key = tl.arange(0, BN)
    groups: tl.constexpr = H_K * SHARED // GROUP
    while at < stop:
        here = (before <= at) & (at < before + blocks)
        pair = picked(pair_number, here)
        skipped = at - picked(before, here)  # blocks of this pair that the program before does
        todo = tl.minimum(stop - at, picked(blocks, here) - skipped)
        sequence, kv = pair // H_K, pair % H_K
        begin = first_key(kv_start, sequence, True, HAS_KV_START) + skipped * BN
        end = tl.minimum(end_key(kv_len, sequence, keys, True, HAS_KV_LEN), begin + todo * BN)
        q_head = kv * SHARED + head
        live = tl.load(mask + sequence * groups + q_head // GROUP, mask=head < SHARED, other=0) != 0
        queries = tl.load(
            q + sequence.to(tl.int64) * stride_qb + q_head[:, None] * stride_qh + depth[None, :],
            mask=live[:, None] & (depth < N_D)[None, :],
            other=0.0,
        )
        k_tile = k + sequence.to(tl.int64) * stride_kb + begin.to(tl.int64) * stride_kt + kv * stride_kh
        v_tile = v + sequence.to(tl.int64) * stride_vb + begin.to(tl.int64) * stride_vt + kv * stride_vh
        k_tile += key[None, :] * stride_kt + depth[:, None]
        v_tile += key[:, None] * stride_vt + depth[None, :]
        acc = tl.zeros((BM, DP), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        peak = tl.full((BM,), float("-inf"), tl.float32)
        for first in range(begin, end, BN):
            known = key < end - first
            tile = tl.load(k_tile, mask=known[None, :] & (depth < N_D)[:, None], other=0.0)
            scores = tl.dot(queries, tile, input_precision=PRECISION) * scale
            scores = tl.where(known[None, :], scores, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, 1))
            p = tl.exp2(scores - higher[:, None])
            shrink = tl.exp2(peak - higher)
            values = tl.load(v_tile, mask=known[:, None] & (depth < N_D)[None, :], other=0.0)
            total = total * shrink + tl.sum(p, 1)
            acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
            peak = higher
            k_tile += BN * stride_kt
            v_tile += BN * stride_vt
        entry = (program + picked(rank, here)) * SHARED + head
        tl.store(peak_out + entry, peak, mask=live)
        tl.store(total_out + entry, total, mask=live)
        tl.store(acc_out + entry[:, None] * DP + depth[None, :], acc, mask=live[:, None])
        at += todo


@triton.jit
def program_of(block, share, extra):
    """The program whose run holds a block."""
    long = extra * (share + 1)  # blocks of the first `extra` programs, which have one more
    return tl.where(block < long, block // (share + 1), extra + (block - long) // tl.maximum(share, 1))


@triton.jit(do_not_specialize=["batch", "keys"])
def merge_kernel(
    o,
    mask,
    kv_len,
    kv_start,
    acc_in,
    peak_in,
    total_in,
    batch,
    keys,
    H_K: tl.constexpr,
    SHARED: tl.constexpr,
    GROUP: tl.constexpr,
    N_D: tl.constexpr,
    DP: tl.constexpr,
    HAS_KV_LEN: tl.constexpr,
    HAS_KV_START: tl.constexpr,
    PAIRS: tl.constexpr,
    BN: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One query head of one sequence, from the slots of its pair. With PDL it starts while the splits still run."""
    blocks, before, rank = all_work(
        mask, kv_len, kv_start, batch, keys, H_K, SHARED, GROUP, HAS_KV_LEN, HAS_KV_START, PAIRS, BN
    )
    work = tl.sum(blocks, 0)
    share, extra = work // PROGRAMS, work % PROGRAMS
    pair, row = tl.program_id(0) // SHARED, tl.program_id(0) % SHARED
    here = tl.arange(0, PAIRS) == pair
    count, at, number = picked(blocks, here), picked(before, here), picked(rank, here)
    groups: tl.constexpr = H_K * SHARED // GROUP
    q_head = pair % H_K * SHARED + row
    live = tl.load(mask + pair // H_K * groups + q_head // GROUP) != 0
    depth = tl.arange(0, DP)
    acc = tl.zeros((DP,), tl.float32)
    total = 0.0
    if PDL:
        gdc_wait()  # all of the above comes from the mask
        gdc_launch_dependents()  # not before: what starts while keys are read is in the way of that
    if live & (count > 0):
        first = program_of(at, share, extra)
        last = program_of(at + count - 1, share, extra)
        peak = float("-inf")
        for start in range(first, last + 1, SLOTS):
            slot = start + tl.arange(0, SLOTS)
            used = slot <= last
            entry = (slot + number) * SHARED + row
            peaks = tl.load(peak_in + entry, mask=used, other=float("-inf"))
            totals = tl.load(total_in + entry, mask=used, other=0.0)
            parts = tl.load(acc_in + entry[:, None] * DP + depth[None, :], mask=used[:, None], other=0.0)
            higher = tl.maximum(peak, tl.max(peaks, 0))
            weight = tl.exp2(peaks - higher)
            shrink = tl.exp2(peak - higher)
            total = total * shrink + tl.sum(totals * weight, 0)
            acc = acc * shrink + tl.sum(parts * weight[:, None], 0)
            peak = higher
        acc = acc / total
    target = o + (pair // H_K).to(tl.int64) * (H_K * SHARED * N_D) + q_head * N_D + depth
    tl.store(target, acc.to(o.dtype.element_ty), mask=depth < N_D)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    kv_len: Tensor | None,
    kv_start: Tensor | None,
    scale: float | None,
) -> Tensor:
    """`attention_decode` for q [B, 1, H_q, d]; many sequences take several launches."""
    batch, kv_heads = q.shape[0], k.shape[2]
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    q, k, v = (tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in (q, k, v))
    step = max(1, MAX_PAIRS // kv_heads)
    with on_device_of(q):
        for first in range(0, batch, step):
            part = slice(first, first + step)
            lengths, starts = (None if where is None else where[part].contiguous() for where in (kv_len, kv_start))
            _attend(o[part], q[part], k[part], v[part], mask[part].contiguous(), lengths, starts, scale)
    return o


def _attend(
    o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    kv_len: Tensor | None,
    kv_start: Tensor | None,
    scale: float | None,
) -> None:
    batch, _, heads, size = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    shared, pairs, padded = heads // kv_heads, batch * kv_heads, triton.next_power_of_2(size)
    config = decode_config(size, q.dtype, q.device, pairs * keys)
    slots = config["PROGRAMS"] + pairs
    acc = torch.empty(slots, shared, padded, dtype=torch.float32, device=q.device)
    peak, total = torch.empty(2, slots, shared, dtype=torch.float32, device=q.device)
    known = (kv_len is not None, kv_start is not None)
    flags = mask.view(torch.uint8)
    lengths, starts = (flags if where is None else where for where in (kv_len, kv_start))  # else pointers not followed
    sizes = (kv_heads, shared, heads // mask.shape[1], size, padded, *known, triton.next_power_of_2(pairs))
    scale = size**-0.5 if scale is None else scale
    overlap = is_hopper(q.device)
    split_kernel[(config["PROGRAMS"],)](
        q, k, v, flags, lengths, starts, acc, peak, total, batch, keys, scale * LOG2_E,
        q.stride(0), q.stride(2), *k.stride()[:3], *v.stride()[:3],
        *sizes, "ieee" if q.dtype is torch.float32 else "tf32", padded_rows(shared), PDL=overlap, **config,
    )  # fmt: skip
    merge_kernel[(batch * heads,)](
        o, flags, lengths, starts, acc, peak, total, batch, keys, *sizes, config["BN"], config["PROGRAMS"],
        min(MERGED, triton.next_power_of_2(config["PROGRAMS"])), overlap, **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip

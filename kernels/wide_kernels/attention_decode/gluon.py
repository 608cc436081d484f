"""Gluon, for Hopper: one launch whose programs hand each other their parts, for few (sequence, KV head) pairs.

The programs are shared out over the active pairs, as many to each; a program takes an equal run of its pair's keys.
Keys and values stream through a ring in shared memory that is being filled before anything else is asked for; each warp
weighs its own keys (the compiler lets warps meet twice a step all the same). Then every program of a pair publishes its
part of the result and merges a slice of the whole from the parts of all.

A published word is its own flag: its lowest bit is set, so that it is not zero, which costs half a unit in the last
place of fp32. Whoever reads it puts the zero back. So no fence, no counter and no second launch lies between the last
key and the result.

All programs of a pair must be resident at once, else they wait forever; as in `meeting.py`, they have adjacent numbers,
which a GPU starts in order, and the launcher starts no more programs than the whole GPU holds. A launch beside others
gets on once they end; one that is given a part of the GPU only, or two that hold a part each, would not. Every stream
and every captured graph has words of its own (`counters.py`).

    mask --> this program's pair and run of keys
    K, V --> ring in shared memory --> each warp: scores x weights x V --> part of the program --> words
    words of all programs of the pair --wait--> merged slice --> out
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mma_v2

from wide_kernels.attention_decode.configs import hopper_config
from wide_kernels.attention_decode.launch import in_packets
from wide_kernels.attention_decode.triton import LOG2_E
from wide_kernels.counters import counters
from wide_kernels.dispatch import on_device_of
from wide_kernels.gluon_names import cp_async

BM = gl.constexpr(16)  # rows of an mma tile: the query heads that share a KV head, the rest padding
EVEN = gl.constexpr(16)  # runs begin at multiples of this many keys
LOWEST = gl.constexpr(-1e30)  # in place of the logarithm of an empty sum


@gluon.jit
def plus(a, b):
    """For a scan."""
    return a + b


@gluon.jit
def picked(values, chosen):
    """The one value where `chosen` is true."""
    return gl.sum(gl.where(chosen, values, 0), 0)


@gluon.jit
def quotient(a, b):
    """a // b for numbers that are not negative: half the instructions of a signed division."""
    return (a.to(gl.uint32) // b.to(gl.uint32)).to(gl.int32)


@gluon.jit
def published(x):
    """fp32 as a word that is not zero."""
    return x.to(gl.int32, bitcast=True) | 1


@gluon.jit
def run_of(
    mask, kv_len, kv_start, batch, keys, program,
    H_K: gl.constexpr, SHARED: gl.constexpr, GROUP: gl.constexpr, HAS_KV_LEN: gl.constexpr,
    HAS_KV_START: gl.constexpr, PAIRS: gl.constexpr, PROGRAMS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """(runs of every pair, pair, first key, end key, part, parts) of a program; part >= parts: it has no work."""
    VECTOR: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    number = gl.arange(0, PAIRS, VECTOR)
    inside = number < batch * H_K
    sequence = number // H_K
    groups: gl.constexpr = H_K * SHARED // GROUP
    first_group = number % H_K * SHARED // GROUP
    last_group = (number % H_K * SHARED + SHARED - 1) // GROUP
    runs = gl.zeros([PAIRS], gl.int32, VECTOR)
    for j in gl.static_range((SHARED + GROUP - 2) // GROUP + 1):  # a KV head meets no more groups than these
        group = gl.minimum(first_group + j, last_group)
        runs |= gl.load(mask + sequence * groups + group, mask=inside, other=0).to(gl.int32)
    begins = gl.zeros([PAIRS], gl.int32, VECTOR)
    if HAS_KV_START:
        begins = gl.maximum(gl.load(kv_start + sequence, mask=inside, other=0).to(gl.int32), 0)
    ends = begins * 0 + keys
    if HAS_KV_LEN:
        ends = gl.minimum(gl.load(kv_len + sequence, mask=inside, other=0).to(gl.int32), keys)
    active = (runs != 0).to(gl.int32)
    count = gl.sum(active, 0)
    some = gl.maximum(count, 1)
    # Program p works on active pair p * count // PROGRAMS; the launcher sees to it that there are enough for all.
    rank = program * count // PROGRAMS
    lowest = quotient(rank * PROGRAMS + some - 1, some)
    sharing = quotient((rank + 1) * PROGRAMS + some - 1, some) - lowest
    here = (gl.associative_scan(active, 0, plus) == rank + 1) & (active != 0)
    pair = picked(number, here)
    begin = picked(begins, here)
    end = gl.maximum(picked(ends, here), begin)
    units = (end - begin + EVEN - 1) // EVEN
    parts = gl.minimum(gl.minimum(sharing, SLOTS), gl.maximum(units, 1))
    part = program - lowest
    first = begin + quotient(units * part, parts) * EVEN
    end = gl.minimum(begin + quotient(units * (part + 1), parts) * EVEN, end)
    return runs, pair, first, end, part, gl.where(count > 0, parts, 0)


@gluon.jit
def fetch(
    k_base, v_base, first, end, turn, k_slots, v_slots,
    STEP_K: gl.constexpr, STEP_V: gl.constexpr,
    LOAD: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Begin to copy the keys and values of step `turn`, zeros behind the end; each warp's KEYS lie together."""
    WARPS: gl.constexpr = gl.num_warps()
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LOAD)))[:, None, None]
    place = gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(2, LOAD)))[None, :, None]
    depth = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, LOAD)))[None, None, :]
    at = first + turn * (WARPS * KEYS)
    key = warp * KEYS + place
    known = key < end - at
    slot = turn % STAGES
    k_tile = k_base + at.to(gl.int64) * STEP_K
    v_tile = v_base + at.to(gl.int64) * STEP_V
    cp_async(k_slots.index(slot), k_tile + (key * STEP_K + depth), mask=known)
    cp_async(v_slots.index(slot), v_tile + (key * STEP_V + depth), mask=known)


@gluon.jit
def publish(
    acc, total, peak, own, SCORES: gl.constexpr, SHARED: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr
):  # fmt: skip
    """Make one sum of the warps' [warps, BM, D] and store it, divided by its weights, in this program's words."""
    WARPS: gl.constexpr = gl.num_warps()
    PART: gl.constexpr = gl.BlockedLayout([WARPS, 1, 4], [1, 128 // D, D // 4], [1, WARPS, 1], [2, 1, 0])
    OWN: gl.constexpr = gl.SliceLayout(0, PART)
    PADDED: gl.constexpr = gl.PaddedSharedLayout.with_identity_for([[D, 8]], [WARPS, BM, D], [2, 1, 0])
    sums = gl.allocate_shared_memory(gl.float32, [WARPS, BM, D], PADDED)
    peaks = gl.allocate_shared_memory(gl.float32, [WARPS, BM], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    totals = gl.allocate_shared_memory(gl.float32, [WARPS, BM], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    sums.store(acc)
    peaks.store(peak)
    totals.store(total)
    # Each thread reads what all warps have for its own channels.
    peak = peaks.slice(0, ROWS, 1).load(gl.SliceLayout(2, PART))[:, :, None]
    total = totals.slice(0, ROWS, 1).load(gl.SliceLayout(2, PART))[:, :, None]
    higher = gl.max(peak, 0)
    weight = gl.exp2(peak - gl.where(higher == float("-inf"), 0.0, higher)[None, :, :])
    total = gl.sum(total * weight, 0)
    value = gl.sum(sums.slice(0, ROWS, 1).load(PART) * weight, 0) / gl.where(total > 0, total, 1.0)
    size = gl.maximum(higher + gl.log2(total), LOWEST)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, OWN))[:, None]
    depth = gl.arange(0, D, gl.SliceLayout(0, OWN))[None, :]
    place = row * D + depth
    # One copy of the logarithm for each slice: who reads a word clears it, so nobody else may need it.
    WIDTH: gl.constexpr = 4 * WARPS
    copies = published(size.broadcast_to([ROWS, D]))
    gl.store(own + SHARED * D + place // WIDTH, copies, mask=(row < SHARED) & (depth % WIDTH == 0))
    gl.store(own + place, published(value), mask=row < SHARED)


@gluon.jit
def merge_slices(
    o, mask, words, sequence, kv, part, parts,
    H: gl.constexpr, SHARED: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Of a pair's result the slices number part, part + parts, ..., as soon as all its programs have published them."""
    WARPS: gl.constexpr = gl.num_warps()
    SLICE: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [1, WARPS], [1, 0])
    WIDTH: gl.constexpr = 4 * WARPS
    SLICES: gl.constexpr = SHARED * D // WIDTH
    RECORD: gl.constexpr = SHARED * D + SLICES
    slot = gl.arange(0, SLOTS, gl.SliceLayout(1, SLICE))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, SLICE))
    used = slot < parts
    for number in range(part, SLICES, parts):
        head = kv * SHARED + number * WIDTH // D
        live = gl.load(mask + head // GROUP) != 0
        size_at = words + slot * RECORD + SHARED * D + number
        value_at = (words + slot * RECORD)[:, None] + (number * WIDTH + column)[None, :]
        size_bits = gl.zeros([SLOTS], gl.int32, gl.SliceLayout(1, SLICE))
        value_bits = gl.zeros([SLOTS, WIDTH], gl.int32, SLICE)
        missing = parts  # not zero
        while missing != 0:
            size_bits = gl.load(size_at, mask=used, other=1, volatile=True)
            value_bits = gl.load(value_at, mask=used[:, None], other=1, volatile=True)
            absent = (value_bits == 0) | (size_bits == 0)[:, None]
            missing = gl.max(gl.max(absent.to(gl.int32), 0), 0)
        gl.store(size_at, gl.zeros_like(size_bits), mask=used)
        gl.store(value_at, gl.zeros_like(value_bits), mask=used[:, None])
        size = gl.where(used, size_bits.to(gl.float32, bitcast=True), float("-inf"))
        weight = gl.exp2(size - gl.max(size, 0))
        value = gl.where(used[:, None], value_bits.to(gl.float32, bitcast=True), 0.0)
        value = gl.sum(value * weight[:, None], 0) / gl.sum(weight, 0)
        target = o + (sequence.to(gl.int64) * H + head) * D + number * WIDTH % D + column
        gl.store(target, gl.where(live, value, 0.0).to(o.dtype.element_ty))


@gluon.jit(do_not_specialize=["batch", "keys"])
def exchange_kernel(
    q,
    k,
    v,
    o,
    mask,
    kv_len,
    kv_start,
    words,
    batch,
    keys,
    scale,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    H_K: gl.constexpr,
    SHARED: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    STEP_K: gl.constexpr,
    STEP_V: gl.constexpr,
    HAS_KV_LEN: gl.constexpr,
    HAS_KV_START: gl.constexpr,
    PAIRS: gl.constexpr,
    ROWS: gl.constexpr,
    PROGRAMS: gl.constexpr,
    SLOTS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A run of one pair's keys, then a slice of that pair's result. `scale` holds log2 e; ROWS: a power of 2 >= SHARED.

    STEP_K, STEP_V: strides from key to key, known to the compiler so that addresses are ready when the mask arrives.

    words int32 [PROGRAMS, SHARED * D + SHARED * D / (4 warps)]: what a program publishes, its values and, once for each
    slice, the logarithm of its sum of weights. All zero before and after.
    """
    WARPS: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = k.dtype.element_ty
    LOAD: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // D, D // 8], [WARPS, 1, 1], [2, 1, 0])
    Q_LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    RECORD: gl.constexpr = SHARED * D + SHARED * D // (4 * WARPS)

    k_slots = gl.allocate_shared_memory(dtype, [STAGES, WARPS, KEYS, D], gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
    v_slots = gl.allocate_shared_memory(dtype, [STAGES, WARPS, KEYS, D], gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
    q_tile = gl.allocate_shared_memory(dtype, [BM, D], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    program = gl.program_id(0)
    runs, pair, first, end, part, parts = run_of(
        mask, kv_len, kv_start, batch, keys, program,
        H_K, SHARED, GROUP, HAS_KV_LEN, HAS_KV_START, PAIRS, PROGRAMS, SLOTS,
    )  # fmt: skip
    sequence, kv = pair // H_K, pair % H_K
    k_base = k + sequence.to(gl.int64) * stride_kb + kv * stride_kh
    v_base = v + sequence.to(gl.int64) * stride_vb + kv * stride_vh
    steps = gl.where(part < parts, (end - first + WARPS * KEYS - 1) // (WARPS * KEYS), 0)

    row = gl.arange(0, BM, gl.SliceLayout(1, Q_LOAD))[:, None]
    depth = gl.arange(0, D, gl.SliceLayout(0, Q_LOAD))[None, :]
    q_rows = q + sequence.to(gl.int64) * stride_qb + (kv * SHARED + row) * stride_qh + depth
    for turn in range(0, STAGES - 1):
        if turn < steps:
            fetch(k_base, v_base, first, end, turn, k_slots, v_slots, STEP_K, STEP_V, LOAD, KEYS, D, STAGES)
        if turn == 0:
            cp_async(q_tile, q_rows, mask=row < SHARED)
        async_copy.commit_group()

    heads: gl.constexpr = H_K * SHARED
    groups: gl.constexpr = heads // GROUP
    RESULT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    for other in range(program, batch * H_K, PROGRAMS):  # the pairs that nobody works on
        VECTOR: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        if picked(runs, gl.arange(0, PAIRS, VECTOR) == other) == 0:
            head = gl.arange(0, ROWS, gl.SliceLayout(1, RESULT))[:, None]
            channel = gl.arange(0, D, gl.SliceLayout(0, RESULT))[None, :]
            nothing = gl.zeros([ROWS, D], dtype, RESULT)
            gl.store(o + other * (SHARED * D) + head * D + channel, nothing, mask=head < SHARED)

    if part < parts:
        acc = gl.zeros([WARPS, BM, D], gl.float32, SCORES)
        total = gl.zeros([WARPS, BM], gl.float32, gl.SliceLayout(2, SCORES))
        peak = gl.full([WARPS, BM], float("-inf"), gl.float32, gl.SliceLayout(2, SCORES))
        async_copy.wait_group(STAGES - 2)
        queries = q_tile.reshape([1, BM, D]).load(gl.DotOperandLayout(0, SCORES, 2)).broadcast_to([WARPS, BM, D])
        warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, SCORES)))[:, None, None]
        place = gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(1, SCORES)))[None, None, :]
        for turn in range(0, steps):
            if turn + STAGES - 1 < steps:
                fetch(
                    k_base, v_base, first, end, turn + STAGES - 1, k_slots, v_slots, STEP_K, STEP_V,
                    LOAD, KEYS, D, STAGES,
                )  # fmt: skip
            async_copy.commit_group()
            async_copy.wait_group(STAGES - 1)
            tile = k_slots.index(turn % STAGES).permute((0, 2, 1)).load(gl.DotOperandLayout(1, SCORES, 2))
            scores = mma_v2(queries, tile, gl.zeros([WARPS, BM, KEYS], gl.float32, SCORES)) * scale
            known = warp * KEYS + place < end - first - turn * (WARPS * KEYS)
            scores = gl.where(known, scores, float("-inf"))
            higher = gl.maximum(peak, gl.max(scores, 2))
            floor = gl.where(higher == float("-inf"), 0.0, higher)  # a warp that has seen no key yet
            p = gl.exp2(scores - floor[:, :, None])
            shrink = gl.exp2(peak - floor)
            total = total * shrink + gl.sum(p, 2)
            weights = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, SCORES, 2))
            values = v_slots.index(turn % STAGES).load(gl.DotOperandLayout(1, SCORES, 2))
            acc = mma_v2(weights, values, acc * shrink[:, :, None])
            peak = higher

        publish(acc, total, peak, words + program * RECORD, SCORES, SHARED, D, ROWS)
        merge_slices(
            o, mask + sequence * groups, words + (program - part) * RECORD, sequence, kv, part, parts,
            heads, SHARED, GROUP, D, SLOTS,
        )  # fmt: skip


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    kv_len: Tensor | None,
    kv_start: Tensor | None,
    scale: float | None,
) -> Tensor:
    """`attention_decode` for q [B, 1, H_q, d]; several launches where there are more pairs than programs."""
    batch, _, heads, size = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    q = q if in_packets(q) else q.clone(memory_format=torch.contiguous_format)
    # The stride of a dimension of size 1 may be anything, and would hide that the others are multiples of 16.
    strides = [tensor.stride(i) if tensor.shape[i] > 1 else 0 for tensor in (q, k, v) for i in (0, 2)]
    steps = [tensor.stride(1) if keys > 1 else 0 for tensor in (k, v)]
    shared = heads // kv_heads
    config = hopper_config(q.device)
    step = config["PROGRAMS"] // kv_heads
    record = shared * size + shared * size // (4 * config["num_warps"])
    scale = size**-0.5 if scale is None else scale
    known = (kv_len is not None, kv_start is not None)
    with on_device_of(q):
        words = counters("attention_decode", q.device, config["PROGRAMS"] * record)
        for first in range(0, batch, step):
            part = slice(first, first + step)
            flags = mask[part].contiguous().view(torch.uint8)
            lengths, starts = (flags if where is None else where[part].contiguous() for where in (kv_len, kv_start))
            count = len(flags)
            exchange_kernel[(config["PROGRAMS"],)](
                q[part], k[part], v[part], o[part], flags, lengths, starts, words, count, keys, scale * LOG2_E,
                *strides, kv_heads, shared, heads // mask.shape[1], size, *steps, *known,
                triton.next_power_of_2(count * kv_heads), triton.next_power_of_2(shared),
                **config,
            )  # fmt: skip
    return o

"""Triton: the steps of `fused.py`, one launch each.

A compiled torch function did the same at a tenth of the memory's speed (1.07 ms a layer for 16384 tokens of
Llama-3.1-8B shapes on an H200) and cost every process seconds of compilation. PyTorch's own RMSNorm takes 4.2 us for
one row there, this one 1.0. What comes every layer of a decode step starts while the launch before it ends (PDL).
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from wide_kernels.dispatch import is_hopper, on_device_of
from wide_kernels.gemm_mn.one_row import vector_config
from wide_kernels.gemm_mn.triton import activated
from wide_kernels.vector_tiles import products_with, weights_of
from widecli.engine.fused import Places
from widecli.engine.weights import Linear, Norm

ACTIVATION_BLOCK = 2048
HEADS_AT_ONCE = 8
DECODE_ROWS = 128
COUNTED_AT_ONCE = 128
VOCABULARY_PARTS = 64  # programs that look for a row's likeliest token
VOCABULARY_BLOCK = 1024


@triton.jit(do_not_specialize=["stride"])
def normalise_kernel(
    x, weight, out, stride, eps, SIZE: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One row, with Llama's roundings: scaled and rounded, then times the weight and rounded."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PADDED)
    known = i < SIZE
    gain = tl.load(weight + i, mask=known, other=0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + row * stride + i, mask=known, other=0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    scaled = (value * scale).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + i, (scaled * gain).to(out.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=["rows", "groups"])
def count_kernel(mask, active, executed, tokens, rows, groups, BLOCK: tl.constexpr):
    """Add up BLOCK columns of a mask over active rows; the first program counts these, too."""
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = group < groups
    count = tl.load(executed + group, mask=inside, other=0)
    known = tl.zeros((), tl.int64)
    for row in range(rows):
        counted = tl.load(active + row).to(tl.int64)
        known += counted
        count += tl.load(mask + row * groups + group, mask=inside, other=0).to(tl.int64) * counted
    tl.store(executed + group, count, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(tokens, tl.load(tokens) + known)


@triton.jit
def positions_kernel(
    lengths, first_slots, cos_table, sin_table, cos, sin, slots, visible, SIZE: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """One sequence."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    i = tl.arange(0, PADDED)
    known = i < SIZE
    tl.store(cos + row * SIZE + i, tl.load(cos_table + length * SIZE + i, mask=known), mask=known)
    tl.store(sin + row * SIZE + i, tl.load(sin_table + length * SIZE + i, mask=known), mask=known)
    tl.store(slots + row, tl.load(first_slots + row) + length)
    tl.store(visible + row, length + 1)


@triton.jit
def first_of_highest(value, index):
    """(the highest value, the lowest index that has it); none is NaN."""
    highest = tl.max(value, 0)
    return highest, tl.min(tl.where(value == highest, index, 0x7FFFFFFF), 0)


@triton.jit(do_not_specialize=["size", "stride"])
def candidate_kernel(logits, values, indices, size, stride, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The first of the highest logits in one of PARTS parts of a row."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    end = (size * (part + 1)) // PARTS
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    for first in range((size * part) // PARTS, end, BLOCK):
        index = first + lane
        value = tl.load(logits + row * stride + index, mask=index < end, other=float("-inf")).to(tl.float32)
        value = tl.where(value != value, float("inf"), value)  # NaN must be seen
        better = (index < end) & ((value > best) | (where == 0x7FFFFFFF))
        best = tl.where(better, value, best)
        where = tl.where(better, index, where)
    best, where = first_of_highest(best, where)
    tl.store(values + row * PARTS + part, best)
    tl.store(indices + row * PARTS + part, where)


@triton.jit
def likeliest_kernel(values, indices, token, lengths, PARTS: tl.constexpr, COUNTS: tl.constexpr, PDL: tl.constexpr):
    """The first of the best candidates of a row becomes its token."""
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = row * PARTS + tl.arange(0, PARTS)
    _, where = first_of_highest(tl.load(values + part), tl.load(indices + part))
    tl.store(token + row, where.to(tl.int64))
    if COUNTS:
        tl.store(lengths + row, tl.load(lengths + row) + 1)


@triton.jit
def project_kernel(
    x, weight, bias, mask, cos, sin, out, k_slots, v_slots, slots,
    K: tl.constexpr, G: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One row times BN columns of one head, as in `gemm_mn`: half of them from each half of the head, the partners of
    a rotation. Queries and keys are rotated as they are stored, keys and values into the cache.

    Keys and values, which no mask skips, come first: their programs are there while the launch before this one still
    runs, and fetch their first weights meanwhile. The next launch is not let in: attention would be in the way of these
    (and is launched plainly).
    """
    PAIRS: tl.constexpr = BN // 2
    HALF: tl.constexpr = SIZE // 2
    KV_BLOCKS: tl.constexpr = 2 * KV_HEADS * SIZE // BN
    block = tl.program_id(0) - KV_BLOCKS
    if GROUPS > 0:  # each after one of another group
        block = tl.where(block < 0, block, block % GROUPS * (G // BN) + block // GROUPS)
    block = tl.where(block < 0, tl.num_programs(0) + block, block)
    head = block * PAIRS // HALF
    begin = block * PAIRS % HALF
    column = tl.arange(0, BN)
    columns = head * SIZE + begin + column % PAIRS + column // PAIRS * HALF
    chunk = tl.arange(0, BC) * 8
    MASKED: tl.constexpr = K % (BC * 8) != 0
    certain = head * SIZE // G >= GROUPS
    if GROUPS == 0:
        tile = weights_of(weight, columns, chunk, chunk < K, K, MASKED)
    else:
        tile = tl.zeros((BC, BN, 8), weight.dtype.element_ty)
        if certain:
            tile = weights_of(weight, columns, chunk, chunk < K, K, MASKED)
    if PDL:
        gdc_wait()
    runs = certain
    if GROUPS > 0:
        runs = runs | (tl.load(mask + tl.minimum(head * SIZE // G, GROUPS - 1)) != 0)
    y = tl.zeros((BN,), tl.float32)
    if runs:
        if GROUPS > 0:  # noqa: SIM102 - decided by the compiler, the inner one by the program
            if not certain:
                tile = weights_of(weight, columns, chunk, chunk < K, K, MASKED)
        acc = products_with(x, tile, chunk, chunk < K, MASKED)
        for first in range(BC * 8, K, BC * 8):
            depth = first + chunk
            tile = weights_of(weight, columns, depth, depth < K, K, MASKED)
            acc += products_with(x, tile, depth, depth < K, MASKED)
        y = tl.sum(acc, 0)
        if HAS_BIAS:
            y += tl.load(bias + columns).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    halves = tl.trans(tl.reshape(y.to(dtype), (2, PAIRS)))
    first, second = tl.split(halves)
    i = begin + tl.arange(0, PAIRS)
    slot = tl.load(slots) * (KV_HEADS * SIZE)
    if head < HEADS + KV_HEADS:
        cos_1, sin_1 = tl.load(cos + i).to(tl.float32), tl.load(sin + i).to(tl.float32)
        cos_2, sin_2 = tl.load(cos + HALF + i).to(tl.float32), tl.load(sin + HALF + i).to(tl.float32)
        low, high = first.to(tl.float32), second.to(tl.float32)
        turned_1 = (low * cos_1 - high * sin_1).to(dtype)
        turned_2 = (high * cos_2 + low * sin_2).to(dtype)
        if head < HEADS:
            tl.store(out + head * SIZE + i, turned_1)
            tl.store(out + head * SIZE + HALF + i, turned_2)
        else:
            tl.store(k_slots + slot + (head - HEADS) * SIZE + i, turned_1)
            tl.store(k_slots + slot + (head - HEADS) * SIZE + HALF + i, turned_2)
    else:
        tl.store(v_slots + slot + (head - HEADS - KV_HEADS) * SIZE + i, first)
        tl.store(v_slots + slot + (head - HEADS - KV_HEADS) * SIZE + HALF + i, second)


@triton.jit(do_not_specialize=["stride"])
def activate_kernel(gate_up, out, stride, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """out [rows, WIDTH] = activation(gate) * up, of rows [gate, up]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + column, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * WIDTH + column, activated(gate, ACTIVATION) * up, mask=inside)


@triton.jit(do_not_specialize=["q_stride", "k_stride", "v_stride"])
def rotate_kernel(
    q, k, v, cos, sin, out, k_slots, v_slots, slots, q_stride, k_stride, v_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Some heads of one row: queries and keys rotated, values copied; heads count through q, k and v."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    i = tl.arange(0, HALF_PADDED)
    known = i < HALF
    SIZE: tl.constexpr = 2 * HALF
    cos_1 = tl.load(cos + row * SIZE + i, mask=known, other=0).to(tl.float32)[None, :]
    sin_1 = tl.load(sin + row * SIZE + i, mask=known, other=0).to(tl.float32)[None, :]
    cos_2 = tl.load(cos + row * SIZE + HALF + i, mask=known, other=0).to(tl.float32)[None, :]
    sin_2 = tl.load(sin + row * SIZE + HALF + i, mask=known, other=0).to(tl.float32)[None, :]
    slot = tl.load(slots + row)
    is_q = head < HEADS
    k_head = head - HEADS
    is_k = (k_head >= 0) & (k_head < KV_HEADS)
    v_head = k_head - KV_HEADS
    is_v = (v_head >= 0) & (v_head < KV_HEADS)
    offset = tl.where(is_q, head, tl.where(is_k, k_head, v_head))[:, None] * SIZE + i[None, :]
    in_q, in_k, in_v = is_q[:, None] & known[None, :], is_k[:, None] & known[None, :], is_v[:, None] & known[None, :]
    slot_offset = slot * (KV_HEADS * SIZE) + offset
    first = tl.load(q + row * q_stride + offset, mask=in_q, other=0)
    second = tl.load(q + row * q_stride + offset + HALF, mask=in_q, other=0)
    first = tl.where(in_k, tl.load(k + row * k_stride + offset, mask=in_k, other=0), first).to(tl.float32)
    second = tl.where(in_k, tl.load(k + row * k_stride + offset + HALF, mask=in_k, other=0), second).to(tl.float32)
    turned_1 = (first * cos_1 - second * sin_1).to(out.dtype.element_ty)
    turned_2 = (second * cos_2 + first * sin_2).to(out.dtype.element_ty)
    tl.store(out + row * (HEADS * SIZE) + offset, turned_1, mask=in_q)
    tl.store(out + row * (HEADS * SIZE) + offset + HALF, turned_2, mask=in_q)
    tl.store(k_slots + slot_offset, turned_1, mask=in_k)
    tl.store(k_slots + slot_offset + HALF, turned_2, mask=in_k)
    tl.store(v_slots + slot_offset, tl.load(v + row * v_stride + offset, mask=in_v, other=0), mask=in_v)
    tl.store(v_slots + slot_offset + HALF, tl.load(v + row * v_stride + offset + HALF, mask=in_v, other=0), mask=in_v)


def normalise(x: Tensor, norm: Norm) -> Tensor:
    """See `fused.normalise`; rows of x [rows, size] may stand apart."""
    rows, size = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    padded = triton.next_power_of_2(size)
    if rows:
        with on_device_of(x):
            normalise_kernel[(rows,)](
                x, norm.weight, out, x.stride(0), norm.eps, size, padded, **_overlap(x, rows),
                num_warps=min(8, max(1, padded // 512)),
            )  # fmt: skip
    return out


def _overlap(x: Tensor, rows: int) -> dict[str, int]:
    """Launch options: in a decode step a launch starts while the one before it ends."""
    return {"PDL": 1, "launch_pdl": 1} if rows <= DECODE_ROWS and is_hopper(x.device) else {"PDL": 0}


def count_executed(mask: Tensor, active: Tensor, executed: Tensor, tokens: Tensor) -> None:
    """See `fused.count_executed`; mask is contiguous."""
    rows, groups = mask.shape
    with on_device_of(mask):
        count_kernel[(triton.cdiv(groups, COUNTED_AT_ONCE),)](
            mask.view(torch.uint8), active.view(torch.uint8), executed, tokens, rows, groups, COUNTED_AT_ONCE
        )


def positions(lengths: Tensor, first_slots: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """See `fused.positions`."""
    rows, size = len(lengths), tables[0].shape[1]
    cos, sin = torch.empty(2, rows, size, dtype=tables[0].dtype, device=lengths.device)
    slots, visible = torch.empty(2, rows, dtype=torch.int64, device=lengths.device)
    with on_device_of(lengths):
        positions_kernel[(rows,)](
            lengths, first_slots, *tables, cos, sin, slots, visible, size, triton.next_power_of_2(size), num_warps=1
        )
    return cos, sin, slots, visible


def take_likeliest(logits: Tensor, token: Tensor, lengths: Tensor | None) -> None:
    """See `fused.take_likeliest`; rows of the logits may stand apart. PyTorch's argmax takes 27 us for a row of 128256.

    Two launches: the second waits for the first by its launch, so no memory must be left clean.
    """
    rows, size = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    values = torch.empty(rows, VOCABULARY_PARTS, dtype=torch.float32, device=logits.device)
    indices = torch.empty(rows, VOCABULARY_PARTS, dtype=torch.int32, device=logits.device)
    with on_device_of(logits):
        candidate_kernel[(VOCABULARY_PARTS, rows)](
            logits, values, indices, size, logits.stride(0), VOCABULARY_PARTS, VOCABULARY_BLOCK
        )
        likeliest_kernel[(rows,)](
            values, indices, token, token if lengths is None else lengths, VOCABULARY_PARTS, lengths is not None,
            **_overlap(logits, rows), num_warps=1,
        )  # fmt: skip


def activate_gate(gate_up: Tensor, activation: str) -> Tensor:
    """See `fused.activate_gate`; rows of `gate_up` may stand apart."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(ACTIVATION_BLOCK, triton.next_power_of_2(width))
        with on_device_of(gate_up):
            activate_kernel[(rows, triton.cdiv(width, block))](
                gate_up, out, gate_up.stride(0), width, activation, block
            )
    return out


def project_and_store(
    x: Tensor, qkv: Linear, mask: Tensor, width: int, heads: tuple[int, int, int], places: Places
) -> Tensor:
    """See `fused.project_and_store`."""
    query_heads, kv_heads, size = heads
    depth = x.shape[1]
    out = torch.empty(1, query_heads, size, dtype=x.dtype, device=x.device)
    with on_device_of(x):
        config = vector_config(depth, size, False, x.dtype, x.device)
        project_kernel[(len(qkv.weight) // config["BN"],)](
            x.contiguous(), qkv.weight, qkv.weight if qkv.bias is None else qkv.bias,
            mask.contiguous().view(torch.uint8), places.cos, places.sin, out, places.k_slots, places.v_slots,
            places.slots,
            depth, width, mask.shape[1], query_heads, kv_heads, size, qkv.bias is not None, **config,
        )  # fmt: skip
    return out


def rotate_and_store(q: Tensor, k: Tensor, v: Tensor, places: Places) -> Tensor:
    """See `fused.rotate_and_store`; rows of q, k and v may stand apart, a row's heads may not."""
    rows, heads, size = q.shape
    kv_heads = k.shape[1]
    out = torch.empty(rows, heads, size, dtype=q.dtype, device=q.device)
    if rows:
        with on_device_of(q):
            rotate_kernel[(rows, triton.cdiv(heads + 2 * kv_heads, HEADS_AT_ONCE))](
                q, k, v, places.cos, places.sin, out, places.k_slots, places.v_slots, places.slots,
                q.stride(0), k.stride(0), v.stride(0),
                heads, kv_heads, size // 2, triton.next_power_of_2(size // 2), HEADS_AT_ONCE, **_overlap(q, rows),
                num_warps=2,
            )  # fmt: skip
    return out

"""Gluon, for Hopper: the prefill kernel with specialised warps.

A producer warp fetches blocks of keys and values by TMA. Two consumers, a warpgroup each, hold half of the tile's
gathered queries; while one step's scores come out of the tensor cores, the last step's weights go into them, and the
softmax of one consumer runs beside the products of the other. Blocks are walked from the last to the first: the ones
that lie across the causal border, and need a mask, come first.

    producer    K, V blocks --TMA--> ring --------------+
                                                        v
    consumer 0  its half of the tile's rows of q --> q K^T --> softmax so far --> p V --> rows of out
    consumer 1  the other half                   --> q K^T --> softmax so far --> p V --> rows of out
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from wide_kernels.attention_prefill.configs import hopper_config
from wide_kernels.attention_prefill.launch import rows_of_keys
from wide_kernels.attention_prefill.triton import LOG2_E, sequence_bounds
from wide_kernels.dispatch import on_device_of
from wide_kernels.gluon_names import tma_load

BM = gl.constexpr(128)  # rows of a tile: two warpgroups' wgmma
# Of the registers that 168 a thread make for three warpgroups, the consumers get 240 each and the producer the rest.
REGISTERS = 168
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit
def weigh(s, total, peak, first, position, scale, MASKED: gl.constexpr, BN: gl.constexpr, SCORES: gl.constexpr):
    """(weights, new total, new peak, factor for what was summed before) of one block of scores."""
    if MASKED:
        key = first + gl.arange(0, BN, gl.SliceLayout(0, SCORES))
        s = gl.where(key[None, :] <= position[:, None], s * scale, float("-inf"))
        higher = gl.maximum(peak, gl.max(s, 1))
        floor = gl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen no key yet
        p = gl.exp2(s - floor[:, None])
        shrink = gl.exp2(peak - floor)
    else:
        higher = gl.maximum(peak, gl.max(s, 1) * scale)
        p = gl.exp2(s * scale - higher[:, None])
        shrink = gl.exp2(peak - higher)
    return p, total * shrink + gl.sum(p, 1), higher, shrink


@gluon.jit
def step(
    acc, p, total, peak, turn, blocks, first, position, scale, q_buffer, k_buffers, v_buffers, barriers,
    MASKED: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Scores of block `turn`, and meanwhile the last block's weights `p` times its values."""
    k_full, k_empty, v_full, v_empty = barriers
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    slot = turn % STAGES
    last = (turn - 1) % STAGES
    zero = gl.zeros((64, BN), gl.float32, SCORES)
    s = warpgroup_mma(q_buffer, k_buffers.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(last), (turn - 1) // STAGES & 1)
    acc = warpgroup_mma(p, v_buffers.index(last), acc, is_async=True)
    s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
    mbarrier.arrive(k_empty.index(slot), count=1)
    weights, total, peak, shrink = weigh(s, total, peak, first, position, scale, MASKED, BN, SCORES)
    weights = weights.to(p.dtype)
    # The next step's wait for keys stands here because it parts the code: else the assembler moves the softmax behind
    # the wait for the product that it should overlap.
    mbarrier.wait(k_full.index((turn + 1) % STAGES), (turn + 1) // STAGES & 1, pred=turn + 1 < blocks)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(v_empty.index(last), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUTPUT))[:, None]
    p = gl.convert_layout(weights, gl.DotOperandLayout(0, OUTPUT, 2))
    return acc, p, total, peak


@gluon.jit
def rows_of(half: gl.constexpr, lists, tile_first, tokens, head, PACK: gl.constexpr, GATHER: gl.constexpr):
    """(row of all sequences, head, runs, exists) of each of a consumer's 64 rows: token m // PACK, head m % PACK."""
    executing, skipping, live = lists
    number = gl.arange(0, 64, gl.SliceLayout(1, GATHER))
    place = tile_first + half * (64 // PACK) + number // PACK
    runs = place < live
    row = gl.load(gl.where(runs, executing, skipping) + place, mask=place < tokens, other=0)
    return row, head + number % PACK, runs, place < tokens


@gluon.jit
def consume(
    half: gl.constexpr, q, o, lists, tile_first, tokens, head, stride_qt, stride_qh, blocks_of, start, scale,
    q_buffers, k_buffers, v_buffers, barriers,
    H: gl.constexpr, PACK: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 / PACK tokens x PACK heads against all blocks of the tile."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    GATHER: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    k_full, k_empty, v_full, _v_empty = barriers
    begin, end, full, blocks = blocks_of
    if blocks > 0:
        dtype: gl.constexpr = q_buffers.dtype
        row, heads, runs, _inside = rows_of(half, lists, tile_first, tokens, head, PACK, GATHER)
        # Rows behind the border read the tile's first query: their own values are never touched.
        source = gl.where(runs, row, gl.load(lists[0] + tile_first))
        q_tile = q + source[:, None].to(gl.int64) * stride_qt + heads[:, None] * stride_qh
        q_buffer = q_buffers.index(half)
        q_buffer.store(gl.load(q_tile + gl.arange(0, D, gl.SliceLayout(0, GATHER))[None, :]))
        fence_async_shared()
        position = gl.convert_layout(gl.minimum(start + source, end - 1), gl.SliceLayout(1, SCORES))
        acc = gl.zeros((64, D), gl.float32, OUTPUT)
        zero = gl.zeros((64, BN), gl.float32, SCORES)
        total = gl.zeros((64,), gl.float32, gl.SliceLayout(1, SCORES))
        peak = gl.full((64,), float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        first = begin + (blocks - 1) * BN
        mbarrier.wait(k_full.index(0), 0)
        s = warpgroup_mma(q_buffer, k_buffers.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        mbarrier.arrive(k_empty.index(0), count=1)
        weights, total, peak, _ = weigh(s, total, peak, first, position, scale, True, BN, SCORES)
        p = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, OUTPUT, 2))
        mbarrier.wait(k_full.index(1 % STAGES), 1 // STAGES & 1, pred=blocks > 1)
        mbarrier.wait(v_full.index(0), 0)
        if end < first + BN:
            # What lies behind the last key may be anything, and zero times NaN is NaN. Both consumers write the same.
            v_buffer = v_buffers.index(0)
            known = first + gl.arange(0, BN, gl.SliceLayout(1, GATHER)) < end
            values = v_buffer.load(GATHER)
            v_buffer.store(gl.where(known[:, None], values, gl.zeros_like(values)))
            fence_async_shared()
        for turn in range(1, gl.maximum(blocks - full, 1)):
            acc, p, total, peak = step(
                acc, p, total, peak, turn, blocks, first - turn * BN, position, scale, q_buffer, k_buffers, v_buffers,
                barriers, True, BN, D, STAGES,
            )  # fmt: skip
        for turn in range(gl.maximum(blocks - full, 1), blocks):
            acc, p, total, peak = step(
                acc, p, total, peak, turn, blocks, 0, position, scale, q_buffer, k_buffers, v_buffers, barriers,
                False, BN, D, STAGES,
            )  # fmt: skip
        slot = (blocks - 1) % STAGES
        mbarrier.wait(v_full.index(slot), (blocks - 1) // STAGES & 1)
        acc = warpgroup_mma(p, v_buffers.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        total = gl.convert_layout(gl.where(total > 0, total, 1.0), gl.SliceLayout(1, OUTPUT))
        out = gl.convert_layout((acc / total[:, None]).to(dtype), GATHER)
        # Read again: kept through the loop, the rows would take registers from it.
        row, heads, runs, inside = rows_of(half, lists, tile_first, tokens, head, PACK, GATHER)
        target = o + row[:, None].to(gl.int64) * (H * D) + heads[:, None] * D
        target += gl.arange(0, D, gl.SliceLayout(0, GATHER))[None, :]
        gl.store(target, gl.where(runs[:, None], out, gl.zeros_like(out)), mask=inside[:, None])
    else:
        row, heads, runs, inside = rows_of(half, lists, tile_first, tokens, head, PACK, GATHER)
        target = o + row[:, None].to(gl.int64) * (H * D) + heads[:, None] * D
        target += gl.arange(0, D, gl.SliceLayout(0, GATHER))[None, :]
        gl.store(target, gl.zeros((64, D), q_buffers.dtype, GATHER), mask=inside[:, None])


@gluon.jit
def produce(
    k_blocks, v_blocks, first_row, column, blocks, k_buffers, v_buffers, barriers,
    BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fetch the blocks of keys and values, the last first, as far ahead as there are buffers."""
    k_full, k_empty, v_full, v_empty = barriers
    # Keys run one block ahead of values, as they are needed: a block's values wait for the next one's scores.
    for turn in range(0, gl.where(blocks > 0, blocks + 1, 0)):
        row = first_row + (blocks - 1 - turn) * BN
        if turn < blocks:
            slot = turn % STAGES
            mbarrier.wait(k_empty.index(slot), turn // STAGES & 1 ^ 1)
            mbarrier.expect(k_full.index(slot), k_blocks.block_type.nbytes)
            tma_load(k_blocks, [row, column], k_full.index(slot), k_buffers.index(slot))
        if turn > 0:
            slot = (turn - 1) % STAGES
            mbarrier.wait(v_empty.index(slot), (turn - 1) // STAGES & 1 ^ 1)
            mbarrier.expect(v_full.index(slot), v_blocks.block_type.nbytes)
            tma_load(v_blocks, [row + BN, column], v_full.index(slot), v_buffers.index(slot))


@gluon.jit(do_not_specialize=["rows", "tokens", "keys", "batch"])
def tile_kernel(
    q,
    k_blocks,
    v_blocks,
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
    kv_sequence,
    kv_head,
    H: gl.constexpr,
    SHARED: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_Q_START: gl.constexpr,
    HAS_KV_START: gl.constexpr,
    ONE: gl.constexpr,
    BN: gl.constexpr,
    PACK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The tile of attention_prefill.triton, 128 rows; `kv_sequence` and `kv_head`: rows and columns
    from one to the next in the matrices of keys and values."""
    packs: gl.constexpr = H // PACK
    pid = gl.program_id(0)
    head = (pid % packs) * PACK
    sequence = (pid // packs) % batch
    order = pid // packs // batch
    group = head // GROUP
    executed = gl.load(count + group)
    before = 0
    live = executed
    if not ONE:
        before = gl.load(bounds + group * (batch + 1) + sequence)
        live = gl.load(bounds + group * (batch + 1) + sequence + 1) - before
    tiles = gl.cdiv(live, BM // PACK)
    tile_first = gl.where(order < tiles, tiles - 1 - order, order) * (BM // PACK)
    executing = index + group.to(gl.int64) * rows + before
    skipping = index + group.to(gl.int64) * rows + executed + sequence * tokens - before - live
    # Rows are numbered through all sequences: q and o are moved back by the rows before this one.
    q_rows = q + sequence.to(gl.int64) * (stride_qb - tokens.to(gl.int64) * stride_qt)
    begin = 0
    if HAS_KV_START:
        begin = gl.maximum(gl.load(kv_start + sequence), 0).to(gl.int32)
    start = keys  # not causal: all stand behind the last key
    full = gl.maximum(keys - begin, 0) // BN
    end = keys
    if CAUSAL:
        start = keys - tokens
        if HAS_Q_START:
            start = gl.load(q_start + sequence).to(gl.int32)
        start -= sequence * tokens
        some = tile_first < live
        lowest = gl.load(executing + tile_first, mask=some, other=0)
        highest = gl.load(executing + gl.minimum(tile_first + BM // PACK, live) - 1, mask=some, other=0)
        full = gl.maximum(gl.minimum(start + lowest + 1, keys) - begin, 0) // BN
        end = gl.minimum(start + highest + 1, keys)
    blocks = gl.where(tile_first < live, gl.maximum(end - begin + BN - 1, 0) // BN, 0)
    kv = head // SHARED

    dtype: gl.constexpr = k_blocks.dtype
    q_buffers = gl.allocate_shared_memory(dtype, [2, 64, D], gl.NVMMASharedLayout(128, 16, 2))
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES, BN, D], k_blocks.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [STAGES, BN, D], v_blocks.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    barriers = (k_full, k_empty, v_full, v_empty)
    lists = (executing, skipping, live)
    blocks_of = (begin, end, full, blocks)
    gl.warp_specialize(
        [
            (consume, (0, q_rows, o, lists, tile_first, tokens, head, stride_qt, stride_qh, blocks_of, start, scale,
                       q_buffers, k_buffers, v_buffers, barriers, H, PACK, BN, D, STAGES)),
            (consume, (1, q_rows, o, lists, tile_first, tokens, head, stride_qt, stride_qh, blocks_of, start, scale,
                       q_buffers, k_buffers, v_buffers, barriers, H, PACK, BN, D, STAGES)),
            (produce, (k_blocks, v_blocks, sequence * kv_sequence + begin, kv * kv_head, blocks,
                       k_buffers, v_buffers, barriers, BN, STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def matrix_blocks(k: Tensor, block: int) -> TensorDescriptor:
    """TMA's view of k [B, T_k, H_k, d]: a key a row, its heads side by side; blocks of `block` keys x one head."""
    batch, keys, heads, size = k.shape
    sequence = rows_of_keys(k)
    assert sequence is not None  # refused before
    shape = [(batch - 1) * sequence + keys, (heads - 1) * k.stride(2) + size]
    dtype = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[k.dtype]
    layout = gl.NVMMASharedLayout.get_default_for([block, size], dtype)
    return TensorDescriptor(k, shape, [k.stride(1), 1], [block, size], layout)


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
    """`attention_prefill` for q [B, T, H_q, d] and a layout's index and count; see the launcher for what it refuses."""
    batch, tokens, heads, size = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if o.numel() == 0:
        return o
    q = q if q.stride(3) == 1 else q.contiguous()
    scale = size**-0.5 if scale is None else scale
    if scale < 0:  # the kernel takes the largest score before it scales
        q, scale = -q, -scale
    shared, group = heads // kv_heads, heads // index.shape[0]
    config = hopper_config(tokens, group, shared, size)
    tiles = triton.cdiv(tokens * config["PACK"], BM.value) * batch * (heads // config["PACK"])
    with on_device_of(q):
        bounds = sequence_bounds(index, count, batch)
        tile_kernel[(tiles,)](
            q, matrix_blocks(k, config["BN"]), matrix_blocks(v, config["BN"]), o, index, count, bounds,
            count if q_start is None else q_start.contiguous(), count if kv_start is None else kv_start.contiguous(),
            batch * tokens, tokens, keys, batch, scale * LOG2_E, *q.stride()[:3], rows_of_keys(k), k.stride(2),
            heads, shared, group, size, causal, q_start is not None, kv_start is not None, batch == 1,
            **config, num_warps=4, maxnreg=REGISTERS,
        )  # fmt: skip
    return o

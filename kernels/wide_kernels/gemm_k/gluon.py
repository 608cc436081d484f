"""Gluon, for Hopper: the down projection of many rows, with loads, products and scatter-adds all at once.

A persistent program per multiprocessor walks the tiles in order (slab of columns, segment, tile of rows, column tile)
and keeps four partitions busy, each with a loop of its own over the same tiles:

    load      gathers rows of h (cp.async, zeros where a row skips the group), weight tiles by TMA: ring of STAGES
    multiply  twice, each 64 of the tile's 128 rows: wgmma out of the ring; its result goes to a staging buffer in bf16
    scatter   adds the staging buffers to rows of the output, while the next tile is multiplied

Barriers, by what one phase of them means. A partition waits for phase n of a barrier with parity n & 1 and counts by
itself; every barrier has one waiter or waiters that all pass every phase, so none can miss one.
    filled[stage]   n-th filling: 1 arrival that announces the TMA bytes + one of each loading thread when its rows land
    emptied[stage]  n-th reading is over: 1 arrival of each multiplying partition
    staged[half]    the half of the n-th tile stands in its staging buffer: 1 arrival of the partition that put it there
    free[half]      its buffer may be filled for the n-th time. With two buffers that is one scatter later than `staged`
                    (so phase n - 1); with one buffer the halves take turns, and half 1 waits for half 0 of its own tile
Tiles that nobody needs are skipped by all partitions alike and are not counted.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, type-arg"

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from wide_kernels.dispatch import multiprocessors, on_device_of
from wide_kernels.gemm_k.configs import CHANNEL_STEP, hopper_config, slab_columns, tile_order
from wide_kernels.gemm_k.segments import TILE_ROWS
from wide_kernels.gemm_k.sorting import sort_patterns
from wide_kernels.gemm_k.triton import start_of_sums
from wide_kernels.gluon_names import cp_async, tma_load
from wide_kernels.stand_in import StandIn

HALF = gl.constexpr(TILE_ROWS // 2)  # rows of one warpgroup
DEPTH = gl.constexpr(CHANNEL_STEP)
BYTES = gl.constexpr(2)  # of a bfloat16
LOAD_WARPS = gl.constexpr(2)
SCATTER_WARPS = gl.constexpr(2)  # with the loading ones a warpgroup, which shares one number of registers


@gluon.jit
def tile_at(index, row_tiles, column_tiles, SEGMENTS: gl.constexpr, SLAB: gl.constexpr):
    """(segment, row tile, column tile) of the index-th tile."""
    whole = SLAB * SEGMENTS * row_tiles
    first = index // whole * SLAB
    inner = index % whole
    width = gl.minimum(SLAB, column_tiles - first)
    row_tile = inner // width
    return row_tile // row_tiles, row_tile % row_tiles, first + inner % width


@gluon.jit
def needed_groups(needed, index, row_tiles, column_tiles, SEGMENTS: gl.constexpr, SLAB: gl.constexpr):
    """Bits of the groups that rows of each half of the index-th tile run; asked for a tile ahead, as it takes long."""
    index = gl.minimum(index, SEGMENTS * row_tiles * column_tiles - 1)
    segment, row_tile, _ = tile_at(index, row_tiles, column_tiles, SEGMENTS, SLAB)
    entry = needed + (segment * row_tiles + row_tile) * 2
    return gl.load(entry), gl.load(entry + 1)


@gluon.jit
def load_partition(
    h, weight, order, patterns, needed, ring, weight_ring, filled, emptied, rows, stride_h, row_tiles, column_tiles,
    G: gl.constexpr, S: gl.constexpr, SEGMENTS: gl.constexpr, SLAB: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the ring, far ahead of the products and across tiles."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [LOAD_WARPS, 1], [1, 0])
    local = gl.arange(0, HALF, gl.SliceLayout(1, layout))
    depth = gl.arange(0, DEPTH, gl.SliceLayout(0, layout))
    step = 0
    for index in range(gl.program_id(0), SEGMENTS * row_tiles * column_tiles, gl.num_programs(0)):
        # Not asked for a tile ahead: it comes with the rows. (Carried over tiles, Triton 3.6 reads the first tile's.)
        low, high = needed_groups(needed, index, row_tiles, column_tiles, SEGMENTS, SLAB)
        union = low | high
        segment, row_tile, column_tile = tile_at(index, row_tiles, column_tiles, SEGMENTS, SLAB)
        place = row_tile * (2 * HALF) + local
        start = segment.to(gl.int64) * rows
        row0 = gl.load(order + start + place, mask=place < rows, other=0)
        row1 = gl.load(order + start + place + HALF, mask=place + HALF < rows, other=0)
        bits0 = gl.load(patterns + start + place, mask=place < rows, other=0)
        bits1 = gl.load(patterns + start + place + HALF, mask=place + HALF < rows, other=0)
        h0 = h + row0.to(gl.int64)[:, None] * stride_h + depth[None, :]
        h1 = h + row1.to(gl.int64)[:, None] * stride_h + depth[None, :]
        for slot in range(S):
            first = (segment * S + slot) * G
            runs0 = ((bits0 >> slot) & 1) != 0
            runs1 = ((bits1 >> slot) & 1) != 0
            for part in range(((union >> slot) & 1) * (G // DEPTH)):
                stage = step % STAGES
                k = first + part * DEPTH
                mbarrier.wait(emptied.index(stage), (step // STAGES & 1) ^ 1)
                mbarrier.expect(filled.index(stage), BN * DEPTH * BYTES)
                tma_load(weight, [column_tile * BN, k], filled.index(stage), weight_ring.index(stage))
                cp_async(ring.index(2 * stage), h0 + k, mask=runs0[:, None])
                cp_async(ring.index(2 * stage + 1), h1 + k, mask=runs1[:, None])
                async_copy.mbarrier_arrive(filled.index(stage), increment_count=False)
                step += 1


@gluon.jit
def multiply_partition(
    needed, ring, weight_ring, staging, filled, emptied, staged, free, row_tiles, column_tiles,
    HALF_INDEX: gl.constexpr, G: gl.constexpr, S: gl.constexpr, SEGMENTS: gl.constexpr, SLAB: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Multiply half of each tile's rows over the groups that one of them runs; pass over the other half's steps."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    takes_turns: gl.constexpr = BUFFERS == 1 and HALF_INDEX == 1
    step = 0
    tile = 0
    low, high = needed_groups(needed, gl.program_id(0), row_tiles, column_tiles, SEGMENTS, SLAB)
    for index in range(gl.program_id(0), SEGMENTS * row_tiles * column_tiles, gl.num_programs(0)):
        ahead = index + gl.num_programs(0)
        union = low | high
        own = high if HALF_INDEX == 1 else low
        if union != 0:
            acc = warpgroup_mma_init(gl.zeros((HALF, BN), gl.float32, layout))
            held = -1  # the stage that the product in flight reads
            for slot in range(S):
                steps = ((union >> slot) & 1) * (G // DEPTH)
                mine = ((own >> slot) & 1) * steps
                for _part in range(mine):
                    stage = step % STAGES
                    mbarrier.wait(filled.index(stage), step // STAGES & 1)
                    fence_async_shared()  # cp.async wrote through the other proxy
                    acc = warpgroup_mma(
                        ring.index(2 * stage + HALF_INDEX), weight_ring.index(stage).permute((1, 0)), acc, is_async=True
                    )
                    acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
                    mbarrier.arrive(emptied.index(gl.maximum(held, 0)), count=1, pred=held >= 0)
                    held = stage
                    step += 1
                for _part in range(steps - mine):
                    acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=0, deps=(acc,)))
                    mbarrier.arrive(emptied.index(gl.maximum(held, 0)), count=1, pred=held >= 0)
                    held = -1  # kept, it would stop the ring after STAGES steps of the other half
                    stage = step % STAGES
                    mbarrier.wait(filled.index(stage), step // STAGES & 1)
                    mbarrier.arrive(emptied.index(stage), count=1)
                    step += 1
            # Here, where the last product is still running, asking costs nothing.
            next_low, next_high = needed_groups(needed, ahead, row_tiles, column_tiles, SEGMENTS, SLAB)
            result = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(emptied.index(gl.maximum(held, 0)), count=1, pred=held >= 0)
            mbarrier.wait(free.index(HALF_INDEX), (tile & 1) if takes_turns else (tile & 1) ^ 1)
            staging.index(HALF_INDEX % BUFFERS).store(result.to(gl.bfloat16))
            mbarrier.arrive(staged.index(HALF_INDEX), count=1)
            tile += 1
        else:
            next_low, next_high = needed_groups(needed, ahead, row_tiles, column_tiles, SEGMENTS, SLAB)
        low, high = next_low, next_high


@gluon.jit
def live_rows(order, patterns, start, place, rows):
    """The rows at these places of a segment; -1 for those that run none of its groups."""
    bits = gl.load(patterns + start + place, mask=place < rows, other=0)
    return gl.where(bits != 0, gl.load(order + start + place, mask=place < rows, other=0), -1)


@gluon.jit
def scatter_rows(out, rows, column, values, N: gl.constexpr):
    """out[rows, column] += values, for rows >= 0."""
    target = out + rows.to(gl.int64)[:, None] * N + column[None, :]
    gl.atomic_add(target, values, mask=(rows >= 0)[:, None] & (column < N)[None, :], sem="relaxed")


@gluon.jit
def scatter_partition(
    out, order, patterns, needed, staging, staged, free, rows, row_tiles, column_tiles,
    N: gl.constexpr, SEGMENTS: gl.constexpr, SLAB: gl.constexpr, BN: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Add finished halves to the output; rows are looked up before the wait."""
    quarter: gl.constexpr = HALF // 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [SCATTER_WARPS, 1], [1, 0])
    local = gl.arange(0, quarter, gl.SliceLayout(1, layout))
    columns = gl.arange(0, BN, gl.SliceLayout(0, layout))
    tile = 0
    low, high = needed_groups(needed, gl.program_id(0), row_tiles, column_tiles, SEGMENTS, SLAB)
    for index in range(gl.program_id(0), SEGMENTS * row_tiles * column_tiles, gl.num_programs(0)):
        ahead = index + gl.num_programs(0)
        next_low, next_high = needed_groups(needed, ahead, row_tiles, column_tiles, SEGMENTS, SLAB)
        segment, row_tile, column_tile = tile_at(index, row_tiles, column_tiles, SEGMENTS, SLAB)
        if (low | high) != 0:
            start = segment.to(gl.int64) * rows
            place = row_tile * (2 * HALF) + local
            rows0 = live_rows(order, patterns, start, place, rows)
            rows1 = live_rows(order, patterns, start, place + quarter, rows)
            rows2 = live_rows(order, patterns, start, place + 2 * quarter, rows)
            rows3 = live_rows(order, patterns, start, place + 3 * quarter, rows)
            column = column_tile * BN + columns
            mbarrier.wait(staged.index(0), tile & 1)
            scatter_rows(out, rows0, column, staging.index(0).slice(0, quarter).load(layout), N)
            last = staging.index(0).slice(quarter, quarter).load(layout)
            mbarrier.arrive(free.index(0 if BUFFERS == 2 else 1), count=1)
            scatter_rows(out, rows1, column, last, N)
            mbarrier.wait(staged.index(1), tile & 1)
            scatter_rows(out, rows2, column, staging.index(BUFFERS - 1).slice(0, quarter).load(layout), N)
            last = staging.index(BUFFERS - 1).slice(quarter, quarter).load(layout)
            mbarrier.arrive(free.index(1 if BUFFERS == 2 else 0), count=1)
            scatter_rows(out, rows3, column, last, N)
            tile += 1
        low, high = next_low, next_high


@gluon.jit(do_not_specialize=["rows", "row_tiles"])
def persistent_kernel(
    h, weight, out, order, patterns, needed, rows, stride_h, row_tiles,
    N: gl.constexpr, G: gl.constexpr, S: gl.constexpr, SEGMENTS: gl.constexpr, SLAB: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, BUFFERS: gl.constexpr, MULTIPLY_REGISTERS: gl.constexpr, MOVE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """out [rows, N] += masked(h) weight^T, rounded to bf16 once a segment; see the top of the file."""
    column_tiles: gl.constexpr = (N + BN - 1) // BN
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ring = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, HALF, DEPTH], swizzled)
    weight_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, DEPTH], weight.layout)
    staging = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, HALF, BN], swizzled)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    staged = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(filled.index(i), count=1 + 32 * LOAD_WARPS)
        mbarrier.init(emptied.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(staged.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    gl.warp_specialize(
        [
            (multiply_partition, (
                needed, ring, weight_ring, staging, filled, emptied, staged, free, row_tiles, column_tiles,
                0, G, S, SEGMENTS, SLAB, BN, STAGES, BUFFERS,
            )),
            (multiply_partition, (
                needed, ring, weight_ring, staging, filled, emptied, staged, free, row_tiles, column_tiles,
                1, G, S, SEGMENTS, SLAB, BN, STAGES, BUFFERS,
            )),
            (load_partition, (
                h, weight, order, patterns, needed, ring, weight_ring, filled, emptied, rows, stride_h, row_tiles,
                column_tiles, G, S, SEGMENTS, SLAB, BN, STAGES,
            )),
            (scatter_partition, (
                out, order, patterns, needed, staging, staged, free, rows, row_tiles, column_tiles,
                N, SEGMENTS, SLAB, BN, BUFFERS,
            )),
        ],
        [4, LOAD_WARPS, SCATTER_WARPS],
        [MULTIPLY_REGISTERS, MOVE_REGISTERS, MOVE_REGISTERS],
    )  # fmt: skip


def project(
    h: Tensor, weight: Tensor, mask: Tensor, residual: Tensor | None, stand_in: StandIn | None = None
) -> Tensor:
    """`gemm_k` for bfloat16 h [T, K] with many rows; partial sums meet in the output, rounded once a segment.

    The output starts as the residual stream with what stands in for skipped groups, which costs what a copy would.
    """
    (rows, depth), columns, groups = h.shape, weight.shape[0], mask.shape[1]
    h = h if h.stride(1) == 1 and h.stride(0) % 16 == 0 and h.data_ptr() % 16 == 0 else h.contiguous()
    weight = weight if weight.data_ptr() % 16 == 0 else weight.clone()
    out = start_of_sums(h, weight, mask, residual, stand_in)
    order = tile_order(rows, groups, depth // groups, h.dtype, hopper=True)
    config = hopper_config(rows, columns, depth // groups)
    slab = slab_columns(rows, columns, out.element_size(), config["BN"], order.slab_bytes) // config["BN"]
    with on_device_of(h):
        found = sort_patterns(mask.contiguous(), order.segment)
        row_tiles = triton.cdiv(rows, TILE_ROWS)
        block = [config["BN"], CHANNEL_STEP]
        described = TensorDescriptor.from_tensor(
            weight, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
        )
        tiles = found.segments * row_tiles * triton.cdiv(columns, config["BN"])
        programs = min(tiles, multiprocessors(h.device))
        persistent_kernel[(programs,)](
            h, described, out, found.order, found.patterns, found.needed, rows, h.stride(0), row_tiles,
            columns, depth // groups, found.length, found.segments, slab, num_warps=4, **config,
        )  # fmt: skip
    return out

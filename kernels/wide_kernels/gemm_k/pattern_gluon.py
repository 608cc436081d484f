"""Gluon, for Hopper: the down projection of packed rows that follow patterns, without gathers or partial sums.

A packed operand holds the rows of a tile side by side and in each only the channels of the tile's listed groups, in the
order of `classed_lists`, zeros where a row skips one: a product as dense as any, whose rows of the weight come from a
list. Gate and up write it so (`gemm_mn/pattern_gluon.py`), `packing.py` makes it of what stands in full.

A tile is 128 rows and BN columns of the output. Its accumulators stay in registers over the whole list and are stored
once, so results do not depend on any order. A persistent program a multiprocessor keeps three partitions busy, each
with a loop of its own over the same tiles:

    load       one warp that brings both operands by TMA into a ring of STAGES steps of 64 channels
    multiply   twice, 64 of the tile's rows each: wgmma out of the ring, then residual and result of its rows

A step of the weight is PARTS boxes of DEPTH channels, each inside one group. A weight [K, N] has its channels as rows,
so narrow groups are boxes of few but whole rows of 128 bytes; [N, K] serves groups of multiples of 64 channels. What
only one half of the rows runs comes after what both do; the other half does not multiply it.

`filled[stage]` completes a phase when the announced bytes have landed, `emptied[stage]` after one arrival of each
multiplying partition. Tiles come longest first and are dealt to and fro, so all programs have about the same work and
about the same groups at one time.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment, type-arg"

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
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from wide_kernels.dispatch import multiprocessors, on_device_of
from wide_kernels.gemm_k.configs import CHANNEL_STEP
from wide_kernels.gemm_k.gluon import tile_at
from wide_kernels.gemm_k.packing import Packed, pack_rows, transposed
from wide_kernels.gemm_mn.gluon import SHARED, _addressable, storing_layout
from wide_kernels.gluon_names import tma_load
from wide_kernels.pattern_classes import classed_lists, ranked_tiles
from wide_kernels.pattern_layout import HALF_ROWS, TILE_ROWS, PatternLayout
from wide_kernels.tuning.lookup import tuned
from wide_kernels.tuning.tiles import largest_power, padded_rows

TILE = gl.constexpr(TILE_ROWS)
HALF = gl.constexpr(HALF_ROWS)
STEP = gl.constexpr(CHANNEL_STEP)
BYTES = gl.constexpr(2)  # of a 16-bit number


@gluon.jit
def dealt(start, total):
    """The index of this program's tile of a round, and whether there is one."""
    grid = gl.num_programs(0)
    back = (start // grid) % 2 != 0
    index = start + gl.where(back, grid - 1 - gl.program_id(0), gl.program_id(0))
    return gl.minimum(index, total - 1), index < total


@gluon.jit
def ranges_of(counts, tile, PIECES: gl.constexpr, PARTS: gl.constexpr):
    """(pieces of a tile, steps, steps for the lower half, first pause of the upper half, its end)."""
    both = gl.load(counts + tile * 3) * PIECES
    low = both + gl.load(counts + tile * 3 + 1) * PIECES
    pieces = low + gl.load(counts + tile * 3 + 2) * PIECES
    steps = gl.cdiv(pieces, PARTS)
    pause = gl.cdiv(both, PARTS)
    again = gl.where(pieces > low, gl.maximum(low // PARTS, pause), steps)
    return pieces, steps, gl.cdiv(low, PARTS), pause, again


@gluon.jit
def first_channel(classed, tile, piece, pieces, G: gl.constexpr, N_G: gl.constexpr, DEPTH: gl.constexpr):
    """The first channel of a listed piece; past the end, where operands are zeros, of the last one."""
    PIECES: gl.constexpr = G // DEPTH
    inside = gl.minimum(piece, pieces - 1)
    entry = gl.load(classed + tile.to(gl.int64) * N_G + inside // PIECES)
    return (entry >> 2) * G + inside % PIECES * DEPTH


@gluon.jit
def load(
    packed, weight, classed, counts, ranked, ring, weight_ring, filled, emptied, row_tiles,
    N: gl.constexpr, G: gl.constexpr, N_G: gl.constexpr, BN: gl.constexpr, SLAB: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr, BY_CHANNEL: gl.constexpr,
):  # fmt: skip
    """Fill the ring, far ahead of the products and across tiles."""
    PARTS: gl.constexpr = STEP // DEPTH
    COLUMN_TILES: gl.constexpr = (N + BN - 1) // BN
    total = row_tiles * COLUMN_TILES
    step = 0
    for start in range(0, total, gl.num_programs(0)):
        index, real = dealt(start, total)
        if real:
            _, rank, column_tile = tile_at(index, row_tiles, COLUMN_TILES, 1, SLAB)
            tile = gl.load(ranked + rank)
            pieces, steps, _, _, _ = ranges_of(counts, tile, G // DEPTH, PARTS)
            for i in range(steps):
                stage = step % STAGES
                channels = ()  # looked up before the wait
                for part in gl.static_range(PARTS):
                    channels += (first_channel(classed, tile, i * PARTS + part, pieces, G, N_G, DEPTH),)
                mbarrier.wait(emptied.index(stage), (step // STAGES & 1) ^ 1)
                mbarrier.expect(filled.index(stage), (TILE + BN) * STEP * BYTES)
                tma_load(packed, [tile * TILE, i * STEP], filled.index(stage), ring.index(stage))
                for part in gl.static_range(PARTS):
                    if BY_CHANNEL:
                        box = weight_ring.index(stage).slice(part * DEPTH, DEPTH)
                        tma_load(weight, [channels[part], column_tile * BN], filled.index(stage), box)
                    else:
                        box = weight_ring.index(stage)
                        tma_load(weight, [column_tile * BN, channels[part]], filled.index(stage), box)
                step += 1


@gluon.jit
def multiply(
    out, residual, order, counts, ranked, ring, weight_ring, filled, emptied, rows, row_tiles,
    N: gl.constexpr, G: gl.constexpr, BN: gl.constexpr, SLAB: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr, BY_CHANNEL: gl.constexpr, HAS_RESIDUAL: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Multiply half PART of each tile's rows over the steps that one of them runs, pass over the rest, and store."""
    PARTS: gl.constexpr = STEP // DEPTH
    COLUMN_TILES: gl.constexpr = (N + BN - 1) // BN
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    STORING: gl.constexpr = storing_layout(HALF, BN)
    total = row_tiles * COLUMN_TILES
    step = 0
    for start in range(0, total, gl.num_programs(0)):
        index, real = dealt(start, total)
        if real:
            _, rank, column_tile = tile_at(index, row_tiles, COLUMN_TILES, 1, SLAB)
            tile = gl.load(ranked + rank)
            _, steps, low_steps, pause, again = ranges_of(counts, tile, G // DEPTH, PARTS)
            if PART == 0:
                pause = low_steps
                again = steps
            place = tile * TILE + PART * HALF + gl.arange(0, HALF, gl.SliceLayout(1, STORING))
            row = gl.load(order + place, mask=place < rows, other=0)
            acc = warpgroup_mma_init(gl.zeros((HALF, BN), gl.float32, layout))
            held = -1  # the stage that the product in flight reads
            for run in gl.static_range(2):
                for _i in range(again if run == 1 else 0, steps if run == 1 else pause):
                    stage = step % STAGES
                    mbarrier.wait(filled.index(stage), step // STAGES & 1)
                    if BY_CHANNEL:
                        channels = weight_ring.index(stage)
                    else:
                        channels = weight_ring.index(stage).permute((1, 0))
                    acc = warpgroup_mma(ring.index(stage).slice(PART * HALF, HALF), channels, acc, is_async=True)
                    acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
                    mbarrier.arrive(emptied.index(gl.maximum(held, 0)), count=1, pred=held >= 0)
                    held = stage
                    step += 1
                if run == 0:
                    for _i in range(pause, again):
                        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=0, deps=(acc,)))
                        mbarrier.arrive(emptied.index(gl.maximum(held, 0)), count=1, pred=held >= 0)
                        held = -1  # kept, it would stop the ring after STAGES steps of the other half
                        stage = step % STAGES
                        mbarrier.wait(filled.index(stage), step // STAGES & 1)
                        mbarrier.arrive(emptied.index(stage), count=1)
                        step += 1
            z = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(emptied.index(gl.maximum(held, 0)), count=1, pred=held >= 0)
            column = column_tile * BN + gl.arange(0, BN, gl.SliceLayout(0, STORING))
            offset = row.to(gl.int64)[:, None] * N + column[None, :]
            mask = (place < rows)[:, None] & (column < N)[None, :]
            if HAS_RESIDUAL:
                added = gl.load(residual + offset, mask=mask, other=0)
                z += gl.convert_layout(added, layout).to(gl.float32)
            gl.store(out + offset, gl.convert_layout(z.to(out.dtype.element_ty), STORING), mask=mask)


@gluon.jit(do_not_specialize=["rows", "row_tiles"])
def packed_kernel(
    packed, weight, residual, out, order, classed, counts, ranked, rows, row_tiles,
    N: gl.constexpr, G: gl.constexpr, N_G: gl.constexpr, HAS_RESIDUAL: gl.constexpr, BY_CHANNEL: gl.constexpr,
    BN: gl.constexpr, SLAB: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    """out [rows, N] = packed rows times the listed channels of the weight, + residual; see the top of the file."""
    SHAPE: gl.constexpr = [STAGES, STEP, BN] if BY_CHANNEL else [STAGES, BN, STEP]
    ring = gl.allocate_shared_memory(out.dtype.element_ty, [STAGES, TILE, STEP], SHARED)
    weight_ring = gl.allocate_shared_memory(out.dtype.element_ty, SHAPE, SHARED)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(emptied.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (out, residual, order, counts, ranked, ring, weight_ring, filled, emptied, rows, row_tiles,
                        N, G, BN, SLAB, DEPTH, STAGES, BY_CHANNEL, HAS_RESIDUAL, 0)),
            (multiply, (out, residual, order, counts, ranked, ring, weight_ring, filled, emptied, rows, row_tiles,
                        N, G, BN, SLAB, DEPTH, STAGES, BY_CHANNEL, HAS_RESIDUAL, 1)),
            (load, (packed, weight, classed, counts, ranked, ring, weight_ring, filled, emptied, row_tiles,
                    N, G, N_G, BN, SLAB, DEPTH, STAGES, BY_CHANNEL)),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip


def packed_config(rows: int, columns: int, width: int, dtype: torch.dtype) -> dict[str, int]:
    """Shared memory: STAGES x (128 + BN) x 128 bytes of 227 KB. SLAB: column tiles that are finished together.

    For up to 512 rows of a usual model, wide tiles would be fewer than there are multiprocessors.
    """
    config = {
        "BN": 256 if rows > 512 else 128,
        "STAGES": 4,
        "SLAB": 8,
        "MULTIPLY_REGISTERS": 216,
        "LOAD_REGISTERS": 72,
        "maxnreg": 168,
    }
    config |= tuned("hopper_pattern_k", rows, width, dtype)
    config["BN"] = min(config["BN"], max(64, padded_rows(columns)))
    return config | {"DEPTH": largest_power(width, CHANNEL_STEP), "num_warps": 4}


def project_packed(packed: Packed, weight: Tensor, layout: PatternLayout, residual: Tensor | None) -> Tensor:
    """The projection of packed rows by weight [N, K], which may be the transpose of a contiguous [K, N]: -> [T, N].

    Groups of no multiple of CHANNEL_STEP channels need the latter; another weight is transposed for the call.
    """
    rows, columns, width = layout.rows, weight.shape[0], weight.shape[1] // layout.groups
    out = packed.rows.new_empty(rows, columns)
    if rows == 0:
        return out
    config = packed_config(rows, columns, width, out.dtype)
    depth = config["DEPTH"]
    by_channel = weight.stride(0) == 1
    residual = residual if residual is None else residual.contiguous()
    with on_device_of(out):
        if by_channel:
            weight = weight.t()
        elif depth < CHANNEL_STEP:
            weight, by_channel = transposed(weight), True
        block = [depth, config["BN"]] if by_channel else [config["BN"], CHANNEL_STEP]
        ranked = ranked_tiles(packed.counts)
        row_tiles = packed.counts.shape[0]
        tiles = row_tiles * triton.cdiv(columns, config["BN"])
        packed_kernel[(min(tiles, multiprocessors(out.device)),)](
            TensorDescriptor.from_tensor(packed.rows, [TILE_ROWS, CHANNEL_STEP], SHARED.value),
            TensorDescriptor.from_tensor(_addressable(weight), block, SHARED.value),
            out if residual is None else residual, out, layout.order, packed.classed, packed.counts, ranked, rows,
            row_tiles, columns, width, layout.groups, residual is not None, by_channel, **config,
        )  # fmt: skip
    return out


def project(h: Tensor, weight: Tensor, layout: PatternLayout, residual: Tensor | None) -> Tensor:
    """`gemm_k` for 16-bit h [T, K] with many rows that follow patterns; each result is summed in fp32, rounded once."""
    with on_device_of(h):
        return project_packed(pack_rows(h, layout, *classed_lists(layout)), weight, layout, residual)

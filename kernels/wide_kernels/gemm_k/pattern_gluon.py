"""Gluon, for Hopper: the down projection of rows sorted by pattern, without partial sums.

A tile is 128 rows that run nearly the same groups and BN columns of the output. Its accumulators stay in registers over
the tile's whole list of groups and are stored once, so results do not depend on any order. A persistent program per
multiprocessor keeps four partitions busy, each with a loop of its own over the same tiles:

    gather         copies rows of h (cp.async, zeros where a row skips the group) into the ring
    fetch_weights  brings the weights of the same channels by TMA
    multiply       twice, 64 of the tile's rows each: wgmma out of the ring, then residual and result of its rows

A step of the ring is PARTS boxes of DEPTH channels, each inside one group, 64 channels together: groups of 16 or 32
channels come as several narrow boxes with a narrower swizzle. `classed_lists` puts what only one half of the rows runs
into steps of their own, which the other half neither has loaded nor multiplies.

`filled[stage]` completes a phase after one arrival that announces the TMA's bytes and one of each gathering thread when
its rows have landed, `emptied[stage]` after one arrival of each multiplying partition. Tiles come longest first and are
dealt to and fro, so all programs have about the same work and about the same groups at one time.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment, type-arg"

from __future__ import annotations

import torch
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
from wide_kernels.gemm_k.configs import CHANNEL_STEP
from wide_kernels.gemm_k.gluon import gather_rows, load_tile, tile_at
from wide_kernels.gemm_mn.gluon import UNIT, _addressable, storing_layout
from wide_kernels.pattern_classes import classed_lists, ranked_tiles
from wide_kernels.pattern_layout import HALF_ROWS, TILE_ROWS, PatternLayout
from wide_kernels.tuning.lookup import tuned
from wide_kernels.tuning.tiles import largest_power, padded_rows

TILE = gl.constexpr(TILE_ROWS)
HALF = gl.constexpr(HALF_ROWS)
STEP = gl.constexpr(CHANNEL_STEP)
GATHER_WARPS = gl.constexpr(2)
BYTES = gl.constexpr(2)  # of a bfloat16


@gluon.constexpr_function
def box_layout(depth):
    """Rows of `depth` channels in shared memory, as wide a swizzle as they allow."""
    return gl.NVMMASharedLayout(depth * 2, 16, 2)


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
def listed_piece(classed, tile, piece, pieces, G: gl.constexpr, N_G: gl.constexpr, DEPTH: gl.constexpr):
    """(entry, first channel) of a piece; past the end those of the last one, for no half."""
    PIECES: gl.constexpr = G // DEPTH
    inside = gl.minimum(piece, pieces - 1)
    entry = gl.load(classed + tile.to(gl.int64) * N_G + inside // PIECES)
    return gl.where(piece < pieces, entry, entry & ~3), (entry >> 2) * G + inside % PIECES * DEPTH


@gluon.jit
def running(patterns, entry, chosen, exists, check, PART: gl.constexpr):
    """Which rows of half PART run the group of a list entry; only where patterns meet each is looked up."""
    runs = exists & (entry >> PART & 1 != 0)
    bit = gl.load(patterns + chosen + (entry >> 2), mask=runs & check, other=1)
    return runs & (bit != 0)


@gluon.jit
def copy_rows(h, units, runs, box, layout: gl.constexpr):
    """Begin to copy DEPTH channels of the rows at `units`, in 16 bytes, from `h` on; zeros for those that skip them."""
    channel = gl.arange(0, box.shape[1], gl.SliceLayout(0, layout))
    gather_rows(box, h + (units.to(gl.int64) * UNIT)[:, None] + channel[None, :], mask=runs[:, None])


@gluon.jit
def gather(
    h, order, classed, counts, ranked, ids, patterns, mixed, ring, filled, emptied, rows, stride_units, row_tiles,
    N: gl.constexpr, G: gl.constexpr, N_G: gl.constexpr, BN: gl.constexpr, SLAB: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the ring with rows of h, far ahead of the products and across tiles."""
    PARTS: gl.constexpr = STEP // DEPTH
    LANES: gl.constexpr = DEPTH // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [GATHER_WARPS, 1], [1, 0])
    COLUMN_TILES: gl.constexpr = (N + BN - 1) // BN
    local = gl.arange(0, HALF, gl.SliceLayout(1, layout))
    total = row_tiles * COLUMN_TILES
    step = 0
    for start in range(0, total, gl.num_programs(0)):
        index, real = dealt(start, total)
        if real:
            _, rank, _ = tile_at(index, row_tiles, COLUMN_TILES, 1, SLAB)
            tile = gl.load(ranked + rank)
            pieces, steps, low_steps, pause, again = ranges_of(counts, tile, G // DEPTH, PARTS)
            several = gl.load(mixed + tile)
            place = tile * TILE + local
            row0 = gl.load(order + place, mask=place < rows, other=0)
            row1 = gl.load(order + place + HALF, mask=place + HALF < rows, other=0)
            chosen0 = gl.load(ids + row0) * N_G
            chosen1 = gl.load(ids + row1) * N_G
            units0 = row0 * stride_units
            units1 = row1 * stride_units
            for i in range(steps):
                stage = step % STAGES
                lower = i < low_steps
                upper = (i < pause) | (i >= again)
                # Looked up before the wait.
                channels = ()
                runs0 = ()
                runs1 = ()
                for part in gl.static_range(PARTS):
                    entry, channel = listed_piece(classed, tile, i * PARTS + part, pieces, G, N_G, DEPTH)
                    channels += (channel,)
                    runs0 += (running(patterns, entry, chosen0, place < rows, several & 1 != 0, 0),)
                    runs1 += (running(patterns, entry, chosen1, place + HALF < rows, several & 2 != 0, 1),)
                mbarrier.wait(emptied.index(stage), (step // STAGES & 1) ^ 1)
                if lower:
                    for part in gl.static_range(PARTS):
                        box = ring.index(stage * (2 * PARTS) + part)
                        copy_rows(h + channels[part], units0, runs0[part], box, layout)
                if upper:
                    for part in gl.static_range(PARTS):
                        box = ring.index(stage * (2 * PARTS) + PARTS + part)
                        copy_rows(h + channels[part], units1, runs1[part], box, layout)
                async_copy.mbarrier_arrive(filled.index(stage), increment_count=False)
                step += 1


@gluon.jit
def fetch_weights(
    weight, classed, counts, ranked, weight_ring, filled, emptied, row_tiles,
    N: gl.constexpr, G: gl.constexpr, N_G: gl.constexpr, BN: gl.constexpr, SLAB: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the ring with weights; a single warp, for which the compiler's barriers between boxes cost nothing."""
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
                channels = ()
                for part in gl.static_range(PARTS):
                    _, channel = listed_piece(classed, tile, i * PARTS + part, pieces, G, N_G, DEPTH)
                    channels += (channel,)
                mbarrier.wait(emptied.index(stage), (step // STAGES & 1) ^ 1)
                mbarrier.expect(filled.index(stage), BN * STEP * BYTES)
                for part in gl.static_range(PARTS):
                    box = weight_ring.index(stage * PARTS + part)
                    load_tile(weight, [column_tile * BN, channels[part]], filled.index(stage), box)
                step += 1


@gluon.jit
def multiply(
    out, residual, order, counts, ranked, ring, weight_ring, filled, emptied, rows, row_tiles,
    N: gl.constexpr, G: gl.constexpr, BN: gl.constexpr, SLAB: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr, HAS_RESIDUAL: gl.constexpr, PART: gl.constexpr,
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
            held = -1  # the stage that the products in flight read
            for run in gl.static_range(2):
                for _i in range(again if run == 1 else 0, steps if run == 1 else pause):
                    stage = step % STAGES
                    mbarrier.wait(filled.index(stage), step // STAGES & 1)
                    fence_async_shared()  # cp.async wrote through the other proxy
                    for part in gl.static_range(PARTS):
                        acc = warpgroup_mma(
                            ring.index((stage * 2 + PART) * PARTS + part),
                            weight_ring.index(stage * PARTS + part).permute((1, 0)),
                            acc,
                            is_async=True,
                        )
                    acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=PARTS, deps=(acc,)))
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


@gluon.jit(do_not_specialize=["rows", "row_tiles", "stride_units"])
def pattern_kernel(
    h, weight, residual, out, order, classed, counts, ranked, ids, patterns, mixed, rows, stride_units, row_tiles,
    N: gl.constexpr, G: gl.constexpr, N_G: gl.constexpr, HAS_RESIDUAL: gl.constexpr, BN: gl.constexpr,
    SLAB: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr, MOVE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """out [rows, N] = masked(h) weight^T, + residual; see the top of the file."""
    PARTS: gl.constexpr = STEP // DEPTH
    ring = gl.allocate_shared_memory(h.dtype.element_ty, [STAGES * 2 * PARTS, HALF, DEPTH], box_layout(DEPTH))
    weight_ring = gl.allocate_shared_memory(h.dtype.element_ty, [STAGES * PARTS, BN, DEPTH], weight.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(filled.index(i), count=1 + 32 * GATHER_WARPS)
        mbarrier.init(emptied.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (out, residual, order, counts, ranked, ring, weight_ring, filled, emptied, rows, row_tiles,
                        N, G, BN, SLAB, DEPTH, STAGES, HAS_RESIDUAL, 0)),
            (multiply, (out, residual, order, counts, ranked, ring, weight_ring, filled, emptied, rows, row_tiles,
                        N, G, BN, SLAB, DEPTH, STAGES, HAS_RESIDUAL, 1)),
            (gather, (h, order, classed, counts, ranked, ids, patterns, mixed, ring, filled, emptied,
                      rows, stride_units, row_tiles, N, G, N_G, BN, SLAB, DEPTH, STAGES)),
            (fetch_weights, (weight, classed, counts, ranked, weight_ring, filled, emptied, row_tiles,
                             N, G, N_G, BN, SLAB, DEPTH, STAGES)),
        ],
        [4, GATHER_WARPS, 1],
        [MULTIPLY_REGISTERS, MOVE_REGISTERS, MOVE_REGISTERS],
    )  # fmt: skip


def pattern_config(rows: int, columns: int, width: int, dtype: torch.dtype) -> dict[str, int]:
    """Shared memory: STAGES x (128 + BN) x 128 bytes of 227 KB. SLAB: column tiles that are finished together."""
    config = {"BN": 256, "STAGES": 4, "SLAB": 16, "MULTIPLY_REGISTERS": 208, "MOVE_REGISTERS": 96, "maxnreg": 168}
    config |= tuned("hopper_pattern_k", rows, width, dtype)
    config["BN"] = min(config["BN"], max(64, padded_rows(columns)))
    return config | {"DEPTH": largest_power(width, CHANNEL_STEP), "num_warps": 4}


def project(h: Tensor, weight: Tensor, layout: PatternLayout, residual: Tensor | None) -> Tensor:
    """`gemm_k` for 16-bit h [T, K] with many rows that follow patterns; each result is summed in fp32, rounded once."""
    (rows, depth), columns, groups = h.shape, weight.shape[0], layout.groups
    out = h.new_empty(rows, columns)
    if rows == 0:
        return out
    h, weight = _addressable(h), _addressable(weight)
    residual = residual if residual is None else residual.contiguous()
    config = pattern_config(rows, columns, depth // groups, h.dtype)
    with on_device_of(h):
        classed, counts = classed_lists(layout)
        ranked = ranked_tiles(counts)
        block = [config["BN"], config["DEPTH"]]
        described = TensorDescriptor.from_tensor(weight, block, box_layout(config["DEPTH"]))
        row_tiles = classed.shape[0]
        tiles = row_tiles * triton.cdiv(columns, config["BN"])
        pattern_kernel[(min(tiles, multiprocessors(h.device)),)](
            h, described, out if residual is None else residual, out, layout.order, classed, counts, ranked,
            layout.ids, layout.patterns.view(torch.uint8), layout.mixed, rows, h.stride(0) // UNIT.value, row_tiles,
            columns, depth // groups, groups, residual is not None, **config,
        )  # fmt: skip
    return out

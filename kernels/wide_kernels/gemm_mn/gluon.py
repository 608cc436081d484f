"""Gluon, for Hopper: gathered rows times the weights of one group, warp specialised and persistent.

One program a multiprocessor walks the tile list. Its producer warps gather rows of x with cp.async and fetch weights by
TMA into a ring of STAGES; two consumer warpgroups multiply half of the tile's rows each. A warpgroup whose rows all
skip neither multiplies nor has them loaded. The ring runs on across tiles: while a warpgroup writes its results, the
producer fills the ring for the next tile and the other warpgroup may still multiply. Tiles that nobody runs are zeroed
by the producer warps while the ring is full.

Protocol. Ring step n counts the K steps of all tiles of a program; it uses stage n % STAGES for the (n // STAGES)-th
time, whose parity both sides wait for. `full` completes a phase after 1 + PRODUCER_THREADS arrivals: one announces the
bytes of the TMA loads, each producer thread's comes when its own cp.async have landed. `empty` completes a phase after
one arrival of each consumer, live or not, when it has read the stage; the producer's first waits pass because the phase
before the first of a fresh barrier counts as complete. All three partitions walk the same tiles.

    producer    tile list --> rows of x (cp.async), weight tiles (TMA) --> ring of STAGES ------------------------+
    consumer 0  ring --> products of half of the tile's rows --> bias, activation --> out   <---------------------+
    consumer 1  ring --> products of the other half ----------> bias, activation --> out   <---------------------+
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
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
from wide_kernels.gemm_mn.configs import hopper_config
from wide_kernels.gemm_mn.tile_list import tile_list
from wide_kernels.gemm_mn.triton import activated
from wide_kernels.gluon_names import cp_async, tma_load
from wide_kernels.layout import route_layout

UNIT = gl.constexpr(8)  # elements in 16 bytes: what one cp.async moves and one thread stores
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16))  # rows of 64 elements, 128 bytes, swizzled for TMA and wgmma
GATHER = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # eight threads fetch the 128 bytes of a row
PRODUCER_THREADS = gl.constexpr(128)
CONSUMERS = gl.constexpr(2)


@gluon.constexpr_function
def storing_layout(rows, columns):
    """A layout of [rows, columns] for four warps in which a thread holds 8 adjacent columns, 16 bytes to store.

    Each warp keeps the rows that it has in the layout of wgmma's results, so that values only move between lanes.
    """
    units = (columns // 8).bit_length() - 1
    lane_units = min(units, 2)
    registers = [[0, 1], [0, 2], [0, 4]]
    lanes = [[0, 8 << i] for i in range(lane_units)] + [[1, 0], [2, 0], [4, 0]]
    if lane_units == 2:
        registers.append([8, 0])
    else:
        lanes.append([8, 0])
    registers += [[0, 8 << i] for i in range(lane_units, units)]
    registers += [[64 << i, 0] for i in range((rows // 64).bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, columns])


@gluon.jit
def entry(tiles, position, end):
    """(tile, rows that execute its group) at a position of the list, zeros from `end` on."""
    tile = gl.load(tiles + 2 + 2 * position, mask=position < end, other=0)
    return tile, gl.load(tiles + 3 + 2 * position, mask=position < end, other=0)


@gluon.jit
def gathered_units(index, place, executed, stride_units, ROWS: gl.constexpr):
    """Where the rows at ROWS places of a group's list begin in x, in units of 16 bytes.

    Rows that skip the group stand for the first one that runs it, so that their own values are never touched.
    """
    places = place + gl.arange(0, ROWS, gl.SliceLayout(1, GATHER))
    return gl.load(index + gl.where(places < executed, places, 0)) * stride_units


@gluon.jit
def fetch_rows(x, units, stage, BK: gl.constexpr):
    """Begin to copy BK columns of the rows at `units` from `x` on."""
    column = gl.arange(0, BK, gl.SliceLayout(0, GATHER))
    cp_async(stage, x + (units.to(gl.int64) * UNIT)[:, None] + column[None, :])


@gluon.jit
def zero_tile(out, index, place, column, rows, N: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """Zeros for all rows of a tile."""
    LANES: gl.constexpr = BN // UNIT
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, UNIT], [32 // LANES, LANES], [4, 1], [1, 0])
    ROWS: gl.constexpr = min(BM, 16384 // BN)  # at once: what registers hold
    columns = column + gl.arange(0, BN, gl.SliceLayout(0, LAYOUT))
    for start in range(0, BM, ROWS):
        places = place + start + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        row = gl.load(index + places, mask=places < rows, other=0)
        target = out + (row.to(gl.int64) * N)[:, None] + columns[None, :]
        gl.store(target, gl.zeros([ROWS, BN], out.dtype.element_ty, LAYOUT), mask=(places < rows)[:, None])


@gluon.jit
def produce(
    x, index, tiles, weight, weight_up, out, rows, stride_units, x_ring, w_ring, full, empty,
    N: gl.constexpr, K: gl.constexpr, G: gl.constexpr, GATED: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the ring for every live tile of this program, and zero its share of the dead ones."""
    COLUMNS: gl.constexpr = N // BN
    PER_GROUP: gl.constexpr = G // BN
    HALF: gl.constexpr = BM // CONSUMERS
    WEIGHTS: gl.constexpr = 2 if GATED else 1
    live = gl.load(tiles)
    dead = gl.cdiv(rows, BM) * COLUMNS - live
    grid = gl.num_programs(0)
    first = gl.program_id(0)
    # Dead tiles turn, turn + period, ... are zeroed after live tile `turn`, while the ring is full.
    period = gl.maximum(live, grid)
    tile, executed = entry(tiles, first, live)
    source = index + (tile % COLUMNS // PER_GROUP).to(gl.int64) * rows
    lower = gathered_units(source, tile // COLUMNS * BM, executed, stride_units, HALF)
    upper = gathered_units(source, tile // COLUMNS * BM + HALF, executed, stride_units, HALF)
    step = 0
    for turn in range(first, period, grid):
        if turn < live:
            column = tile % COLUMNS * BN
            both = tile // COLUMNS * BM + HALF < executed
            for i in range(K // BK):
                stage = (step + i) % STAGES
                mbarrier.wait(empty.index(stage), ((step + i) // STAGES & 1) ^ 1)
                mbarrier.expect(full.index(stage), WEIGHTS * BN * BK * 2)
                tma_load(weight, [column, i * BK], full.index(stage), w_ring.index(stage).slice(0, BN))
                if GATED:
                    tma_load(weight_up, [column, i * BK], full.index(stage), w_ring.index(stage).slice(BN, BN))
                fetch_rows(x + i * BK, lower, x_ring.index(stage * CONSUMERS), BK)
                if both:
                    fetch_rows(x + i * BK, upper, x_ring.index(stage * CONSUMERS + 1), BK)
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        step += K // BK
        # The next tile's rows are asked for before zeros are written: nothing waits for them then.
        tile, executed = entry(tiles, turn + grid, live)
        source = index + (tile % COLUMNS // PER_GROUP).to(gl.int64) * rows
        lower = gathered_units(source, tile // COLUMNS * BM, executed, stride_units, HALF)
        upper = gathered_units(source, tile // COLUMNS * BM + HALF, executed, stride_units, HALF)
        for position in range(turn, dead, period):
            idle, _ = entry(tiles, live + position, live + dead)
            idle_index = index + (idle % COLUMNS // PER_GROUP).to(gl.int64) * rows
            zero_tile(out, idle_index, idle // COLUMNS * BM, idle % COLUMNS * BN, rows, N, BM, BN)


@gluon.jit
def consume(
    index, tiles, bias, out, rows, x_ring, w_ring, full, empty,
    N: gl.constexpr, K: gl.constexpr, G: gl.constexpr,
    GATED: gl.constexpr, HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Multiply and write rows PART x HALF and on of every live tile of this program."""
    COLUMNS: gl.constexpr = N // BN
    PER_GROUP: gl.constexpr = G // BN
    HALF: gl.constexpr = BM // CONSUMERS
    WIDE: gl.constexpr = BN * 2 if GATED else BN  # gate and up side by side: one product, each row of x read once
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    STORING: gl.constexpr = storing_layout(HALF, BN)
    live = gl.load(tiles)
    grid = gl.num_programs(0)
    first = gl.program_id(0)
    tile, executed = entry(tiles, first, live)
    step = 0
    for turn in range(first, live, grid):
        column = tile % COLUMNS * BN
        place = tile // COLUMNS * BM + PART * HALF
        places = place + gl.arange(0, HALF, gl.SliceLayout(1, STORING))
        source = index + (tile % COLUMNS // PER_GROUP).to(gl.int64) * rows
        row = gl.load(source + places, mask=places < rows, other=0)
        runs = places < executed
        columns = column + gl.arange(0, BN, gl.SliceLayout(0, STORING))
        target = out + (row.to(gl.int64) * N)[:, None] + columns[None, :]
        works = place < executed
        tile, executed = entry(tiles, turn + grid, live)
        if works:
            acc = warpgroup_mma_init(gl.zeros([HALF, WIDE], gl.float32, RESULT))
            for i in range(K // BK):
                stage = (step + i) % STAGES
                mbarrier.wait(full.index(stage), (step + i) // STAGES & 1)
                fence_async_shared()  # cp.async wrote through the generic proxy, wgmma reads through the other one
                acc = warpgroup_mma(
                    x_ring.index(stage * CONSUMERS + PART), w_ring.index(stage).permute((1, 0)), acc, is_async=True
                )
                # At most one product is left in flight, so the one before has read its stage.
                acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
                mbarrier.arrive(empty.index((step + i + STAGES - 1) % STAGES), count=1, pred=i > 0)
            z = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(empty.index((step + K // BK - 1) % STAGES), count=1)
            if GATED:
                z, up = gl.split(gl.permute(gl.reshape(z, [HALF, 2, BN]), [0, 2, 1]))
                z = activated(z, ACTIVATION) * up
            else:
                if HAS_BIAS:
                    channel = column + gl.arange(0, BN, gl.SliceLayout(0, RESULT))
                    z += gl.load(bias + channel).to(gl.float32)[None, :]
                z = activated(z, ACTIVATION)
            y = gl.convert_layout(z.to(out.dtype.element_ty), STORING)
            y = gl.where(runs[:, None], y, gl.zeros_like(y))
            gl.store(target, y, mask=(places < rows)[:, None])
        else:
            for i in range(K // BK):
                stage = (step + i) % STAGES
                mbarrier.wait(full.index(stage), (step + i) // STAGES & 1)
                mbarrier.arrive(empty.index(stage), count=1)
            gl.store(target, gl.zeros([HALF, BN], out.dtype.element_ty, STORING), mask=(places < rows)[:, None])
        step += K // BK


@gluon.jit(do_not_specialize=["rows", "stride_units"])
def persistent_kernel(
    x, index, tiles, weight, weight_up, bias, out, rows, stride_units,
    N: gl.constexpr, K: gl.constexpr, G: gl.constexpr,
    GATED: gl.constexpr, HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """x [T, K] gathered by group, times `weight` and if GATED `weight_up` [N, K], into out [T, N]."""
    WEIGHTS: gl.constexpr = 2 if GATED else 1
    x_ring = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES * CONSUMERS, BM // CONSUMERS, BK], SHARED)
    w_ring = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, BN * WEIGHTS, BK], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1 + PRODUCER_THREADS)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (index, tiles, bias, out, rows, x_ring, w_ring, full, empty,
                       N, K, G, GATED, HAS_BIAS, ACTIVATION, BM, BN, BK, STAGES, 0)),
            (consume, (index, tiles, bias, out, rows, x_ring, w_ring, full, empty,
                       N, K, G, GATED, HAS_BIAS, ACTIVATION, BM, BN, BK, STAGES, 1)),
            (produce, (x, index, tiles, weight, weight_up, out, rows, stride_units, x_ring, w_ring, full, empty,
                       N, K, G, GATED, BM, BN, BK, STAGES)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def _addressable(x: Tensor) -> Tensor:
    """`x` if its rows can be copied 16 bytes at a time and counted in such units, else a copy."""
    aligned = x.data_ptr() % 16 == 0 and x.stride(1) == 1 and x.stride(0) % UNIT.value == 0
    if aligned and x.shape[0] * x.stride(0) < UNIT.value << 31:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def project(
    x: Tensor,
    weight: Tensor,
    weight_up: Tensor | None,
    mask: Tensor,
    index: Tensor | None,
    count: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
) -> Tensor:
    """`gemm_mn`, or with `weight_up` `gated_mlp_up`: x [T, K] -> [T, N]; a mask alone gets a layout here."""
    rows, depth = x.shape
    columns, groups = weight.shape[0], mask.shape[1]
    width = columns // groups
    gated = weight_up is not None
    tile = hopper_config(rows, width, gated, x.dtype)
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    x = _addressable(x)
    with on_device_of(x):
        if index is None or count is None:
            layout = route_layout(mask, backend="triton")
            index, count = layout.index, layout.count
        tiles = tile_list(count, rows, width // tile["BN"], tile["BM"], tile.pop("BAND"))
        descriptors = [
            TensorDescriptor.from_tensor(_addressable(w), [tile["BN"], tile["BK"]], SHARED.value)
            for w in (weight, weight if weight_up is None else weight_up)
        ]
        grid = min(multiprocessors(out.device), tiles.shape[0] - 1)
        persistent_kernel[(grid,)](
            x, index, tiles, *descriptors, weight if bias is None else bias, out, rows, x.stride(0) // UNIT.value,
            columns, depth, width, gated, bias is not None, activation or "none", **tile,
        )  # fmt: skip
    return out

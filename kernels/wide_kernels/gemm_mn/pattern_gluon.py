"""Gluon, for Hopper: rows sorted by pattern times the weights of the groups that their tile runs.

As `gluon.py`, whose protocol of rings and barriers this shares: a persistent program a multiprocessor, producer warps,
two consumer warpgroups of half a tile's rows each. A piece of work is a tile of rows and a chunk of its list of groups:
SLOTS pieces of BOX columns, side by side in the results, whose weights come as SLOTS boxes into slices of a stage. So
groups of 16 columns fill a wide product. Groups of a chunk that nobody runs (the end of a list) are multiplied along
and written as zeros; chunks that nobody runs are zeroed by the producer warps while the ring is full.

PACKED results are not put where rows and groups stand, but row by row of the order and chunk by chunk: the operand of
the packed GEMM-K (`gemm_k/packing.py`), in which a tile has no column that it does not need.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"

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
from wide_kernels.gemm_k.packing import Packed
from wide_kernels.gemm_mn.configs import HOPPER_DEPTH
from wide_kernels.gemm_mn.gluon import (
    CONSUMERS,
    SHARED,
    UNIT,
    _addressable,
    entry,
    storing_layout,
)
from wide_kernels.gemm_mn.pattern_list import chunk_list
from wide_kernels.gemm_mn.triton import activated
from wide_kernels.gluon_names import cp_async, tma_load
from wide_kernels.pattern_classes import classed_lists
from wide_kernels.pattern_layout import HALF_ROWS, TILE_ROWS, PatternLayout
from wide_kernels.tuning.lookup import tuned
from wide_kernels.tuning.tiles import largest_power

TILE = gl.constexpr(TILE_ROWS)
HALF = gl.constexpr(HALF_ROWS)
GATHER_WARPS = gl.constexpr(2)
GATHER = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0]))  # eight threads fetch the 128 bytes of a row


@gluon.constexpr_function
def unit_layout(rows, columns):
    """`storing_layout` with columns as [units, 8]: a thread holds whole units."""

    def split(bases):
        return [[row, column // 8, column % 8] for row, column in bases]

    flat = storing_layout(rows, columns)
    return gl.DistributedLinearLayout(
        split(flat.reg_bases), split(flat.lane_bases), split(flat.warp_bases), [], [rows, columns // 8, 8]
    )


@gluon.jit
def piece_entry(classed, tile, piece, N_G: gl.constexpr, PIECES: gl.constexpr):
    """The list entries of these pieces of a tile; past the end the last one."""
    return gl.load(classed + tile.to(gl.int64) * N_G + gl.minimum(piece // PIECES, N_G - 1))


@gluon.jit
def piece_column(classed, tile, piece, N_G: gl.constexpr, G: gl.constexpr, PIECES: gl.constexpr):
    """The first columns of these pieces."""
    return (piece_entry(classed, tile, piece, N_G, PIECES) >> 2) * G + piece % PIECES * (G // PIECES)


@gluon.jit
def piece_columns(classed, tile, chunk, N_G: gl.constexpr, G: gl.constexpr, PIECES: gl.constexpr, SLOTS: gl.constexpr):
    """The first columns of all pieces of a chunk, a tuple."""
    columns = ()
    for slot in gl.static_range(SLOTS):
        columns += (piece_column(classed, tile, chunk * SLOTS + slot, N_G, G, PIECES),)
    return columns


@gluon.jit
def sorted_units(order, place, rows, stride_units):
    """Where HALF rows of the order begin in x, in units of 16 bytes; rows past the end stand for the last one."""
    places = place + gl.arange(0, HALF, gl.SliceLayout(1, GATHER))
    return gl.load(order + gl.minimum(places, rows - 1)) * stride_units


@gluon.jit
def copy_rows(x, units, stage, BK: gl.constexpr):
    """Begin to copy BK columns of the rows at `units` from `x` on."""
    column = gl.arange(0, BK, gl.SliceLayout(0, GATHER))
    cp_async(stage, x + (units.to(gl.int64) * UNIT)[:, None] + column[None, :])


@gluon.jit
def zero_chunk(
    out, order, classed, tile, chunk, rows,
    N: gl.constexpr, G: gl.constexpr, BOX: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Zeros for all rows of a tile in the columns of a chunk."""
    UNITS: gl.constexpr = SLOTS * BOX // UNIT
    LANES: gl.constexpr = min(UNITS, 32)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, UNIT], [32 // LANES, LANES, 1], [1, 1, 1], [2, 1, 0])
    BY_UNIT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    BY_ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    ROWS: gl.constexpr = min(TILE, 4096 // (SLOTS * BOX))  # at once: what registers hold
    unit = gl.arange(0, UNITS, BY_UNIT)
    piece = chunk * SLOTS + unit // (BOX // UNIT)
    column = piece_column(classed, tile, piece, N // G, G, G // BOX) + unit % (BOX // UNIT) * UNIT
    inside = piece < N // BOX
    within = gl.arange(0, UNIT, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    within = gl.expand_dims(gl.expand_dims(within, 0), 1)
    for start in range(0, TILE, ROWS):
        places = tile * TILE + start + gl.arange(0, ROWS, BY_ROW)
        row = gl.load(order + places, mask=places < rows, other=0)
        target = out + gl.expand_dims(gl.expand_dims(row.to(gl.int64) * N, 1) + gl.expand_dims(column, 0), 2) + within
        mask = gl.expand_dims(gl.expand_dims(places < rows, 1) & gl.expand_dims(inside, 0), 2)
        gl.store(target, gl.zeros([ROWS, UNITS, UNIT], out.dtype.element_ty, LAYOUT), mask=mask)


@gluon.jit
def gather(
    x, order, chunks, rows, stride_units, x_ring, full, empty,
    CHUNKS: gl.constexpr, K: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the ring with rows of x for every live chunk of this program."""
    live = gl.load(chunks)
    step = 0
    for turn in range(gl.program_id(0), live, gl.num_programs(0)):
        # Not asked for a chunk ahead: the ring covers the wait, and carried values are not safe in Triton 3.6.
        work, halves = entry(chunks, turn, live)
        tile = work // CHUNKS
        lower = sorted_units(order, tile * TILE, rows, stride_units)
        upper = sorted_units(order, tile * TILE + HALF, rows, stride_units)
        for i in range(K // BK):
            stage = (step + i) % STAGES
            mbarrier.wait(empty.index(stage), ((step + i) // STAGES & 1) ^ 1)
            if halves & 1 != 0:
                copy_rows(x + i * BK, lower, x_ring.index(stage * CONSUMERS), BK)
            if halves & 2 != 0:
                copy_rows(x + i * BK, upper, x_ring.index(stage * CONSUMERS + 1), BK)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        step += K // BK


@gluon.jit
def fetch_weights(
    classed, chunks, weight, weight_up, w_ring, full, empty,
    N: gl.constexpr, K: gl.constexpr, G: gl.constexpr, GATED: gl.constexpr,
    BOX: gl.constexpr, SLOTS: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the ring with weights; a single warp, for which the compiler's barriers between boxes cost nothing."""
    CHUNKS: gl.constexpr = (N // BOX + SLOTS - 1) // SLOTS
    BN: gl.constexpr = SLOTS * BOX
    WIDE: gl.constexpr = BN * 2 if GATED else BN
    live = gl.load(chunks)
    step = 0
    for turn in range(gl.program_id(0), live, gl.num_programs(0)):
        work, _ = entry(chunks, turn, live)
        columns = piece_columns(classed, work // CHUNKS, work % CHUNKS, N // G, G, G // BOX, SLOTS)
        for i in range(K // BK):
            stage = (step + i) % STAGES
            mbarrier.wait(empty.index(stage), ((step + i) // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), WIDE * BK * 2)
            for slot in gl.static_range(SLOTS):
                piece = w_ring.index(stage).slice(slot * BOX, BOX)
                tma_load(weight, [columns[slot], i * BK], full.index(stage), piece)
                if GATED:
                    piece = w_ring.index(stage).slice(BN + slot * BOX, BOX)
                    tma_load(weight_up, [columns[slot], i * BK], full.index(stage), piece)
        step += K // BK


@gluon.jit
def clear(
    out, order, classed, chunks, rows, tiles,
    N: gl.constexpr, G: gl.constexpr, PACKED: gl.constexpr, BOX: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Zero this program's share of the dead chunks, which nobody reads of packed results."""
    if not PACKED:
        CHUNKS: gl.constexpr = (N // BOX + SLOTS - 1) // SLOTS
        live = gl.load(chunks)
        for position in range(live + gl.program_id(0), tiles * CHUNKS, gl.num_programs(0)):
            work, _ = entry(chunks, position, tiles * CHUNKS)
            zero_chunk(out, order, classed, work // CHUNKS, work % CHUNKS, rows, N, G, BOX, SLOTS)


@gluon.jit
def consume(
    order, classed, chunks, ids, patterns, mixed, bias, out, rows, x_ring, w_ring, full, empty,
    N: gl.constexpr, K: gl.constexpr, G: gl.constexpr,
    GATED: gl.constexpr, HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, PACKED: gl.constexpr,
    BOX: gl.constexpr, SLOTS: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Multiply and write half PART of the rows of every live chunk of this program."""
    CHUNKS: gl.constexpr = (N // BOX + SLOTS - 1) // SLOTS
    N_G: gl.constexpr = N // G
    BN: gl.constexpr = SLOTS * BOX
    UNITS: gl.constexpr = BN // UNIT
    WIDE: gl.constexpr = BN * 2 if GATED else BN  # gate and up side by side: one product, each row of x read once
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    STORING: gl.constexpr = unit_layout(HALF, BN)
    BY_UNIT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, STORING))
    BY_ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, STORING))
    live = gl.load(chunks)
    step = 0
    for turn in range(gl.program_id(0), live, gl.num_programs(0)):
        work, halves = entry(chunks, turn, live)
        tile = work // CHUNKS
        chunk = work % CHUNKS
        places = tile * TILE + PART * HALF + gl.arange(0, HALF, BY_ROW)
        row = gl.load(order + places, mask=places < rows, other=0)
        unit = gl.arange(0, UNITS, BY_UNIT)
        piece = chunk * SLOTS + unit // (BOX // UNIT)
        found = piece_entry(classed, tile, piece, N_G, G // BOX)
        column = (found >> 2) * G + piece % (G // BOX) * BOX + unit % (BOX // UNIT) * UNIT
        within = gl.arange(0, UNIT, gl.SliceLayout(0, gl.SliceLayout(1, STORING)))
        within = gl.expand_dims(gl.expand_dims(within, 0), 1)
        exists = gl.expand_dims(places < rows, 1) & gl.expand_dims(piece < N // BOX, 0)
        if not PACKED:
            target = gl.expand_dims(row.to(gl.int64) * N, 1) + gl.expand_dims(column, 0)
            target = out + gl.expand_dims(target, 2) + within
            written = gl.expand_dims(exists, 2)
        runs = gl.expand_dims((found >> PART & 1) != 0, 0) & exists
        if halves >> PART & 1 != 0:
            # Only where patterns meet must rows be told apart.
            check = runs & (gl.load(mixed + tile) >> PART & 1 != 0)
            chosen = gl.load(ids + row) * N_G
            bit = gl.load(patterns + gl.expand_dims(chosen, 1) + gl.expand_dims(found >> 2, 0), mask=check, other=1)
            runs = runs & (bit != 0)
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
                    within_chunk = gl.arange(0, BN, gl.SliceLayout(0, RESULT))
                    result_piece = chunk * SLOTS + within_chunk // BOX
                    channel = piece_column(classed, tile, result_piece, N_G, G, G // BOX) + within_chunk % BOX
                    z += gl.load(bias + channel).to(gl.float32)[None, :]
                z = activated(z, ACTIVATION)
            y = gl.convert_layout(z.to(out.dtype.element_ty), storing_layout(HALF, BN))
            y = gl.convert_layout(gl.reshape(y, [HALF, UNITS, UNIT]), STORING, assert_trivial=True)
            y = gl.where(gl.expand_dims(runs, 2), y, gl.zeros_like(y))
            if PACKED:  # zeros stand for what does not exist
                target = gl.expand_dims(places.to(gl.int64) * (CHUNKS * BN), 1)
                target = target + gl.expand_dims(chunk * BN + unit * UNIT, 0)
                gl.store(out + gl.expand_dims(target, 2) + within, y)
            else:
                gl.store(target, y, mask=written)
        else:
            for i in range(K // BK):
                stage = (step + i) % STAGES
                mbarrier.wait(full.index(stage), (step + i) // STAGES & 1)
                mbarrier.arrive(empty.index(stage), count=1)
            if not PACKED:
                gl.store(target, gl.zeros([HALF, UNITS, UNIT], out.dtype.element_ty, STORING), mask=written)
        step += K // BK


@gluon.jit(do_not_specialize=["rows", "tiles", "stride_units"])
def pattern_kernel(
    x, order, classed, chunks, ids, patterns, mixed, weight, weight_up, bias, out, rows, tiles, stride_units,
    N: gl.constexpr, K: gl.constexpr, G: gl.constexpr,
    GATED: gl.constexpr, HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, PACKED: gl.constexpr,
    BOX: gl.constexpr, SLOTS: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """x [T, K] by tiles of `order`, times `weight` and if GATED `weight_up` [N, K], into out [T, N] or packed."""
    CHUNKS: gl.constexpr = (N // BOX + SLOTS - 1) // SLOTS
    WIDE: gl.constexpr = SLOTS * BOX * (2 if GATED else 1)
    x_ring = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES * CONSUMERS, HALF, BK], SHARED)
    w_ring = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, WIDE, BK], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1 + 32 * GATHER_WARPS)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (order, classed, chunks, ids, patterns, mixed, bias, out, rows, x_ring, w_ring, full, empty,
                       N, K, G, GATED, HAS_BIAS, ACTIVATION, PACKED, BOX, SLOTS, BK, STAGES, 0)),
            (consume, (order, classed, chunks, ids, patterns, mixed, bias, out, rows, x_ring, w_ring, full, empty,
                       N, K, G, GATED, HAS_BIAS, ACTIVATION, PACKED, BOX, SLOTS, BK, STAGES, 1)),
            (gather, (x, order, chunks, rows, stride_units, x_ring, full, empty, CHUNKS, K, BK, STAGES)),
            (fetch_weights, (classed, chunks, weight, weight_up, w_ring, full, empty,
                             N, K, G, GATED, BOX, SLOTS, BK, STAGES)),
            (clear, (out, order, classed, chunks, rows, tiles, N, G, PACKED, BOX, SLOTS)),
        ],
        [4, GATHER_WARPS, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def pattern_config(rows: int, width: int, gated: bool, dtype: torch.dtype) -> dict[str, int]:
    """Results of 128 x 256 accumulators: 128 columns of gate and up, or 256 of one weight; see `hopper_config`."""
    config = {"BN": 128 if gated else 256, "BK": HOPPER_DEPTH, "BAND": 16, "STAGES": 4}
    config |= {"CONSUMER_REGISTERS": 216, "PRODUCER_REGISTERS": 72, "num_warps": 4, "maxnreg": 168}
    config |= tuned("hopper_pattern_gated" if gated else "hopper_pattern_mn", rows, width, dtype)
    box = largest_power(width, config["BN"])
    return config | {"BOX": box, "SLOTS": config.pop("BN") // box}


def project(
    x: Tensor,
    weight: Tensor,
    weight_up: Tensor | None,
    layout: PatternLayout,
    bias: Tensor | None,
    activation: str | None,
) -> Tensor:
    """`gemm_mn`, or with `weight_up` `gated_mlp_up`: x [T, K] -> [T, N] for rows that follow patterns."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    if x.shape[0]:
        with on_device_of(x):
            _launch(x, weight, weight_up, layout, bias, activation, out, *classed_lists(layout))
    return out


def gated_packed(x: Tensor, w_gate: Tensor, w_up: Tensor, layout: PatternLayout, activation: str) -> Packed:
    """`gated_mlp_up` with packed results: what the packed GEMM-K reads."""
    config = pattern_config(x.shape[0], w_gate.shape[0] // layout.groups, True, x.dtype)
    wide = config["BOX"] * config["SLOTS"]
    columns = -(-w_gate.shape[0] // wide) * wide
    out = x.new_empty(layout.lists.shape[0] * TILE_ROWS, columns)
    with on_device_of(x):
        classed, counts = classed_lists(layout)
        if x.shape[0]:
            _launch(x, w_gate, w_up, layout, None, activation, out, classed, counts, packed=True)
    return Packed(out, classed, counts)


def _launch(
    x: Tensor,
    weight: Tensor,
    weight_up: Tensor | None,
    layout: PatternLayout,
    bias: Tensor | None,
    activation: str | None,
    out: Tensor,
    classed: Tensor,
    counts: Tensor,
    packed: bool = False,
) -> None:
    rows, depth = x.shape
    columns = weight.shape[0]
    width = columns // layout.groups
    gated = weight_up is not None
    config = pattern_config(rows, width, gated, x.dtype)
    box = config["BOX"]
    x = _addressable(x)
    chunks = chunk_list(classed, counts, width // box, config["SLOTS"], config.pop("BAND"))
    descriptors = [
        TensorDescriptor.from_tensor(_addressable(w), [box, config["BK"]], SHARED.value)
        for w in (weight, weight if weight_up is None else weight_up)
    ]
    grid = min(multiprocessors(out.device), chunks.shape[0] - 1)
    pattern_kernel[(grid,)](
        x, layout.order, classed, chunks, layout.ids, layout.patterns.view(torch.uint8), layout.mixed,
        *descriptors, weight if bias is None else bias, out, rows, classed.shape[0], x.stride(0) // UNIT.value,
        columns, depth, width, gated, bias is not None, activation or "none", packed, **config,
    )  # fmt: skip

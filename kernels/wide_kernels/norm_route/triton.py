"""Triton: one read of the residual stream gives its norm, its normalised values and the router's decision.

A program owns a tile of rows times a chunk of D. It stores the tile's share of the sum of squares and of w1 x, waits
for the other chunks of its rows, adds up the shares (in a fixed order, so results repeat bit by bit), normalises the
tile, and decides for its part of the (rows, groups). Tall tiles read w1 seldom; short chunks keep so little in flight
that the second walk over the tile finds it in L2. Where programs cannot wait for each other (Triton's interpreter runs
one after the other; a GPU with very few multiprocessors), the two halves are two launches. A few rows, which fill no
tile, have a kernel of their own (few_rows.py).

    x --+--> w1 x, x^2, A x of a tile --> hidden, squares, byways --wait--+--> normalised x of the tile
        |                                                                 +--> decisions on some rows and groups
        +--> the tile again, out of L2, for the normalised x              +--> A x / rms of some rows, what is reduced
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from wide_kernels.counters import counters
from wide_kernels.dispatch import multiprocessors, on_device_of
from wide_kernels.meeting import meet
from wide_kernels.norm_route import few_rows
from wide_kernels.norm_route.configs import PACKED_RANK, chunk_config, row_config
from wide_kernels.norm_route.heads import differences
from wide_kernels.norm_route.pieces import PIECES, are_side_by_side
from wide_kernels.norm_route.reference import TAP_EPS
from wide_kernels.tuning.tiles import padded_rows


@triton.jit
def tf32_parts(w):
    """w as the sum of two numbers that tensor cores read in tf32: the first exactly, the second to 2^-23 of w."""
    bits = w.to(tl.uint32, bitcast=True)
    high = ((bits + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return high, w - high


@triton.jit
def sum_of_chunks(partial, row, inside, rows, CHUNKS: tl.constexpr):
    """The sum over all chunks of partial[chunk, row]."""
    total = tl.zeros(row.shape, tl.float32)
    for c in tl.range(0, CHUNKS, loop_unroll_factor=8):  # so many loads are under way together
        total += tl.load(partial + c * rows + row, mask=inside, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def bottleneck(
    hidden,
    squares,
    b1,
    row,
    rows,
    D: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    CHUNKS: tl.constexpr,
    NORMALISED: tl.constexpr,
    TAP_EPS: tl.constexpr,
):
    """What the router's first product gives for some rows, [rows, RP]."""
    rank = tl.arange(0, RP)
    inside = row < rows
    whole = tl.zeros((row.shape[0], RP), tl.float32)
    for c in tl.range(0, CHUNKS, loop_unroll_factor=8):  # so many loads are under way together
        part = hidden + (c * rows + row)[:, None] * RP + rank[None, :]
        whole += tl.load(part, mask=inside[:, None], other=0.0, cache_modifier=".cg")
    if NORMALISED:  # w1 (s x) = s (w1 x)
        whole *= tl.rsqrt(sum_of_chunks(squares, row, inside, rows, CHUNKS) / D + TAP_EPS)[:, None]
    return whole + tl.load(b1 + rank, mask=rank < R, other=0.0)[None, :]


@triton.jit
def reduce(
    byways,
    squares,
    reduced,
    row,
    rows,
    eps,
    D: tl.constexpr,
    RB: tl.constexpr,
    RBP: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Store what the bypass reads of some rows: its product with them, over their root mean square."""
    by = tl.arange(0, RBP)
    inside = row < rows
    total = tl.zeros((row.shape[0], RBP), tl.float32)
    for c in tl.range(0, CHUNKS, loop_unroll_factor=8):
        part = byways + (c * rows + row)[:, None] * RBP + by[None, :]
        total += tl.load(part, mask=inside[:, None], other=0.0, cache_modifier=".cg")
    total *= tl.rsqrt(sum_of_chunks(squares, row, inside, rows, CHUNKS) / D + eps)[:, None]
    target = reduced + row[:, None] * RB + by[None, :]
    tl.store(target, total.to(reduced.dtype.element_ty), mask=inside[:, None] & (by < RB)[None, :])


@triton.jit
def decide(whole, weight, bias, decided, row, first, rows, N_G: tl.constexpr, BG: tl.constexpr):
    """Store z >= 0 for some rows and BG groups."""
    z = tl.dot(whole, weight, input_precision="ieee") + bias[None, :]
    group = first + tl.arange(0, BG)
    target = decided + row[:, None] * N_G + group[None, :]
    tl.store(target, (z >= 0).to(tl.uint8), mask=(row < rows)[:, None] & (group < N_G)[None, :])


@triton.jit(do_not_specialize=["rows"])
def chunk_kernel(
    x,
    norm_weight,
    w1,
    b1,
    w2,
    b2,
    bypass,
    squares,
    hidden,
    byways,
    out,
    decided,
    reduced,
    counter,
    rows,
    eps,
    D: tl.constexpr,
    R: tl.constexpr,
    N_G: tl.constexpr,
    NORMALISED: tl.constexpr,
    TAP_EPS: tl.constexpr,
    PARTS: tl.constexpr,
    PACKED: tl.constexpr,
    HALVES: tl.constexpr,
    RP: tl.constexpr,
    RB: tl.constexpr,
    RBP: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
    BG: tl.constexpr,
    PDL: tl.constexpr,
):
    """One chunk of D of BM rows. HALVES: "first", "second", or "both" with a wait between them.

    RB: the bypass' rank, 0 = there is none. PACKED: behind the three pieces of w1, of R = RP rows each, lies the bypass
    in memory; one product then reads the tile once for all of them.
    """
    CHUNKS: tl.constexpr = (D + BD - 1) // BD
    chunk = tl.program_id(0)
    first_row = tl.program_id(1).to(tl.int64) * BM
    row = first_row + tl.arange(0, BM)
    inside = row < rows
    k = tl.arange(0, BK)
    offset = row[:, None] * D + (chunk * BD + k)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if HALVES != "second":
        rank = tl.arange(0, RP)
        by = tl.arange(0, RBP)
        acc = tl.zeros((BM, 4 * RP if PACKED else RP), tl.float32)
        around = tl.zeros((BM, RBP), tl.float32)
        square = tl.zeros((BM, BK), tl.float32)
        for i in range(0, BD // BK):
            d = chunk * BD + i * BK + k
            tile = tl.load(x + offset + i * BK, mask=inside[:, None] & (d < D)[None, :], other=0.0)
            full = tile.to(tl.float32)
            square += full * full
            known = (d < D)[:, None]
            if PACKED:
                four = tl.arange(0, 4 * RP)  # the three pieces and the bypass
                beside = tl.load(
                    w1 + four[None, :] * D + d[:, None], mask=known & (four < 3 * R + RB)[None, :], other=0.0
                )
                acc = tl.dot(tile, beside, acc)
            else:
                if RB > 0:
                    up = tl.load(bypass + by[None, :] * D + d[:, None], mask=known & (by < RB)[None, :], other=0.0)
                    around = tl.dot(tile, up, around, input_precision="ieee")
                known = known & (rank < R)[None, :]
                weights = w1 + rank[None, :] * D + d[:, None]
                if PARTS == 3:
                    for piece in tl.static_range(3):
                        acc = tl.dot(tile, tl.load(weights + piece * R * D, mask=known, other=0.0), acc)
                else:
                    down = tl.load(weights, mask=known, other=0.0)
                    if PARTS == 2:
                        high, low = tf32_parts(down)
                        acc = tl.dot(full, high, acc, input_precision="tf32")
                        acc = tl.dot(full, low, acc, input_precision="tf32")
                    else:
                        acc = tl.dot(full, down, acc, input_precision="ieee")
            # All products must be over here. Where products and threads read one tile, Triton (3.6 to 3.9, on Hopper)
            # keeps no slot of its pipeline free for products in flight: the next copy would land in what they read.
            # So the last one's result is used at once, for what the compiler cannot know to be the same.
            acc = tl.where(rows > 0, acc, 0.0)
        if PACKED:
            fourths = tl.reshape(acc, (BM, 4, RP))
            which = tl.arange(0, 4)[None, :, None]
            acc = tl.sum(tl.where(which < 3, fourths, 0.0), 1)
            if RB > 0:
                around = tl.sum(tl.where(which == 3, fourths, 0.0), 1)
        tl.store(squares + chunk * rows + row, tl.sum(square, 1), mask=inside)
        tl.store(hidden + (chunk * rows + row)[:, None] * RP + rank[None, :], acc, mask=inside[:, None])
        if RB > 0:
            tl.store(byways + (chunk * rows + row)[:, None] * RBP + by[None, :], around, mask=inside[:, None])
    # The decision is cut into units of 16 rows and BG groups.
    ACROSS: tl.constexpr = (N_G + BG - 1) // BG
    UNITS: tl.constexpr = (BM // 16) * ACROSS
    weight, bias = differences(w2, b2, (chunk % ACROSS) * BG, N_G, R, RP, BG)  # ahead of the wait
    if HALVES == "both":
        meet(counter + tl.program_id(1), chunk, CHUNKS)
    if HALVES != "first":
        scale = tl.rsqrt(sum_of_chunks(squares, row, inside, rows, CHUNKS) / D + eps)[:, None]
        dtype: tl.constexpr = out.dtype.element_ty
        for i in range(0, BD // BN):
            d = chunk * BD + i * BN + tl.arange(0, BN)
            gain = tl.load(norm_weight + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
            # Llama's order of roundings: scaled and rounded, then times the weight and rounded.
            known = inside[:, None] & (d < D)[None, :]
            place = row[:, None] * D + d[None, :]
            tile = tl.load(x + place, mask=known, other=0.0)
            value = ((tile.to(tl.float32) * scale).to(dtype).to(tl.float32) * gain).to(dtype)
            tl.store(out + place, value, mask=known)
        if RB > 0:
            # 16 rows each, by those that have the fewest decisions to make
            for unit in range(CHUNKS - 1 - chunk, BM // 16, CHUNKS):
                some = first_row + unit * 16 + tl.arange(0, 16)
                reduce(byways, squares, reduced, some, rows, eps, D, RB, RBP, CHUNKS)
        for unit in range(chunk, UNITS, CHUNKS):
            column = unit % ACROSS
            some = first_row + (unit // ACROSS) * 16 + tl.arange(0, 16)
            whole = bottleneck(hidden, squares, b1, some, rows, D, R, RP, CHUNKS, NORMALISED, TAP_EPS)
            if unit >= CHUNKS:
                weight, bias = differences(w2, b2, column * BG, N_G, R, RP, BG)
            decide(whole, weight, bias, decided, some, column * BG, rows, N_G, BG)


def norm_and_decide(
    x: Tensor,
    norm_weight: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    bypass: Tensor | None,
    eps: float,
    tap: str,
    early: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`norm_route` for a contiguous x [T, D]; without a bypass `reduced` has no columns."""
    rows, size = x.shape
    rank, groups = w1.shape[-2], w2.shape[0] // 2
    out = torch.empty_like(x)
    decided = torch.empty(rows, groups, dtype=torch.uint8, device=x.device)
    mask = decided.view(torch.bool)
    width = 0 if bypass is None else len(bypass)
    reduced = x.new_empty(rows, width)
    if rows == 0:
        return out, mask, reduced
    padded, padded_width = padded_rows(rank), padded_rows(width)
    # A 16-bit x is exact in tf32, and w1 in two parts of it: two products on tensor cores are as good as fp32.
    parts = w1.shape[0] if w1.dim() == 3 else 1 if x.dtype is torch.float32 else 2
    with on_device_of(x):
        few = row_config(rows, size, max(padded, padded_width), x.dtype, x.device)
        config: dict[str, Any] = chunk_config(rows, size, x.dtype, x.device) if few is None else few
        chunks = triton.cdiv(size, config["BD"])
        together = config.pop("TOGETHER") and x.is_cuda and 1 < chunks < multiprocessors(x.device)
        # Without a bypass the kernels do not follow the pointers to it and to what it reads.
        routing = (norm_weight, w1, b1, w2, b2, x if bypass is None else bypass)
        results = (out, decided, x if bypass is None else reduced)
        config |= {
            "D": size,
            "R": rank,
            "N_G": groups,
            "NORMALISED": tap == "normalised",
            "TAP_EPS": TAP_EPS,
            "RP": padded,
            "RB": width,
            "RBP": padded_width,
        }
        launches = ("both",) if together else ("first", "second")
        if few is not None:
            config |= {"PARTS": w1.shape[0] if w1.dim() == 3 else 1, "EARLY": early}
            config["WORDS"] = chunks * 2 * (padded + (padded_width if width else 0)) + 32
            programs = chunks + 1 if width else chunks  # one more gathers what the bypass reads
            # Each form of a row has words of its own: what one of them leaves behind means nothing to another.
            use, count = f"norm_route {chunks} {padded} {width}", rows * config["WORDS"]
            words = counters(use, x.device, count) if together else x.new_empty(count, dtype=torch.int32)
            for halves in launches:
                few_rows.row_kernel[(programs, rows)](x, *routing, words, *results, rows, eps, HALVES=halves, **config)
            return out, mask, reduced
        config["PARTS"] = parts
        config["PACKED"] = parts == PIECES and rank == padded <= PACKED_RANK and width <= padded
        if bypass is not None:
            config["PACKED"] = config["PACKED"] and are_side_by_side(w1, bypass)
            config["RBP"] = padded_width = padded if config["PACKED"] else padded_width
        tiles = triton.cdiv(rows, config["BM"])
        squares = torch.empty(chunks, rows, dtype=torch.float32, device=x.device)
        hidden = torch.empty(chunks, rows, padded, dtype=torch.float32, device=x.device)
        byways = hidden if bypass is None else hidden.new_empty(chunks, rows, padded_width)
        counter = counters("meeting", x.device, tiles) if together else squares  # not followed then
        for halves in launches:
            chunk_kernel[(chunks, tiles)](
                x, *routing, squares, hidden, byways, *results, counter, rows, eps, HALVES=halves, **config
            )
    return out, mask, reduced

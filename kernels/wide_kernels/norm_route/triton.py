"""Triton: one read of the residual stream gives its norm, its normalised values and the router's decision.

A program owns a tile of rows times a chunk of D. It stores the tile's share of the sum of squares and of w1 x, waits
for the other chunks of its rows, adds up the shares (in a fixed order, so results repeat bit by bit), normalises the
tile, and decides for its part of the (rows, groups), or picks patterns for its part of the (rows, segments). Tall tiles
read w1 seldom; short chunks keep so little in flight that the second walk over the tile finds it in L2. Where programs
cannot wait for each other (Triton's interpreter runs one after the other; a GPU with very few multiprocessors), the two
halves are two launches. A few rows, which fill no tile, have a kernel of their own (few_rows.py).

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
from wide_kernels.norm_route.configs import GROUPS_AT_ONCE, PATTERNS_AT_ONCE, chunk_config, row_config, row_words
from wide_kernels.norm_route.heads import Head, differences, scoring
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


@triton.jit
def better(whole, weight, bias, first, best, place, BG: tl.constexpr):
    """(highest score of each row, its pattern) with BG patterns more; the first of equal ones stays."""
    z = tl.dot(whole, weight, input_precision="ieee") + bias[None, :]
    highest = tl.max(z, 1)
    column = tl.min(tl.where(z == highest[:, None], tl.arange(0, BG)[None, :], BG), 1)
    higher = highest > best  # never for NaN: the place stays one of a pattern
    return tl.where(higher, highest, best), tl.where(higher, first + column, place)


@triton.jit
def choose(
    whole,
    weight,
    bias,
    w2,
    b2,
    numbers,
    patterns,
    ids,
    decided,
    row,
    segment,
    rows,
    SEGMENTS: tl.constexpr,
    C: tl.constexpr,
    NUMBERED: tl.constexpr,
    WIDTH: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    BG: tl.constexpr,
    BW: tl.constexpr,
):
    """Store the number of the best pattern of a segment for some rows and, with a WIDTH, its groups."""
    inside = row < rows
    best = tl.full(row.shape, float("-inf"), tl.float32)
    best, place = better(whole, weight, bias, 0, best, tl.zeros(row.shape, tl.int32), BG)
    for first in range(BG, C, BG):
        weight, bias = scoring(w2, b2, segment, first, C, R, RP, BG)
        best, place = better(whole, weight, bias, first, best, place, BG)
    number = tl.load(numbers + segment * C + place)
    tl.store(ids + segment.to(tl.int64) * rows + row, number, mask=inside)
    for first in range(0, WIDTH, BW):
        group = first + tl.arange(0, BW)
        known = inside[:, None] & (group < WIDTH)[None, :]
        runs = tl.load(patterns + (segment * NUMBERED + number)[:, None] * WIDTH + group[None, :], mask=known)
        target = decided + (row * SEGMENTS + segment)[:, None] * WIDTH + group[None, :]
        tl.store(target, runs, mask=known)


@triton.jit(do_not_specialize=["rows"])
def chunk_kernel(
    x,
    norm_weight,
    w1,
    b1,
    w2,
    b2,
    numbers,
    patterns,
    bypass,
    squares,
    hidden,
    byways,
    out,
    ids,
    decided,
    reduced,
    counter,
    rows,
    eps,
    D: tl.constexpr,
    R: tl.constexpr,
    N_G: tl.constexpr,
    SEGMENTS: tl.constexpr,
    C: tl.constexpr,
    NUMBERED: tl.constexpr,
    WIDTH: tl.constexpr,
    NORMALISED: tl.constexpr,
    TAP_EPS: tl.constexpr,
    PARTS: tl.constexpr,
    HALVES: tl.constexpr,
    RP: tl.constexpr,
    RB: tl.constexpr,
    RBP: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
    BG: tl.constexpr,
    BW: tl.constexpr,
    PDL: tl.constexpr,
):
    """One chunk of D of BM rows. HALVES: "first", "second", or "both" with a wait between them.

    Rows decide on N_G groups, or with SEGMENTS > 0 pick one of C patterns in each and store its number and, with a
    WIDTH, its groups out of `patterns` [SEGMENTS, NUMBERED, WIDTH]. RB: the bypass' rank, 0 = there is none.
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
        acc = tl.zeros((BM, RP), tl.float32)
        around = tl.zeros((BM, RBP), tl.float32)
        square = tl.zeros((BM, BK), tl.float32)
        for i in range(0, BD // BK):
            d = chunk * BD + i * BK + k
            known = inside[:, None] & (d < D)[None, :]
            tile = tl.load(x + offset + i * BK, mask=known, other=0.0)
            full = tile.to(tl.float32)
            square += full * full
            known = (rank < R)[None, :] & (d < D)[:, None]
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
            if RB > 0:
                known = (by < RB)[None, :] & (d < D)[:, None]
                up = tl.load(bypass + by[None, :] * D + d[:, None], mask=known, other=0.0)
                around = tl.dot(tile, up, around, input_precision="ieee")
        tl.store(squares + chunk * rows + row, tl.sum(square, 1), mask=inside)
        tl.store(hidden + (chunk * rows + row)[:, None] * RP + rank[None, :], acc, mask=inside[:, None])
        if RB > 0:
            tl.store(byways + (chunk * rows + row)[:, None] * RBP + by[None, :], around, mask=inside[:, None])
    # The decision is cut into units of 16 rows and BG groups or one segment.
    ACROSS: tl.constexpr = SEGMENTS if SEGMENTS > 0 else (N_G + BG - 1) // BG
    UNITS: tl.constexpr = (BM // 16) * ACROSS
    if SEGMENTS > 0:  # ahead of the wait
        weight, bias = scoring(w2, b2, chunk % ACROSS, 0, C, R, RP, BG)
    else:
        weight, bias = differences(w2, b2, (chunk % ACROSS) * BG, N_G, R, RP, BG)
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
            if SEGMENTS > 0:
                if unit >= CHUNKS:
                    weight, bias = scoring(w2, b2, column, 0, C, R, RP, BG)
                choose(
                    whole, weight, bias, w2, b2, numbers, patterns, ids, decided, some, column, rows,
                    SEGMENTS, C, NUMBERED, WIDTH, R, RP, BG, BW,
                )  # fmt: skip
            else:
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
    rows, groups = x.shape[0], w2.shape[0] // 2
    decided = torch.empty(rows, groups, dtype=torch.uint8, device=x.device)
    sizes = {"N_G": groups, "SEGMENTS": 0, "C": 0, "NUMBERED": 0, "WIDTH": 0, "BW": 16}
    head = Head(w2, b2, decided, decided, decided, decided, sizes)  # no numbers, patterns and ids
    reduced = x.new_empty(rows, 0 if bypass is None else bypass.shape[0])
    byway = None if bypass is None else (bypass, reduced)
    return _norm_and_route(x, norm_weight, w1, b1, head, eps, tap, early, byway), decided.view(torch.bool), reduced


def norm_and_choose(
    x: Tensor,
    norm_weight: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    numbers: Tensor,
    patterns: Tensor | None,
    eps: float,
    tap: str,
    early: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`norm_route_patterns` for a contiguous x [T, D]; without patterns the mask has no rows."""
    rows = x.shape[0]
    segments, count, _ = w2.shape
    ids = torch.empty(segments, rows, dtype=torch.int32, device=x.device)
    sizes = {"N_G": 0, "SEGMENTS": segments, "C": count, "BG": min(padded_rows(count), PATTERNS_AT_ONCE)}
    if patterns is None:
        decided = torch.empty(0, 0, dtype=torch.uint8, device=x.device)
        head = Head(w2, b2, numbers, numbers, ids, ids, sizes | {"NUMBERED": 0, "WIDTH": 0, "BW": 16})
    else:
        _, numbered, width = patterns.shape
        decided = torch.empty(rows, segments * width, dtype=torch.uint8, device=x.device)
        block = min(padded_rows(width), GROUPS_AT_ONCE)
        sizes |= {"NUMBERED": numbered, "WIDTH": width, "BW": block}
        head = Head(w2, b2, numbers, patterns.view(torch.uint8), ids, decided, sizes)
    return _norm_and_route(x, norm_weight, w1, b1, head, eps, tap, early), ids, decided.view(torch.bool)


def _norm_and_route(
    x: Tensor,
    norm_weight: Tensor,
    w1: Tensor,
    b1: Tensor,
    head: Head,
    eps: float,
    tap: str,
    early: bool,
    byway: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Normalised x; fills the results of the head and, of `byway` (bypass, reduced), the second."""
    rows, size = x.shape
    rank = w1.shape[-2]
    out = torch.empty_like(x)
    if rows == 0:
        return out
    padded = padded_rows(rank)
    bypass, reduced = (x, x) if byway is None else byway  # else pointers that the kernels do not follow
    width = 0 if byway is None else len(bypass)
    padded_width = padded_rows(width)
    # A 16-bit x is exact in tf32, and w1 in two parts of it: two products on tensor cores are as good as fp32.
    parts = w1.shape[0] if w1.dim() == 3 else 1 if x.dtype is torch.float32 else 2
    wide = row_words(padded, width)
    with on_device_of(x):
        few = row_config(rows, size, max(padded, padded_width, wide // 2), x.dtype, x.device)
        config: dict[str, Any] = (chunk_config(rows, size, x.dtype, x.device) if few is None else few) | head.sizes
        chunks = triton.cdiv(size, config["BD"])
        together = config.pop("TOGETHER") and x.is_cuda and 1 < chunks <= multiprocessors(x.device)
        routing = (norm_weight, w1, b1, head.w2, head.b2, head.numbers, head.patterns, bypass)
        results = (out, head.ids, head.decided, reduced)
        config |= {"D": size, "R": rank, "NORMALISED": tap == "normalised", "TAP_EPS": TAP_EPS, "RP": padded}
        config |= {"RB": width, "RBP": padded_width}
        launches = ("both",) if together else ("first", "second")
        if few is not None:
            config |= {"PARTS": w1.shape[0] if w1.dim() == 3 else 1, "EARLY": early, "WIDE": wide}
            config["WORDS"] = chunks * wide + 32
            # Each form of a row has words of its own: what one of them leaves behind means nothing to another.
            use, count = f"norm_route {chunks} {padded} {width}", rows * config["WORDS"]
            words = counters(use, x.device, count) if together else x.new_empty(count, dtype=torch.int32)
            for halves in launches:
                few_rows.row_kernel[(chunks, rows)](x, *routing, words, *results, rows, eps, HALVES=halves, **config)
            return out
        config["PARTS"] = parts
        tiles = triton.cdiv(rows, config["BM"])
        squares = torch.empty(chunks, rows, dtype=torch.float32, device=x.device)
        hidden = torch.empty(chunks, rows, padded, dtype=torch.float32, device=x.device)
        byways = hidden if byway is None else hidden.new_empty(chunks, rows, padded_width)
        counter = counters("meeting", x.device, tiles) if together else squares  # not followed then
        for halves in launches:
            chunk_kernel[(chunks, tiles)](
                x, *routing, squares, hidden, byways, *results, counter, rows, eps, HALVES=halves, **config
            )
    return out

"""Triton, a few rows (decode): norm and decision of a row by programs that each own a chunk of D and nothing else.

Nothing here waits for memory's speed, all of it for its latency, so the trips count: one for x and one for everybody's
sums, which are added up in a fixed order. A published sum is its own flag: the lowest bit of its word is the launch's,
0 and 1 in turns, which costs half a unit in the last place of fp32; who reads clears it. So neither a counter nor a
fence lies between the sums of one program and the result of another. The weights need not wait for x: with `early` they
are fetched while the launch before this one ends. No tensor core: one row would fill a sixteenth of it. The decision is
made as in triton.py, whose kernel is for more rows.

The words of a row: [CHUNKS, RP] of the bottleneck, [CHUNKS] sums of squares, the number of launches so far. Programs of
one row must be resident at once: as in `meeting.py`, they have adjacent numbers and are few, see the launcher.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from wide_kernels.norm_route.heads import differences, scoring


@triton.jit
def published(value, turn):
    """fp32 as a word of this launch; `turn` is its lowest bit."""
    return (value.to(tl.int32, bitcast=True) & -2) | turn


@triton.jit
def received(hidden, squares, turn, CHUNKS: tl.constexpr, CP: tl.constexpr, RP: tl.constexpr, TOGETHER: tl.constexpr):
    """(bottleneck [RP], sum of squares) of a row, from all chunks; TOGETHER: as soon as this launch has put them."""
    chunk = tl.arange(0, CP)
    known = chunk < CHUNKS
    places = hidden + chunk[:, None] * RP + tl.arange(0, RP)[None, :]
    sums = tl.load(places, mask=known[:, None], other=turn, volatile=True)
    square = tl.load(squares + chunk, mask=known, other=turn, volatile=True)
    if TOGETHER:
        while tl.max(tl.max((sums ^ turn) & 1, 1) | ((square ^ turn) & 1), 0) != 0:
            sums = tl.load(places, mask=known[:, None], other=turn, volatile=True)
            square = tl.load(squares + chunk, mask=known, other=turn, volatile=True)
    whole = tl.sum((sums & -2).to(tl.float32, bitcast=True), 0)
    return whole, tl.sum((square & -2).to(tl.float32, bitcast=True), 0)


@triton.jit
def scores_with(whole, weight, bias):
    """z [BG] of one row: whole [RP] times weight [RP, BG], plus bias."""
    return tl.sum(whole[:, None] * weight, 0) + bias


@triton.jit
def row_kernel(
    x,
    norm_weight,
    w1,
    b1,
    w2,
    b2,
    numbers,
    patterns,
    words,
    out,
    ids,
    decided,
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
    BD: tl.constexpr,
    CP: tl.constexpr,
    BG: tl.constexpr,
    BW: tl.constexpr,
    WORDS: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One chunk of D of one row. HALVES: "first", "second", or "both" with a wait between them. WORDS: of a row.

    A row decides on N_G groups, or with SEGMENTS > 0 picks one of C patterns in each and stores its number and, with a
    WIDTH, its groups out of `patterns` [SEGMENTS, NUMBERED, WIDTH].
    """
    CHUNKS: tl.constexpr = (D + BD - 1) // BD
    ACROSS: tl.constexpr = SEGMENTS if SEGMENTS > 0 else (N_G + BG - 1) // BG
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    d = chunk * BD + tl.arange(0, BD)
    known = d < D
    rank = tl.arange(0, RP)
    if PDL and not EARLY:
        gdc_wait()
        gdc_launch_dependents()
    gain = tl.load(norm_weight + d, mask=known, other=0.0)
    # Every chunk decides for some groups, or in some segment; those beyond ACROSS have nothing to decide.
    if SEGMENTS > 0:
        weight, bias = scoring(w2, b2, chunk % ACROSS, 0, C, R, RP, BG)
    else:
        weight, bias = differences(w2, b2, (chunk % ACROSS) * BG, N_G, R, RP, BG)
    first_bias = tl.load(b1 + rank, mask=rank < R, other=0.0)
    there = (rank < R)[:, None] & known[None, :]
    place = w1 + rank[:, None] * D + d[None, :]
    down = tl.load(place, mask=there, other=0.0).to(tl.float32)
    if PARTS > 1:
        for piece in tl.static_range(1, PARTS):
            down += tl.load(place + piece * R * D, mask=there, other=0.0).to(tl.float32)
    if PDL and EARLY:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + row * D + d, mask=known, other=0.0).to(tl.float32)
    hidden = words + row * WORDS
    squares = hidden + CHUNKS * RP
    launches = squares + CHUNKS
    TOGETHER: tl.constexpr = HALVES == "both"
    so_far = tl.load(launches, volatile=True) if TOGETHER else 0
    turn = (so_far + 1) & 1
    if HALVES != "second":
        tl.store(hidden + chunk * RP + rank, published(tl.sum(down * value[None, :], 1), turn))
        tl.store(squares + chunk, published(tl.sum(value * value, 0), turn))
    if HALVES != "first":
        whole, square = received(hidden, squares, turn, CHUNKS, CP, RP, TOGETHER)
        mean = square / D
        if TOGETHER and chunk == 0:  # everybody has put a sum and so knows the turn
            tl.store(launches, so_far + 1)
        dtype: tl.constexpr = out.dtype.element_ty
        # Llama's order of roundings: scaled and rounded, then times the weight and rounded.
        scaled = (value * tl.rsqrt(mean + eps)).to(dtype).to(tl.float32)
        tl.store(out + row * D + d, (scaled * gain.to(tl.float32)).to(dtype), mask=known)
        if chunk < ACROSS:
            if NORMALISED:  # w1 (s x) = s (w1 x)
                whole *= tl.rsqrt(mean + TAP_EPS)
            whole += first_bias
            for unit in range(chunk, ACROSS, CHUNKS):
                if SEGMENTS > 0:
                    if unit >= CHUNKS:
                        weight, bias = scoring(w2, b2, unit, 0, C, R, RP, BG)
                    column = tl.arange(0, BG)
                    z = scores_with(whole, weight, bias)
                    best = tl.max(z, 0)
                    pattern = tl.min(tl.where(z == best, column, BG), 0)
                    pattern = tl.where(best > float("-inf"), pattern, 0)  # also for NaN: one of the patterns
                    for begin in range(BG, C, BG):
                        weight, bias = scoring(w2, b2, unit, begin, C, R, RP, BG)
                        z = scores_with(whole, weight, bias)
                        highest = tl.max(z, 0)
                        found = begin + tl.min(tl.where(z == highest, column, BG), 0)
                        higher = highest > best  # the first of equal ones stays
                        pattern = tl.where(higher, found, pattern)
                        best = tl.where(higher, highest, best)
                    number = tl.load(numbers + unit * C + pattern)
                    tl.store(ids + unit * rows + row, number)
                    for begin in range(0, WIDTH, BW):
                        group = begin + tl.arange(0, BW)
                        inside = group < WIDTH
                        runs = tl.load(patterns + (unit * NUMBERED + number) * WIDTH + group, mask=inside)
                        tl.store(decided + (row * SEGMENTS + unit) * WIDTH + group, runs, mask=inside)
                else:
                    if unit >= CHUNKS:
                        weight, bias = differences(w2, b2, unit * BG, N_G, R, RP, BG)
                    z = scores_with(whole, weight, bias)
                    group = unit * BG + tl.arange(0, BG)
                    tl.store(decided + row * N_G + group, (z >= 0).to(tl.uint8), mask=group < N_G)

"""Triton, a few rows (decode): norm and decision of a row by programs that each own a chunk of D and nothing else.

Nothing here waits for memory's speed, all of it for its latency, so the trips count: one for x and one for everybody's
sums, which are added up in a fixed order. A published sum is its own flag: the lowest bit of its word is the launch's,
0 and 1 in turns, which costs up to a unit in the last place of fp32; who reads clears it. So neither a counter nor a
fence lies between the sums of one program and the result of another. The weights need not wait for x: with `early` they
are fetched while the launch before this one ends. No tensor core: one row would fill a sixteenth of it. The decision is
made as in triton.py, whose kernel is for more rows.

The words of a row: CHUNKS times WIDE, a chunk's share of the bottleneck, its sum of squares, some zeros, and its share
of the bypass; then the bit of the last launch. Programs of one row must be resident at once: as in `meeting.py`, they
have adjacent numbers and are few, the launcher sees to that.

    x --+--> w1 x, x^2, A x of a chunk --> words --> sums of all chunks --+--> normalised x of the chunk  (all programs)
        |                                                                 +--> decisions on some groups   (the first)
        +--> kept in registers for the normalised x                       +--> A x / rms, what is reduced (the last)
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from wide_kernels.norm_route.heads import differences


@triton.jit
def published(value, turn):
    """fp32 as a word of this launch; `turn` is its lowest bit."""
    return (value.to(tl.int32, bitcast=True) & -2) | turn


@triton.jit
def received(
    words,
    turn,
    wanted,
    CHUNKS: tl.constexpr,
    CP: tl.constexpr,
    RP: tl.constexpr,
    WIDE: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """(bottleneck [RP], sum of squares, all columns [WIDE]) of a row, summed over all chunks; of the columns only the
    `wanted` first ones. TOGETHER: as soon as this launch has put them.

    One load for all of them, of 512 words or more (CP and RP are 16 at least), so that no two threads hold the same
    one: of a smaller tensor they would, and the wait would see one copy where the sum may take another, older one.
    """
    chunk = tl.arange(0, CP)
    column = tl.arange(0, WIDE)  # the bottleneck, the sum of squares, zeros, the bypass, nothing
    places = words + chunk[:, None] * WIDE + column[None, :]
    known = (chunk < CHUNKS)[:, None] & (column < wanted)[None, :]
    word = tl.load(places, mask=known, other=turn, volatile=True)
    if TOGETHER:
        while tl.max(tl.max((word ^ turn) & 1, 1), 0) != 0:
            word = tl.load(places, mask=known, other=turn, volatile=True)
    total = tl.sum((word & -2).to(tl.float32, bitcast=True), 0)
    if WIDE == 2 * RP:
        whole, square = tl.split(tl.trans(tl.reshape(total, (2, RP))))
        square = tl.sum(tl.where(tl.arange(0, RP) < 4, square, 0.0), 0)
    else:
        part = tl.arange(0, WIDE // RP)[:, None]
        whole = tl.sum(tl.where(part == 0, tl.reshape(total, (WIDE // RP, RP)), 0.0), 0)
        square = tl.sum(tl.where(column == RP, total, 0.0), 0)
    return whole, square, total


@triton.jit
def row_kernel(
    x,
    norm_weight,
    w1,
    b1,
    w2,
    b2,
    bypass,
    words,
    out,
    decided,
    reduced,
    rows,
    eps,
    D: tl.constexpr,
    R: tl.constexpr,
    N_G: tl.constexpr,
    NORMALISED: tl.constexpr,
    TAP_EPS: tl.constexpr,
    PARTS: tl.constexpr,
    HALVES: tl.constexpr,
    RP: tl.constexpr,
    RB: tl.constexpr,
    RBP: tl.constexpr,
    WIDE: tl.constexpr,
    BD: tl.constexpr,
    CP: tl.constexpr,
    BG: tl.constexpr,
    WORDS: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One chunk of D of one row. HALVES: "first", "second", or "both" with a wait between them. WORDS: of a row.

    RB: the bypass' rank, 0 = there is none.
    """
    CHUNKS: tl.constexpr = (D + BD - 1) // BD
    BYPASSED: tl.constexpr = (RB + 3) // 4 * 4  # words of it: everything is read 16 bytes at a time
    ACROSS: tl.constexpr = (N_G + BG - 1) // BG
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    d = chunk * BD + tl.arange(0, BD)
    known = d < D
    rank = tl.arange(0, RP)
    if PDL and not EARLY:
        gdc_wait()
        gdc_launch_dependents()
    gain = tl.load(norm_weight + d, mask=known, other=0.0)
    # Every chunk decides for some groups; those beyond ACROSS have nothing to decide.
    weight, bias = differences(w2, b2, (chunk % ACROSS) * BG, N_G, R, RP, BG)
    first_bias = tl.load(b1 + rank, mask=rank < R, other=0.0)
    there = (rank < R)[:, None] & known[None, :]
    place = w1 + rank[:, None] * D + d[None, :]
    down = tl.load(place, mask=there, other=0.0).to(tl.float32)
    if PARTS > 1:
        for piece in tl.static_range(1, PARTS):
            down += tl.load(place + piece * R * D, mask=there, other=0.0).to(tl.float32)
    by = tl.arange(0, RBP)
    if RB > 0:
        around = tl.load(bypass + by[:, None] * D + d[None, :], mask=(by < RB)[:, None] & known[None, :], other=0.0)
    if PDL and EARLY:
        gdc_wait()
        gdc_launch_dependents()
    words += row * WORDS
    last_turn = words + CHUNKS * WIDE
    TOGETHER: tl.constexpr = HALVES == "both"
    turn = 1
    value = tl.load(x + row * D + d, mask=known, other=0.0).to(tl.float32)
    if TOGETHER:
        last = tl.load(last_turn, volatile=True)
        turn = last ^ 1
        # It is 0 or 1. But so the sums wait until every thread has it: once they are seen it may change.
        value = tl.where(last > 1, 0.0, value)
    if HALVES != "second":
        own = words + chunk * WIDE
        tl.store(own + rank, published(tl.sum(down * value[None, :], 1), turn))
        four = tl.arange(0, 4)  # so that everything is read 16 bytes at a time
        tl.store(own + RP + four, published(tl.where(four == 0, tl.sum(value * value, 0), 0.0), turn))
        if RB > 0:
            share = tl.sum(around.to(tl.float32) * value[None, :], 1)
            tl.store(own + RP + 4 + by, published(share, turn), mask=by < BYPASSED)
    if HALVES != "first":
        # The last chunk alone needs the bypass; it seldom has groups to decide for.
        wanted = tl.where(chunk == CHUNKS - 1, RP + 4 + BYPASSED, RP + 4)
        whole, square, total = received(words, turn, wanted, CHUNKS, CP, RP, WIDE, TOGETHER)
        mean = square / D
        if TOGETHER and chunk == 0:  # everybody has put a sum and so knows the turn
            tl.store(last_turn, turn)
        dtype: tl.constexpr = out.dtype.element_ty
        # Llama's order of roundings: scaled and rounded, then times the weight and rounded.
        scaled = (value * tl.rsqrt(mean + eps)).to(dtype).to(tl.float32)
        tl.store(out + row * D + d, (scaled * gain.to(tl.float32)).to(dtype), mask=known)
        if RB > 0:  # noqa: SIM102 - decided by the compiler, the inner one by the program
            if chunk == CHUNKS - 1:
                column = tl.arange(0, WIDE) - (RP + 4)
                here = (column >= 0) & (column < RB)
                tl.store(reduced + row * RB + column, (total * tl.rsqrt(mean + eps)).to(dtype), mask=here)
        if chunk < ACROSS:
            if NORMALISED:  # w1 (s x) = s (w1 x)
                whole *= tl.rsqrt(mean + TAP_EPS)
            whole += first_bias
            for unit in range(chunk, ACROSS, CHUNKS):
                if unit >= CHUNKS:
                    weight, bias = differences(w2, b2, unit * BG, N_G, R, RP, BG)
                z = tl.sum(whole[:, None] * weight, 0) + bias
                group = unit * BG + tl.arange(0, BG)
                tl.store(decided + row * N_G + group, (z >= 0).to(tl.uint8), mask=group < N_G)

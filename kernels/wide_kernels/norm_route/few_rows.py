"""Triton, a few rows (decode): norm and decision of a row by programs that each own a chunk of D and nothing else.

Nothing here waits for memory's speed, all of it for its latency, so the trips count: one for x and one for everybody's
sums, which are added up in a fixed order. A published sum is its own flag: the lowest bit of its word is the launch's,
0 and 1 in turns, which costs up to a unit in the last place of fp32; who reads clears it. So neither a counter nor a
fence lies between the sums of one program and the result of another. The weights need not wait for x: with `early` they
are fetched while the launch before this one ends. No tensor core: one row would fill a sixteenth of it. The decision is
made as in triton.py, whose kernel is for more rows.

A chunk publishes twice where there is a bypass. 2 RP words are for the chunks: its share of the bottleneck, its sum of
squares, zeros. BYWORDS are for one program more, which owns no chunk and adds up what the bypass reads: the sum of
squares again, zeros, the chunk's share of the bypass. So nobody waits for words that another one needs. Behind all of
them stands the bit of the last launch. Programs of one row must be resident at once: as in `meeting.py`, they have
adjacent numbers and are few, the launcher sees to that.

    x --+--> w1 x, x^2 of a chunk --> words --> sums of all chunks --+--> normalised x of the chunk  (all chunks)
        |                                                            +--> decisions on some groups   (the first ones)
        +--> A x, x^2 of a chunk --> words --> sums of all chunks -----> A x / rms, what is reduced  (one program more)
        +--> kept in registers for the normalised x
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
def received(words, turn, CHUNKS: tl.constexpr, CP: tl.constexpr, RP: tl.constexpr, TOGETHER: tl.constexpr):
    """(products [RP], sum of squares) of a row, summed over all chunks; TOGETHER: as soon as this launch has put them.

    One load for all of them, of 512 words or more (CP and RP are 16 at least), so that no two threads hold the same
    one: of a smaller tensor they would, and the wait would see one copy where the sum may take another, older one.
    """
    chunk = tl.arange(0, CP)
    column = tl.arange(0, 2 * RP)  # the products, the sum of squares, zeros, nothing
    places = words + chunk[:, None] * (2 * RP) + column[None, :]
    known = (chunk < CHUNKS)[:, None] & (column < RP + 4)[None, :]
    word = tl.load(places, mask=known, other=turn, volatile=True)
    if TOGETHER:
        while tl.max(tl.max((word ^ turn) & 1, 1), 0) != 0:
            word = tl.load(places, mask=known, other=turn, volatile=True)
    total = tl.sum((word & -2).to(tl.float32, bitcast=True), 0)
    whole, square = tl.split(tl.trans(tl.reshape(total, (2, RP))))
    return whole, tl.sum(square, 0)


@triton.jit
def gather_bypass(
    words,
    last_turn,
    reduced,
    eps,
    D: tl.constexpr,
    RB: tl.constexpr,
    RBP: tl.constexpr,
    CHUNKS: tl.constexpr,
    CP: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Store what the bypass reads of a row. It comes last, so it also puts the bit of this launch."""
    turn = 1
    if TOGETHER:
        turn = tl.load(last_turn, volatile=True) ^ 1
    total, square = received(words, turn, CHUNKS, CP, RBP, TOGETHER)
    if TOGETHER:  # everybody has put a sum and so knows the turn
        tl.store(last_turn, turn)
    by = tl.arange(0, RBP)
    value = total * tl.rsqrt(square / D + eps)
    tl.store(reduced + by, value.to(reduced.dtype.element_ty), mask=by < RB)


@triton.jit
def serve_chunk(
    x,
    norm_weight,
    w1,
    b1,
    w2,
    b2,
    bypass,
    words,
    bywords,
    last_turn,
    out,
    decided,
    chunk,
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
    BD: tl.constexpr,
    CHUNKS: tl.constexpr,
    CP: tl.constexpr,
    BG: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One chunk of D of one row; all pointers of a row's own are at that row."""
    ACROSS: tl.constexpr = (N_G + BG - 1) // BG
    d = chunk * BD + tl.arange(0, BD)
    known = d < D
    rank = tl.arange(0, RP)
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
    TOGETHER: tl.constexpr = HALVES == "both"
    turn = 1
    value = tl.load(x + d, mask=known, other=0.0).to(tl.float32)
    if TOGETHER:
        last = tl.load(last_turn, volatile=True)
        turn = last ^ 1
        # It is 0 or 1. But so the sums wait until every thread has it: once they are seen it may change.
        value = tl.where(last > 1, 0.0, value)
    if HALVES != "second":
        four = tl.arange(0, 4)  # so that everything is read 16 bytes at a time
        square = published(tl.where(four == 0, tl.sum(value * value, 0), 0.0), turn)
        own = words + chunk * 2 * RP
        tl.store(own + rank, published(tl.sum(down * value[None, :], 1), turn))
        tl.store(own + RP + four, square)
        if RB > 0:
            own = bywords + chunk * 2 * RBP
            tl.store(own + by, published(tl.sum(around.to(tl.float32) * value[None, :], 1), turn))
            tl.store(own + RBP + four, square)
    if HALVES != "first":
        whole, square = received(words, turn, CHUNKS, CP, RP, TOGETHER)
        mean = square / D
        if TOGETHER and RB == 0:  # noqa: SIM102 - decided by the compiler, the inner one by the program
            if chunk == 0:  # everybody has put a sum and so knows the turn
                tl.store(last_turn, turn)
        dtype: tl.constexpr = out.dtype.element_ty
        # Llama's order of roundings: scaled and rounded, then times the weight and rounded.
        scaled = (value * tl.rsqrt(mean + eps)).to(dtype).to(tl.float32)
        tl.store(out + d, (scaled * gain.to(tl.float32)).to(dtype), mask=known)
        if chunk < ACROSS:
            if NORMALISED:  # w1 (s x) = s (w1 x)
                whole *= tl.rsqrt(mean + TAP_EPS)
            whole += first_bias
            for unit in range(chunk, ACROSS, CHUNKS):
                if unit >= CHUNKS:
                    weight, bias = differences(w2, b2, unit * BG, N_G, R, RP, BG)
                z = tl.sum(whole[:, None] * weight, 0) + bias
                group = unit * BG + tl.arange(0, BG)
                tl.store(decided + group, (z >= 0).to(tl.uint8), mask=group < N_G)


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
    BD: tl.constexpr,
    CP: tl.constexpr,
    BG: tl.constexpr,
    WORDS: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One chunk of D of one row, or behind them all what the bypass (of rank RB, 0 = there is none) reads of it.

    HALVES: "first", "second", or "both" with a wait between them. WORDS: of a row.
    """
    CHUNKS: tl.constexpr = (D + BD - 1) // BD
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    words += row * WORDS
    bywords = words + CHUNKS * 2 * RP
    last_turn = bywords + (CHUNKS * 2 * RBP if RB > 0 else 0)
    if PDL and not EARLY:
        gdc_wait()
        gdc_launch_dependents()
    if chunk < CHUNKS:
        serve_chunk(
            x + row * D, norm_weight, w1, b1, w2, b2, bypass, words, bywords, last_turn, out + row * D,
            decided + row * N_G, chunk, eps, D, R, N_G, NORMALISED, TAP_EPS, PARTS, HALVES, RP, RB, RBP, BD, CHUNKS, CP,
            BG, EARLY, PDL,
        )  # fmt: skip
    elif RB > 0:
        if PDL and EARLY:
            gdc_wait()
            gdc_launch_dependents()
        if HALVES != "first":
            gather_bypass(bywords, last_turn, reduced + row * RB, eps, D, RB, RBP, CHUNKS, CP, HALVES == "both")

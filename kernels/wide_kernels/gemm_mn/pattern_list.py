"""Triton: which pieces of work a persistent GEMM-MN kernel for patterns computes and which it only zeroes.

A chunk is SLOTS pieces of groups, side by side in a tile of results; a group has PIECES of them. `chunks` is int32
[1 + tiles * CHUNKS, 2]: row 0 holds the number of live chunks, then they come, then the dead ones, as pairs
(tile * CHUNKS + chunk, halves of the tile that run some of it). Live ones run in bands of BAND tiles and inside a band
by their first column, so that what runs at one time shares gathered rows as well as weights.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def live_chunks(counts, tile, known, PIECES: tl.constexpr, SLOTS: tl.constexpr):
    """How many chunks of these tiles some row runs."""
    listed = tl.load(counts + tile * 3, mask=known, other=0)
    listed += tl.load(counts + tile * 3 + 1, mask=known, other=0)
    listed += tl.load(counts + tile * 3 + 2, mask=known, other=0)
    return tl.cdiv(listed * PIECES, SLOTS)


@triton.jit
def first_columns(classed, tile, chunk, N_G: tl.constexpr, PIECES: tl.constexpr, SLOTS: tl.constexpr):
    """The place among all pieces of the first one of each chunk of a tile."""
    piece = chunk * SLOTS
    slot = tl.minimum(piece // PIECES, N_G - 1)
    return (tl.load(classed + tile.to(tl.int64) * N_G + slot) >> 2) * PIECES + piece % PIECES


@triton.jit(do_not_specialize=["tiles"])
def chunk_kernel(
    classed,
    counts,
    chunks,
    tiles,
    N_G: tl.constexpr,
    PIECES: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List the chunks of one tile."""
    tile = tl.program_id(0)
    first = tile // BAND * BAND
    everywhere = 0
    before_band = 0
    before = 0
    for start in range(0, tiles, BLOCK):
        other = start + tl.arange(0, BLOCK)
        live = live_chunks(counts, other, other < tiles, PIECES, SLOTS)
        everywhere += tl.sum(live, 0)
        before_band += tl.sum(tl.where(other < first, live, 0), 0)
        before += tl.sum(tl.where(other < tile, live, 0), 0)
    chunk = tl.arange(0, CHUNKS_PADDED)
    own = live_chunks(counts, tile, True, PIECES, SLOTS)
    key = first_columns(classed, tile, chunk, N_G, PIECES, SLOTS)
    place = tl.zeros_like(chunk)
    for local in range(BAND):
        neighbour = tl.minimum(first + local, tiles - 1)
        other_live = live_chunks(counts, neighbour, first + local < tiles, PIECES, SLOTS)
        other_key = first_columns(classed, neighbour, chunk, N_G, PIECES, SLOTS)
        # What has the same first column comes by tile; a tile has no two such chunks.
        earlier = (other_key[None, :] < key[:, None] + (neighbour < tile).to(tl.int32)) & (chunk < other_live)[None, :]
        place += tl.sum(earlier.to(tl.int32), 1)
    halves = tl.zeros_like(chunk)
    for turn in range(SLOTS):
        slot = (chunk * SLOTS + turn) // PIECES
        halves |= tl.load(classed + tile.to(tl.int64) * N_G + slot, mask=slot < N_G, other=0) & 3
    dead = everywhere + tile * CHUNKS - before + chunk - own
    target = chunks + 2 * (1 + tl.where(chunk < own, before_band + place, dead))
    tl.store(target, tile * CHUNKS + chunk, mask=chunk < CHUNKS)
    tl.store(target + 1, halves, mask=chunk < CHUNKS)
    if tile == 0:
        tl.store(chunks, everywhere)


def chunk_list(classed: Tensor, counts: Tensor, pieces: int, slots: int, band: int) -> Tensor:
    """The chunks of all tiles, from `classed_lists`; a group has `pieces`, a chunk `slots` of them."""
    tiles, groups = classed.shape
    per_tile = triton.cdiv(groups * pieces, slots)
    chunks = torch.empty(1 + tiles * per_tile, 2, dtype=torch.int32, device=classed.device)
    chunk_kernel[(tiles,)](
        classed, counts, chunks, tiles,
        groups, pieces, slots, per_tile, max(16, triton.next_power_of_2(per_tile)), band, 128, num_warps=8,
    )  # fmt: skip
    return chunks

"""Triton: the down projection over executed groups only, for many rows and for a few."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wide_kernels.dispatch import on_device_of
from wide_kernels.errors import UnsupportedError
from wide_kernels.gemm_k.configs import FEW_ROWS, few_rows_config, slab_columns, sorted_groups, tile_config
from wide_kernels.gemm_k.sorting import SortedPatterns, either, sort_patterns


@triton.jit(do_not_specialize=["rows", "first_segment"])  # first_column is a multiple of 16: it keeps adds vectorised
def tile_kernel(
    h,
    weight,
    out,
    order,
    patterns,
    rows,
    stride_h,
    stride_out,
    first_segment,
    first_column,
    N: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    ATOMIC: tl.constexpr,
    SLAB: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Add one segment's share of BM rows x BN columns to `out`: one scatter for all groups of the segment.

    The K loop walks the groups that any row of the tile runs; a row that skips one of them contributes zeros, which are
    made in registers: skipped values of `h` are never read. Programs finish a slab of SLAB column tiles, which stays in
    L2, before the next. `out` holds the columns from `first_column` on.
    """
    row_tile = tl.program_id(0) // SLAB
    tile = tl.program_id(2) * SLAB + tl.program_id(0) % SLAB
    segment = first_segment + tl.program_id(1)
    place = row_tile * BM + tl.arange(0, BM)
    inside = place < rows
    sorted_row = segment.to(tl.int64) * rows + place
    bits = tl.load(patterns + sorted_row, mask=inside, other=0)
    row = tl.load(order + sorted_row, mask=inside, other=0).to(tl.int64)
    needed = tl.reduce(bits, 0, either)
    steps: tl.constexpr = G // BK
    # The needed groups of the segment as a list of 4-bit numbers in one register.
    packed = needed * 0
    groups = needed * 0
    for j in tl.static_range(S):
        bit = (needed >> j) & 1
        packed |= (bit * j) << (4 * groups)
        groups += bit
    local = tile * BN + tl.arange(0, BN)
    column = first_column + local
    if (groups > 0) & (first_column + tile * BN < N):
        depth = tl.arange(0, BK)
        h_tile = h + row[:, None] * stride_h + depth[None, :]
        known = tl.minimum(column, N - 1).to(tl.int64)  # past the end: read the last column, store nothing
        w_tile = weight + known[None, :] * K + depth[:, None]
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(0, groups * steps):
            slot = (packed >> (4 * (step // steps))) & 15
            k = (segment * S + slot) * G + (step % steps) * BK
            runs = ((bits >> slot) & 1) != 0
            a = tl.load(h_tile + k, mask=runs[:, None], other=0.0)
            b = tl.load(w_tile + k)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        target = out + row[:, None] * stride_out + local[None, :]
        live = (bits != 0)[:, None] & (column < N)[None, :]
        if ATOMIC:
            tl.atomic_add(target, acc.to(out.dtype.element_ty), mask=live, sem="relaxed")
        else:
            tl.store(target, tl.load(target, mask=live, other=0.0) + acc, mask=live)


@triton.jit(do_not_specialize=["rows"])
def few_rows_kernel(
    h,
    weight,
    residual,
    out,
    partial,
    active,
    active_rows,
    mask,
    rows,
    stride_h,
    N: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    N_G: tl.constexpr,
    N_G_PADDED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """All rows (at most BM) times BN columns, over every SPLITS-th step of the groups that some row runs."""
    group = tl.arange(0, N_G_PADDED)
    runners = tl.zeros((N_G_PADDED,), tl.int64)  # one bit a row
    for r in range(0, rows):
        runners |= tl.load(mask + r * N_G + group, mask=group < N_G, other=0).to(tl.int64) << r
    some = (runners != 0).to(tl.int32)
    place = tl.cumsum(some, 0) - some
    # Every program writes the same lists and reads back what it wrote itself: no launch just for them.
    tl.store(active + place, group, mask=some != 0)
    tl.store(active_rows + place, runners, mask=some != 0)
    tl.debug_barrier()
    steps: tl.constexpr = G // BK
    row = tl.arange(0, BM)
    inside = row < rows
    depth = tl.arange(0, BK)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    h_tile = h + row[:, None].to(tl.int64) * stride_h + depth[None, :]
    w_tile = weight + tl.minimum(column, N - 1)[None, :].to(tl.int64) * K + depth[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    split = tl.program_id(1)
    # The list is read one step ahead: an index read in its own step would halve the depth of the load pipeline.
    end = tl.sum(some, 0) * steps
    g = tl.load(active + split // steps, mask=split < end, other=0)
    who = tl.load(active_rows + split // steps, mask=split < end, other=0)
    for step in range(split, end, SPLITS):
        k = g * G + (step % steps) * BK
        runs = ((who >> row) & 1) != 0
        a = tl.load(h_tile + k, mask=runs[:, None], other=0.0)
        b = tl.load(w_tile + k)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        ahead = step + SPLITS
        g = tl.load(active + ahead // steps, mask=ahead < end, other=0)
        who = tl.load(active_rows + ahead // steps, mask=ahead < end, other=0)
    target = row[:, None].to(tl.int64) * N + column[None, :]
    known = inside[:, None] & (column < N)[None, :]
    if SPLITS > 1:
        tl.store(partial + split.to(tl.int64) * rows * N + target, acc, mask=known)
    else:
        if HAS_RESIDUAL:
            acc += tl.load(residual + target, mask=known, other=0.0).to(tl.float32)
        tl.store(out + target, acc.to(out.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=["size"])
def reduce_kernel(partial, residual, out, size, HAS_RESIDUAL: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """out = the sum of the splits in a fixed order, plus the residual."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    known = entry < size
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial + split * size + entry, mask=known, other=0.0)
    if HAS_RESIDUAL:
        total += tl.load(residual + entry, mask=known, other=0.0).to(tl.float32)
    tl.store(out + entry, total.to(out.dtype.element_ty), mask=known)


def project(
    h: Tensor, weight: Tensor, mask: Tensor, residual: Tensor | None, accumulate: str, deterministic: bool
) -> Tensor:
    """`gemm_k` for h [T, K]; `accumulate` is fp32 or bf16, already decided."""
    rows, columns = h.shape[0], weight.shape[0]
    if rows == 0:
        return torch.empty(0, columns, dtype=h.dtype, device=h.device)
    h = h if h.stride(1) == 1 else h.contiguous()
    mask = mask.contiguous()
    with on_device_of(h):
        if rows <= FEW_ROWS:
            return _few_rows(h, weight, mask, residual)
        patterns = sort_patterns(mask, sorted_groups(rows, mask.shape[1]))
        if accumulate == "bf16":
            if h.is_cuda and torch.cuda.get_device_capability(h.device) < (9, 0):
                raise UnsupportedError("gemm_k: accumulate='bf16' needs compute capability 9.0 or newer; use fp32")
            return _scatter_whole(h, weight, mask.shape[1], patterns, residual)
        return _scatter_slabs(h, weight, mask.shape[1], patterns, residual, deterministic)


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype is torch.float32 else "tf32"


def _scatter_whole(h: Tensor, weight: Tensor, groups: int, patterns: SortedPatterns, residual: Tensor | None) -> Tensor:
    """Scatter rounded partials straight into the output."""
    (rows, depth), columns = h.shape, weight.shape[0]
    width = depth // groups
    out = h.new_zeros(rows, columns) if residual is None else residual.clone(memory_format=torch.contiguous_format)
    config = tile_config(rows, columns, width, h.dtype)
    slab = slab_columns(rows, columns, out.element_size(), config["BN"]) // config["BN"]
    grid = (triton.cdiv(rows, config["BM"]) * slab, patterns.segments, triton.cdiv(columns, slab * config["BN"]))
    tile_kernel[grid](
        h, weight, out, patterns.order, patterns.patterns, rows, h.stride(0), columns, 0, 0,
        columns, depth, width, patterns.length, True, slab, _precision(h.dtype), **config,
    )  # fmt: skip
    return out


def _scatter_slabs(
    h: Tensor, weight: Tensor, groups: int, patterns: SortedPatterns, residual: Tensor | None, deterministic: bool
) -> Tensor:
    """Scatter fp32 partials into a buffer for one slab of columns that stays in L2; round it when it is complete.

    Deterministic: one launch a segment. A segment has each row in one tile only, so within a launch nothing is added
    twice to one place, and the launches come in order.
    """
    (rows, depth), columns = h.shape, weight.shape[0]
    width = depth // groups
    out = torch.empty(rows, columns, dtype=h.dtype, device=h.device)
    config = tile_config(rows, columns, width, h.dtype)
    slab = slab_columns(rows, columns, 4, config["BN"])
    buffer = torch.empty(rows, slab, dtype=torch.float32, device=h.device)
    tiles = slab // config["BN"]
    together = 1 if deterministic else patterns.segments
    for first in range(0, columns, slab):
        buffer.zero_()
        for segment in range(0, patterns.segments, together):
            tile_kernel[(triton.cdiv(rows, config["BM"]) * tiles, together, 1)](
                h, weight, buffer, patterns.order, patterns.patterns, rows, h.stride(0), slab, segment, first,
                columns, depth, width, patterns.length, not deterministic, tiles, _precision(h.dtype), **config,
            )  # fmt: skip
        part = slice(first, min(first + slab, columns))
        complete = buffer[:, : part.stop - part.start]
        if residual is None:
            out[:, part].copy_(complete)
        else:
            torch.add(complete, residual[:, part], out=out[:, part])
    return out


def _few_rows(h: Tensor, weight: Tensor, mask: Tensor, residual: Tensor | None) -> Tensor:
    (rows, depth), columns, groups = h.shape, weight.shape[0], mask.shape[1]
    width = depth // groups
    out = torch.empty(rows, columns, dtype=h.dtype, device=h.device)
    config = few_rows_config(rows, columns, width, groups, h.dtype)
    splits = config["SPLITS"]
    active = torch.empty(groups, dtype=torch.int32, device=h.device)
    active_rows = torch.empty(groups, dtype=torch.int64, device=h.device)
    partial = torch.empty(splits if splits > 1 else 0, rows, columns, dtype=torch.float32, device=h.device)
    fused = (residual is not None,)
    residual = out if residual is None else residual.contiguous()  # else a pointer that the kernel does not follow
    few_rows_kernel[(triton.cdiv(columns, config["BN"]), splits)](
        h, weight, residual, out, partial, active, active_rows, mask.view(torch.uint8), rows, h.stride(0),
        columns, depth, width, groups, triton.next_power_of_2(groups), *fused, PRECISION=_precision(h.dtype), **config,
    )  # fmt: skip
    if splits > 1:
        size = rows * columns
        reduce_kernel[(triton.cdiv(size, 512),)](partial, residual, out, size, *fused, splits, 512)
    return out

"""Triton: the down projection over executed groups only, for many rows.

What rows skip is never read.

    mask --> rows sorted by pattern, segment by segment --> tiles of rows that need the same few groups
    h of a tile's rows, needed groups only --x weight--> one segment's share --added--> out
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wide_kernels.compensate import triton as compensate
from wide_kernels.dispatch import on_device_of
from wide_kernels.errors import UnsupportedError
from wide_kernels.gemm_k import few_rows
from wide_kernels.gemm_k.configs import FEW_FIXED_ROWS, Order, slab_columns, tile_config, tile_order
from wide_kernels.gemm_k.sorting import SortedPatterns, either, sort_patterns
from wide_kernels.stand_in import StandIn


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


def project(
    h: Tensor,
    weight: Tensor,
    mask: Tensor,
    residual: Tensor | None,
    accumulate: str,
    deterministic: bool,
    stand_in: StandIn | None = None,
) -> Tensor:
    """`gemm_k` for h [T, K]; `accumulate` is fp32 or bf16, already decided."""
    rows, columns = h.shape[0], weight.shape[0]
    if rows == 0:
        return torch.empty(0, columns, dtype=h.dtype, device=h.device)
    if deterministic and rows <= FEW_FIXED_ROWS:
        return few_rows.project(h, weight, mask, residual, stand_in=stand_in)
    h = h if h.stride(1) == 1 else h.contiguous()
    mask = mask.contiguous()
    with on_device_of(h):
        groups = mask.shape[1]
        order = tile_order(rows, groups, h.shape[1] // groups, h.dtype)
        patterns = sort_patterns(mask, order.segment)
        if accumulate == "bf16":
            if h.is_cuda and torch.cuda.get_device_capability(h.device) < (9, 0):
                raise UnsupportedError("gemm_k: accumulate='bf16' needs compute capability 9.0 or newer; use fp32")
            start = start_of_sums(h, weight, mask, residual, stand_in)
            return _scatter_whole(h, weight, groups, order, patterns, start)
        if stand_in is not None:
            residual = compensate.add(residual, stand_in.weight, mask, stand_in.reduced)
        return _scatter_slabs(h, weight, groups, order, patterns, residual, deterministic)


def start_of_sums(h: Tensor, weight: Tensor, mask: Tensor, residual: Tensor | None, stand_in: StandIn | None) -> Tensor:
    """A new tensor that partial sums are added to: the residual stream and what stands in for skipped groups."""
    if stand_in is not None:
        return compensate.add(residual, stand_in.weight, mask, stand_in.reduced)
    if residual is not None:
        return residual.clone(memory_format=torch.contiguous_format)
    return h.new_zeros(h.shape[0], weight.shape[0])


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype is torch.float32 else "tf32"


def _scatter_whole(
    h: Tensor, weight: Tensor, groups: int, order: Order, patterns: SortedPatterns, out: Tensor
) -> Tensor:
    """Scatter rounded partials straight into the output, which they are added to."""
    (rows, depth), columns = h.shape, weight.shape[0]
    width = depth // groups
    config = tile_config(rows, columns, width, h.dtype)
    slab = slab_columns(rows, columns, out.element_size(), config["BN"], order.slab_bytes) // config["BN"]
    grid = (triton.cdiv(rows, config["BM"]) * slab, patterns.segments, triton.cdiv(columns, slab * config["BN"]))
    tile_kernel[grid](
        h, weight, out, patterns.order, patterns.patterns, rows, h.stride(0), columns, 0, 0,
        columns, depth, width, patterns.length, True, slab, _precision(h.dtype), **config,
    )  # fmt: skip
    return out


def _scatter_slabs(
    h: Tensor,
    weight: Tensor,
    groups: int,
    order: Order,
    patterns: SortedPatterns,
    residual: Tensor | None,
    deterministic: bool,
) -> Tensor:
    """Scatter fp32 partials into a buffer for one slab of columns that stays in L2; round it when it is complete.

    Deterministic: one launch a segment. A segment has each row in one tile only, so within a launch nothing is added
    twice to one place, and the launches come in order.
    """
    (rows, depth), columns = h.shape, weight.shape[0]
    width = depth // groups
    out = torch.empty(rows, columns, dtype=h.dtype, device=h.device)
    config = tile_config(rows, columns, width, h.dtype)
    slab = slab_columns(rows, columns, 4, config["BN"], order.slab_bytes)
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

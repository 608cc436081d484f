"""Triton, a few rows (decode): the down projection with the skipped groups' weights left unread.

Every program owns some output columns, that is rows of the weight, and walks along them in the order of memory; loads
of skipped groups are switched off where they stand. So the work is even whatever the masks are, and nothing is listed
beforehand. Tensor cores take the weights as the left operand, K is cut into splits, the last program of a tile to
finish adds them up in a fixed order. Rows beyond one tile take more tiles beside it, which find the weights in L2; that
is for sums whose order must be fixed. One row has a kernel of its own (one_row.py).

What stands in for skipped groups is a few steps of K more, which the splits share out among them before their own; with
`early` that is done when h comes:

    mask, reduced --> [1 - m, u reduced] --x standing--> acc --wait--> + masked(h) weight^T --> sum of splits --> out
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from wide_kernels.counters import counters
from wide_kernels.dispatch import is_hopper, on_device_of
from wide_kernels.gemm_k import one_row
from wide_kernels.gemm_k.configs import FEW_ROWS
from wide_kernels.gemm_mn.few_rows import OVERLAPPED_ROWS
from wide_kernels.stand_in import StandIn
from wide_kernels.stand_in_tiles import coefficients, skipped_share
from wide_kernels.tuning.lookup import overlapped, tuned
from wide_kernels.tuning.tiles import TILE, largest_power, padded_rows

PROGRAMS = 264  # two for each multiprocessor of the largest GPUs
STANDING_STEP = 64  # columns of what stands in that a program multiplies at one time


@triton.jit(do_not_specialize=["rows"])
def rows_kernel(
    h,
    weight,
    residual,
    out,
    partial,
    arrived,
    mask,
    standing,
    reduced,
    rows,
    stride_h,
    N: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    P: tl.constexpr,
    RB: tl.constexpr,
    NP: tl.constexpr,
    BP: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLITS: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """BT rows times BN columns, over every SPLITS-th step of K; weights that none of the rows needs stay unread.

    `arrived` is zero for every tile before and after: the last split to come adds up all of them. P: columns of what
    stands in for skipped groups (0 = nothing does), RB of them the bypass'; EARLY: it and the mask are older than the
    launch before this one.
    """
    if PDL and not EARLY:
        gdc_wait()
        gdc_launch_dependents()
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    split = tl.program_id(2)
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    inside = row < rows
    counter = arrived + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    depth = tl.arange(0, BK)
    w_tile = weight + column[:, None].to(tl.int64) * K + depth[None, :]
    h_tile = h + row[None, :].to(tl.int64) * stride_h + depth[:, None]
    row_flags = mask + row * (K // G)
    acc = tl.zeros((BN, BT), tl.float32)
    if P > 0:
        share = tl.zeros((BT,), tl.float32)
        if RB > 0:
            share = skipped_share(mask, row, inside, K // G, NP)
        # One step or two: a pipeline would take the shared memory of the loop below.
        for first in tl.range(split * BP, P, SPLITS * BP, num_stages=1):
            place = first + tl.arange(0, BP)
            known = (column < N)[:, None] & (place < P)[None, :]
            a = tl.load(standing + column[:, None].to(tl.int64) * P + place[None, :], mask=known, other=0.0)
            b = coefficients(mask, reduced, row[None, :], inside[None, :], share[None, :], place[:, None], K // G, RB)
            acc = tl.dot(a, b.to(a.dtype), acc, input_precision=PRECISION)
    if PDL and EARLY:
        gdc_wait()
        gdc_launch_dependents()
    # Who runs a group is read one step ahead: read in its own step, it would halve the depth of the load pipeline.
    flags = tl.load(row_flags + split * BK // G, mask=inside, other=0)
    for k in range(split * BK, K, SPLITS * BK):
        runs = flags != 0
        read = tl.where(column < N, tl.max(flags.to(tl.int32), 0), 0) != 0
        ahead = tl.minimum(k + SPLITS * BK, K - BK)
        flags = tl.load(row_flags + ahead // G, mask=inside, other=0)
        a = tl.load(w_tile + k, mask=read[:, None], other=0.0)
        b = tl.load(h_tile + k, mask=runs[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    target = row[None, :].to(tl.int64) * N + column[:, None]
    stored = inside[None, :] & (column < N)[:, None]
    last = True
    if SPLITS > 1:
        tl.store(partial + split.to(tl.int64) * rows * N + target, acc, mask=stored)
        tl.debug_barrier()  # all threads have stored before one of them says so
        last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
    if last:
        if SPLITS > 1:
            acc = tl.zeros((BN, BT), tl.float32)
            for other in range(SPLITS):
                acc += tl.load(partial + other * rows * N + target, mask=stored, other=0.0, cache_modifier=".cg")
            tl.store(counter, 0)
        if HAS_RESIDUAL:
            acc += tl.load(residual + target, mask=stored, other=0.0).to(tl.float32)
        tl.store(out + target, acc.to(out.dtype.element_ty), mask=stored)


def rows_config(
    rows: int, columns: int, depth: int, width: int, dtype: torch.dtype, device: torch.device
) -> dict[str, int]:
    """Tall tiles, so that h, which every column tile reads, weighs little; splits until the GPU is full.

    A step stays within a group, so narrow groups get shallow steps.
    """
    config = {"BN": 64, "BK": 128 if rows <= 32 else 64, "num_stages": 4, "num_warps": 4, "PDL": 0}
    config["PDL"] = int(rows <= OVERLAPPED_ROWS and is_hopper(device))
    config |= tuned("few_rows_k", rows, width, dtype)
    config["BK"] = largest_power(width, config["BK"] // 2 if dtype is torch.float32 else config["BK"])
    config["BT"] = min(padded_rows(rows), FEW_ROWS)
    tiles = -(-columns // config["BN"]) * -(-rows // config["BT"])
    config.setdefault("SPLITS", max(1, min(PROGRAMS // tiles, depth // config["BK"] // 4)))
    return overlapped(config)


def project(
    h: Tensor,
    weight: Tensor,
    mask: Tensor,
    residual: Tensor | None,
    early: bool = False,
    stand_in: StandIn | None = None,
) -> Tensor:
    """`gemm_k` for h [T, K] of few rows, straight from the mask; the order of the sums is fixed."""
    (rows, depth), columns = h.shape, weight.shape[0]
    h = h if h.stride(1) == 1 else h.contiguous()
    if rows == 1:
        return one_row.project(h, weight, mask, residual, early, stand_in)
    out = torch.empty(rows, columns, dtype=h.dtype, device=h.device)
    if rows == 0:
        return out
    width = depth // mask.shape[1]
    flags = mask.contiguous().view(torch.uint8)
    fused = (depth, width, residual is not None)
    added = out if residual is None else residual.contiguous()  # else a pointer that the kernel does not follow
    standing, reduced = out, out
    standing_in = {"P": 0, "RB": 0, "NP": padded_rows(mask.shape[1]), "BP": TILE, "EARLY": False}
    if stand_in is not None:
        standing, early = stand_in.weight, early and mask.is_contiguous()
        columns_more = standing.shape[1]
        standing_in |= {"P": columns_more, "BP": min(STANDING_STEP, padded_rows(columns_more))}
        if stand_in.reduced is not None:
            reduced, early = stand_in.reduced.contiguous(), early and stand_in.reduced.is_contiguous()
            standing_in["RB"] = reduced.shape[1]
        standing_in["EARLY"] = early  # else the launch before this one copies something
    with on_device_of(h):
        config = rows_config(rows, columns, depth, width, h.dtype, h.device)
        tiles, splits = triton.cdiv(columns, config["BN"]), config["SPLITS"]
        row_tiles = triton.cdiv(rows, config["BT"])
        partial, arrived = out, out
        if splits > 1:
            partial = torch.empty(splits, rows, columns, dtype=torch.float32, device=h.device)
            arrived = counters("last to arrive", h.device, tiles * row_tiles)
        precision = "ieee" if h.dtype is torch.float32 else "tf32"
        rows_kernel[(row_tiles, tiles, splits)](
            h, weight, added, out, partial, arrived, flags, standing, reduced, rows, h.stride(0),
            columns, *fused, **standing_in, PRECISION=precision, **config,
        )  # fmt: skip
    return out

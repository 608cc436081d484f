"""Triton, many rows: a product as shallow as this one costs what moving its operands costs.

The left operand is written first, by a launch of its own: it is small enough to stay in L2, and whoever makes it in
registers instead makes it anew for every tile of columns. The residual stream is what the sums start from, so that it
is read once, added to and written once, as a copy of it would be.

    mask, reduced --> [1 - m, u reduced] --+
    weight --------------------------------x--+--> out
    residual ---------------------------------+

Very many rows keep their left operand in registers while they walk along the columns; fewer are cut into more tiles
than that gives.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from wide_kernels.compensate.configs import left_config, tile_config, walk_config
from wide_kernels.dispatch import on_device_of
from wide_kernels.stand_in_tiles import coefficients, skipped_share
from wide_kernels.tuning.tiles import padded_rows


@triton.jit(do_not_specialize=["rows"])
def left_kernel(
    mask,
    reduced,
    left,
    rows,
    N_G: tl.constexpr,
    RB: tl.constexpr,
    P: tl.constexpr,
    NP: tl.constexpr,
    PDL: tl.constexpr,
    BM: tl.constexpr,
    BP: tl.constexpr,
):
    """BM rows times BP of the P columns of the left operand; NP, a power of two, holds N_G groups."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < rows
    share = tl.zeros((BM,), tl.float32)
    if RB > 0:
        share = skipped_share(mask, row, inside, N_G, NP)
    k = tl.program_id(1) * BP + tl.arange(0, BP)
    value = coefficients(mask, reduced, row[:, None], inside[:, None], share[:, None], k[None, :], N_G, RB)
    known = inside[:, None] & (k < P)[None, :]
    tl.store(left + row[:, None] * P + k[None, :], value.to(left.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=["rows"])
def tile_kernel(
    residual,
    left,
    weight,
    out,
    rows,
    N: tl.constexpr,
    P: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """BM rows times BN columns, in steps of BK columns of the left operand."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < rows
    target = row[:, None] * N + column[None, :]
    stored = inside[:, None] & (column < N)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    if HAS_RESIDUAL:
        acc = tl.load(residual + target, mask=stored, other=0.0).to(tl.float32)
    depth = tl.arange(0, BK)
    for first in range(0, P, BK):
        k = first + depth
        a = tl.load(left + row[:, None] * P + k[None, :], mask=inside[:, None] & (k < P)[None, :], other=0.0)
        known = (k < P)[:, None] & (column < N)[None, :]
        b = tl.load(weight + column[None, :] * P + k[:, None], mask=known, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    tl.store(out + target, acc.to(out.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["rows"])
def walk_kernel(
    residual,
    left,
    weight,
    out,
    rows,
    N: tl.constexpr,
    P: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPAN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BM rows times SPAN columns, BN at a time: the left operand is read once.

    Its P columns are held as FIRST and REST of them, powers of two; REST 0 = there are no others.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < rows
    k = tl.arange(0, FIRST)
    a = tl.load(left + row[:, None] * P + k[None, :], mask=inside[:, None], other=0.0)
    if REST > 0:
        rest = FIRST + tl.arange(0, REST)
        a_rest = tl.load(left + row[:, None] * P + rest[None, :], mask=inside[:, None] & (rest < P)[None, :], other=0.0)
    for i in tl.range(0, SPAN // BN, num_stages=STAGES):
        column = tl.program_id(0) * SPAN + i * BN + tl.arange(0, BN)
        target = row[:, None] * N + column[None, :]
        stored = inside[:, None] & (column < N)[None, :]
        acc = tl.zeros((BM, BN), tl.float32)
        if HAS_RESIDUAL:
            acc = tl.load(residual + target, mask=stored, other=0.0).to(tl.float32)
        b = tl.load(weight + column[None, :] * P + k[:, None], mask=(column < N)[None, :], other=0.0)
        acc = tl.dot(a, b, acc)
        if REST > 0:
            b_rest = tl.load(
                weight + column[None, :] * P + rest[:, None],
                mask=(rest < P)[:, None] & (column < N)[None, :],
                other=0.0,
            )
            acc = tl.dot(a_rest, b_rest, acc)
        tl.store(out + target, acc.to(out.dtype.element_ty), mask=stored)


def add(residual: Tensor | None, weight: Tensor, mask: Tensor, reduced: Tensor | None) -> Tensor:
    """`compensate`, a new tensor; without a residual stream what is added to one."""
    (rows, groups), (columns, width) = mask.shape, weight.shape
    out = torch.empty(rows, columns, dtype=weight.dtype, device=weight.device)
    if rows == 0:
        return out
    left = torch.empty(rows, width, dtype=weight.dtype, device=weight.device)
    read = left if reduced is None else reduced.contiguous()  # else a pointer that the kernel does not follow
    added = out if residual is None else residual.contiguous()
    with on_device_of(weight):
        config = left_config(width, weight.device)
        left_kernel[(triton.cdiv(rows, config["BM"]), triton.cdiv(width, config["BP"]))](
            mask.contiguous().view(torch.uint8), read, left, rows,
            groups, 0 if reduced is None else reduced.shape[1], width, padded_rows(groups), **config,
        )  # fmt: skip
        walk = walk_config(rows, columns, width, weight.dtype, weight.device)
        if walk is not None:
            grid = (triton.cdiv(columns, walk["SPAN"]), triton.cdiv(rows, walk["BM"]))
            walk_kernel[grid](added, left, weight, out, rows, columns, width, residual is not None, **walk)
            return out
        config = tile_config(rows, columns, width, weight.dtype, weight.device)
        grid = (triton.cdiv(columns, config["BN"]), triton.cdiv(rows, config["BM"]))
        precision = "ieee" if weight.dtype is torch.float32 else "tf32"
        tile_kernel[grid](
            added, left, weight, out, rows, columns, width, residual is not None, PRECISION=precision, **config
        )
    return out

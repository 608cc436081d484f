"""Triton, many rows: the residual stream is read once, added to and written once, as a copy of it would be.

    mask, reduced --> [1 - m, u reduced] in registers --x weight^T--+--> out
    residual -------------------------------------------------------+

The left operand exists in registers alone: who would write it first needs a launch more, and the library's product
would read what its own copy of the residual stream has just written.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from wide_kernels.compensate.configs import tile_config
from wide_kernels.dispatch import on_device_of
from wide_kernels.stand_in_tiles import coefficients, skipped_share
from wide_kernels.tuning.tiles import padded_rows


@triton.jit(do_not_specialize=["rows"])
def tile_kernel(
    residual,
    weight,
    mask,
    reduced,
    out,
    rows,
    N: tl.constexpr,
    N_G: tl.constexpr,
    RB: tl.constexpr,
    P: tl.constexpr,
    NP: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """BM rows times BN columns. EARLY: all but the residual is older than the launch before this one."""
    if PDL and not EARLY:
        gdc_wait()
        gdc_launch_dependents()
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    # 64 bits once a program: numbers within its tile fit into 32
    first_row = tl.program_id(1).to(tl.int64) * BM
    residual += first_row * N
    out += first_row * N
    mask += first_row * N_G
    reduced += first_row * RB
    row = tl.arange(0, BM)
    inside = row < rows - first_row
    target = row[:, None] * N + column[None, :]
    stored = inside[:, None] & (column < N)[None, :]
    share = tl.zeros((BM,), tl.float32)
    if RB > 0:
        share = skipped_share(mask, row, inside, N_G, NP)
    depth = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for first in range(0, P, BK):
        k = first + depth
        a = coefficients(mask, reduced, row[:, None], inside[:, None], share[:, None], k[None, :], N_G, RB)
        known = (k < P)[:, None] & (column < N)[None, :]
        b = tl.load(weight + column[None, :] * P + k[:, None], mask=known, other=0.0)
        acc = tl.dot(a.to(b.dtype), b, acc, input_precision=PRECISION)
    if PDL and EARLY:
        gdc_wait()
        gdc_launch_dependents()
    if HAS_RESIDUAL:
        acc += tl.load(residual + target, mask=stored, other=0.0).to(tl.float32)
    tl.store(out + target, acc.to(out.dtype.element_ty), mask=stored)


def add(residual: Tensor | None, weight: Tensor, mask: Tensor, reduced: Tensor | None, early: bool = False) -> Tensor:
    """`compensate`, a new tensor."""
    (rows, groups), (columns, width) = mask.shape, weight.shape
    out = torch.empty(rows, columns, dtype=weight.dtype, device=weight.device)
    if rows == 0:
        return out
    early = early and mask.is_contiguous() and (reduced is None or reduced.is_contiguous())  # else copied just now
    read = out if reduced is None else reduced.contiguous()  # else a pointer that the kernel does not follow
    added = out if residual is None else residual.contiguous()
    with on_device_of(weight):
        config = tile_config(rows, columns, width, weight.dtype, weight.device)
        tile_kernel[(triton.cdiv(columns, config["BN"]), triton.cdiv(rows, config["BM"]))](
            added, weight, mask.contiguous().view(torch.uint8), read, out, rows,
            columns, groups, 0 if reduced is None else reduced.shape[1], width, padded_rows(groups),
            HAS_RESIDUAL=residual is not None, EARLY=early,
            PRECISION="ieee" if weight.dtype is torch.float32 else "tf32", **config,
        )  # fmt: skip
    return out

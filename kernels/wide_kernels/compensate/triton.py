"""Triton, many rows: what stands in for skipped groups as one product of a library, whose left operand is made here.

    mask, reduced --> [1 - m, u reduced] --x weight^T (library)--+--> out
    residual ----------------------------------------------------+

One kernel that multiplied out of registers would read the residual stream once less (about 67 us at 16384 rows of
Llama-3.1-8B on an H200). With such a kernel some rows of a chain of layers, 3000 rows, came out wrong there.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wide_kernels.dispatch import on_device_of
from wide_kernels.stand_in_tiles import coefficients, skipped_share
from wide_kernels.tuning.tiles import padded_rows

ROWS_AT_ONCE = 16


@triton.jit(do_not_specialize=["rows"])
def operand_kernel(
    mask,
    reduced,
    out,
    rows,
    N_G: tl.constexpr,
    RB: tl.constexpr,
    P: tl.constexpr,
    NP: tl.constexpr,
    PP: tl.constexpr,
    BM: tl.constexpr,
):
    """BM rows of out [rows, P]; NP and PP are powers of two that hold N_G and P."""
    # 64 bits once a program: numbers within its tile fit into 32
    first_row = tl.program_id(0).to(tl.int64) * BM
    mask += first_row * N_G
    reduced += first_row * RB
    out += first_row * P
    row = tl.arange(0, BM)
    inside = row < rows - first_row
    share = tl.zeros((BM,), tl.float32)
    if RB > 0:
        share = skipped_share(mask, row, inside, N_G, NP)
    k = tl.arange(0, PP)
    value = coefficients(mask, reduced, row[:, None], inside[:, None], share[:, None], k[None, :], N_G, RB)
    stored = inside[:, None] & (k < P)[None, :]
    tl.store(out + row[:, None] * P + k[None, :], value.to(out.dtype.element_ty), mask=stored)


def add(residual: Tensor | None, weight: Tensor, mask: Tensor, reduced: Tensor | None) -> Tensor:
    """`compensate`, a new tensor."""
    (rows, groups), width = mask.shape, weight.shape[1]
    operand = torch.empty(rows, width, dtype=weight.dtype, device=weight.device)
    if rows:
        read = operand if reduced is None else reduced.contiguous()  # else a pointer that the kernel does not follow
        with on_device_of(weight):
            operand_kernel[(triton.cdiv(rows, ROWS_AT_ONCE),)](
                mask.contiguous().view(torch.uint8), read, operand, rows,
                groups, 0 if reduced is None else reduced.shape[1], width, padded_rows(groups), padded_rows(width),
                ROWS_AT_ONCE,
            )  # fmt: skip
    return operand @ weight.T if residual is None else torch.addmm(residual, operand, weight.T)

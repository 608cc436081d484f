"""Triton, a few rows (decode): a weight is read once, by programs that first look whether its group runs at all.

These products wait for memory only. The weights are the left operand, so that their rows fill the tensor core's tall
side and the tokens its narrow one. Programs of skipped groups write zeros and leave; the rest come in the order of
memory, several to a multiprocessor. One row has a kernel of its own (one_row.py).

    mask of all rows --none runs g--> zeros --> out
                     --some does----> weight of g x (rows of x)^T --> zeros where a row skips --> activation --> out
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from wide_kernels.dispatch import is_hopper, on_device_of
from wide_kernels.gemm_mn import one_row
from wide_kernels.gemm_mn.triton import activated
from wide_kernels.layout import extended
from wide_kernels.tuning.lookup import overlapped, tuned
from wide_kernels.tuning.tiles import padded_rows

OVERLAPPED_ROWS = 16  # start while the launch before them ends: 2 % of a decode step of 8 rows, a loss of 1 % at 32


@triton.jit(do_not_specialize=["rows"])
def rows_kernel(
    x,
    weight,
    weight_up,
    bias,
    out,
    mask,
    rows,
    stride_x,
    N: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """BN columns, of one group or several narrow ones, times all rows (at most BT), if some row runs one of them."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.arange(0, BT)
    inside = row < rows
    if G % BN == 0:
        group = tl.program_id(0) * BN // G
        live = (tl.load(mask + row * (N // G) + group, mask=inside, other=0) != 0)[None, :]
    else:
        asked = (columns < N)[:, None] & inside[None, :]
        live = tl.load(mask + row[None, :] * (N // G) + (columns // G)[:, None], mask=asked, other=0) != 0
    target = out + row[None, :].to(tl.int64) * N + columns[:, None]
    stored = (columns < N)[:, None] & inside[None, :]
    runs = tl.max(live.to(tl.int32), 1)  # of the columns
    if tl.max(runs, 0) != 0:
        depth = tl.arange(0, BK)
        x_tile = x + row[None, :].to(tl.int64) * stride_x + depth[:, None]
        offset = columns[:, None].to(tl.int64) * K + depth[None, :]
        acc = tl.zeros((BN, BT), tl.float32)
        acc_up = tl.zeros((BN, BT), tl.float32)
        for k in range(0, K, BK):
            if (K % BK == 0) & (G % BN == 0):
                a = tl.load(weight + offset + k)
                b = tl.load(x_tile + k, mask=inside[None, :], other=0.0)
            else:
                a = tl.load(weight + offset + k, mask=(runs != 0)[:, None] & (depth + k < K)[None, :], other=0.0)
                b = tl.load(x_tile + k, mask=inside[None, :] & (depth + k < K)[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
            if GATED:
                if (K % BK == 0) & (G % BN == 0):
                    c = tl.load(weight_up + offset + k)
                else:
                    c = tl.load(weight_up + offset + k, mask=(runs != 0)[:, None] & (depth + k < K)[None, :], other=0.0)
                acc_up = tl.dot(c, b, acc_up, input_precision=PRECISION)
        if HAS_BIAS:
            acc += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
        acc = activated(acc, ACTIVATION)
        if GATED:
            acc *= acc_up
        # A row's own values never reach another row, so this also removes what a row that runs nothing may hold.
        acc = tl.where(live, acc, 0.0)
        tl.store(target, acc.to(out.dtype.element_ty), mask=stored)
    else:
        tl.store(target, tl.zeros((BN, BT), out.dtype.element_ty), mask=stored)


def rows_config(
    rows: int, depth: int, width: int, gated: bool, dtype: torch.dtype, device: torch.device
) -> dict[str, int]:
    """Tall tiles, so that the rows of x, which every program reads, weigh little beside the weights."""
    config = {"BN": 64, "BK": 128 if rows <= 32 else 64, "num_warps": 4 if rows <= 64 else 8, "PDL": 0}
    config["PDL"] = int(rows <= OVERLAPPED_ROWS and is_hopper(device))
    config["num_stages"] = 3 if gated else 4
    config |= tuned("few_rows_gated" if gated else "few_rows_mn", rows, width, dtype)
    if dtype is torch.float32:  # twice the shared memory
        config["BK"] //= 2
    config["BK"] = min(config["BK"], padded_rows(depth))
    return overlapped(config | {"BT": padded_rows(rows)})


def project(
    x: Tensor,
    weight: Tensor,
    weight_up: Tensor | None,
    mask: Tensor,
    bias: Tensor | None,
    activation: str | None,
    always: int = 0,
    early: bool = False,
) -> Tensor:
    """`gemm_mn`, or with `weight_up` `gated_mlp_up`, for x [T, K] of at most FEW_ROWS rows, straight from the mask."""
    rows, depth = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    if rows == 1:
        return one_row.project(x, weight, weight_up, mask, bias, activation, always, early)
    columns = weight.shape[0]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    mask = extended(mask, always)
    width = columns // mask.shape[1]
    gated = weight_up is not None
    operands = (x, weight, weight if weight_up is None else weight_up, weight if bias is None else bias, out)
    flags = mask.contiguous().view(torch.uint8)
    fused = (depth, width, gated, bias is not None, activation or "none")
    with on_device_of(x):
        config = rows_config(rows, depth, width, gated, x.dtype, x.device)
        precision = "ieee" if x.dtype is torch.float32 else "tf32"
        rows_kernel[(triton.cdiv(columns, config["BN"]),)](
            *operands, flags, rows, x.stride(0), columns, *fused, PRECISION=precision, **config
        )
    return out

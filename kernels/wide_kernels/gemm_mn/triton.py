"""Triton: gathered rows times the weights of one group, for many rows, from a layout.

Every tile belongs to one group.

    layout --> rows that run group g --> their x --x weight of g--> bias, activation --> out[rows, columns of g]
           --> rows that skip it -------------------------------------> zeros --------> out[rows, columns of g]
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wide_kernels.dispatch import on_device_of
from wide_kernels.gemm_mn.configs import tile_config
from wide_kernels.layout import route_layout


@triton.jit
def activated(z, ACTIVATION: tl.constexpr):
    """The activation of fp32 `z`; "none" is the identity."""
    if ACTIVATION == "silu":
        z = z * tl.sigmoid(z)
    elif ACTIVATION == "relu":
        z = tl.maximum(z, 0.0)
    elif ACTIVATION == "gelu":
        z = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # 0.5 (1 + tanh u) = sigmoid(2 u)
        z = z * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    return z


@triton.jit
def banded_tile(row_tiles, COLUMN_TILES: tl.constexpr, BAND: tl.constexpr):
    """(row tile, column tile) of this program: BAND row tiles meet all columns before the next ones start."""
    pid = tl.program_id(0)
    band = pid // (BAND * COLUMN_TILES)
    height = tl.minimum(row_tiles - band * BAND, BAND)
    local = pid % (BAND * COLUMN_TILES)
    return band * BAND + local % height, local // height


@triton.jit
def products(
    x_rows, weight, weight_up, bias, columns,
    K: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """fp32 [BM, BN]: rows from `x_rows` [BM, 1] on times the weights of `columns` [BN], with bias and activation."""
    depth = tl.arange(0, BK)
    x_tile = x_rows + depth[None, :]
    offset = columns[None, :].to(tl.int64) * K + depth[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    acc_up = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        if K % BK == 0:
            a = tl.load(x_tile + k)
            b = tl.load(weight + offset + k)
        else:
            a = tl.load(x_tile + k, mask=(depth + k < K)[None, :], other=0.0)
            b = tl.load(weight + offset + k, mask=(depth + k < K)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if GATED:
            if K % BK == 0:
                c = tl.load(weight_up + offset + k)
            else:
                c = tl.load(weight_up + offset + k, mask=(depth + k < K)[:, None], other=0.0)
            acc_up = tl.dot(a, c, acc_up, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + columns).to(tl.float32)[None, :]
    acc = activated(acc, ACTIVATION)
    if GATED:
        acc *= acc_up
    return acc


@triton.jit(do_not_specialize=["rows"])
def tile_kernel(
    x,
    weight,
    weight_up,
    bias,
    out,
    index,
    count,
    rows,
    stride_x,
    N: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
):
    """One tile of BM places of a group's row list and BN of its columns.

    Places behind count[group] hold the rows that skip the group: the tile that straddles the border masks them, the
    tiles behind it only write zeros. So every element of `out` is written once and nobody clears it before.
    """
    # Its gathered rows stay in L2.
    row_tile, column_tile = banded_tile(tl.cdiv(rows, BM), N // BN, BAND)
    column = column_tile * BN
    group = column // G

    executed = tl.load(count + group)
    place = row_tile * BM + tl.arange(0, BM)
    inside = place < rows
    live = place < executed
    index += group.to(tl.int64) * rows
    row = tl.load(index + place, mask=inside, other=0)
    columns = column + tl.arange(0, BN)
    target = out + row[:, None].to(tl.int64) * N + columns[None, :]
    if row_tile * BM < executed:
        # Rows that skip the group read the first row that runs it, so that their own values are never touched.
        source = tl.where(live, row, tl.load(index)).to(tl.int64)
        acc = products(
            x + source[:, None] * stride_x, weight, weight_up, bias, columns,
            K, GATED, HAS_BIAS, ACTIVATION, PRECISION, BM, BN, BK,
        )  # fmt: skip
        acc = tl.where(live[:, None], acc, 0.0)
        tl.store(target, acc.to(out.dtype.element_ty), mask=inside[:, None])
    else:
        tl.store(target, tl.zeros((BM, BN), out.dtype.element_ty), mask=inside[:, None])


def project(
    x: Tensor,
    weight: Tensor,
    weight_up: Tensor | None,
    mask: Tensor,
    index: Tensor | None,
    count: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
) -> Tensor:
    """`gemm_mn`, or with `weight_up` `gated_mlp_up`: x [T, K] -> [T, N]; a long mask gets a layout here."""
    rows, depth = x.shape
    columns, groups = weight.shape[0], mask.shape[1]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    width = columns // groups
    gated = weight_up is not None
    up = weight if weight_up is None else weight_up
    fused = (gated, bias is not None, activation or "none", "ieee" if x.dtype is torch.float32 else "tf32")
    bias = weight if bias is None else bias  # a pointer that the kernel does not follow
    with on_device_of(x):
        if index is None or count is None:
            layout = route_layout(mask, backend="triton")
            index, count = layout.index, layout.count
        tile = tile_config(rows, depth, width, gated, x.dtype)
        tile_kernel[(triton.cdiv(rows, tile["BM"]) * (columns // tile["BN"]),)](
            x, weight, up, bias, out, index, count, rows, x.stride(0), columns, depth, width, *fused, **tile
        )
    return out

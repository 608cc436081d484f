"""Triton: rows of a tile of patterns times the weights of the groups that some of them run.

A tile's columns are those of consecutive entries of its list, so groups narrower than the tile share one: the weights'
rows are gathered as the tokens' are. What no row runs stands at the end of the list, where programs only write zeros.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wide_kernels.dispatch import on_device_of
from wide_kernels.gemm_mn.configs import pattern_config
from wide_kernels.gemm_mn.triton import banded_tile, products
from wide_kernels.pattern_layout import HALF_ROWS, TILE_ROWS, PatternLayout


@triton.jit(do_not_specialize=["rows"])
def pattern_kernel(
    x,
    weight,
    weight_up,
    bias,
    out,
    ids,
    patterns,
    order,
    lists,
    listed,
    mixed,
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
    HALF: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
):
    """One tile of rows and BN columns of its list. Every element of `out` is written once, nobody clears it before."""
    N_G: tl.constexpr = N // G
    # Its gathered rows stay in L2.
    tile, column_tile = banded_tile(tl.cdiv(rows, BM), (N + BN - 1) // BN, BAND)
    first = column_tile * BN
    place = tile * BM + tl.arange(0, BM)
    inside = place < rows
    row = tl.load(order + place, mask=inside, other=0).to(tl.int64)
    position = first + tl.arange(0, BN)
    # Where BN does not divide N, the positions past the end repeat the last column and store nothing.
    position_inside = position < N
    position = tl.minimum(position, N - 1)
    entry = tl.load(lists + tile.to(tl.int64) * N_G + position // G)
    group = entry >> 2
    column = tl.max_contiguous(tl.multiple_of(group * G + position % G, 16), 16)
    target = out + row[:, None] * N + column[None, :]
    if N % BN == 0:
        stored = inside[:, None]
    else:
        stored = inside[:, None] & tl.max_constancy(position_inside, 16)[None, :]
    if first < tl.load(listed + tile) * G:
        acc = products(
            x + row[:, None] * stride_x, weight, weight_up, bias, column,
            K, GATED, HAS_BIAS, ACTIVATION, PRECISION, BM, BN, BK,
        )  # fmt: skip
        # A column's values never reach another column nor a row's another row, so this also removes what weights that
        # nobody here runs may hold, and rows that skip.
        half = (place % BM) // HALF
        live = ((entry[None, :] >> half[:, None]) & 1) != 0
        several = tl.load(mixed + tile)
        if several != 0:
            asked = live & (((several >> half) & 1) != 0)[:, None] & inside[:, None]
            chosen = tl.load(ids + row, mask=inside, other=0).to(tl.int64)
            live &= tl.load(patterns + chosen[:, None] * N_G + group[None, :], mask=asked, other=1) != 0
        acc = tl.where(live, acc, 0.0)
        tl.store(target, acc.to(out.dtype.element_ty), mask=stored)
    else:
        tl.store(target, tl.zeros((BM, BN), out.dtype.element_ty), mask=stored)


def project(
    x: Tensor,
    weight: Tensor,
    weight_up: Tensor | None,
    layout: PatternLayout,
    bias: Tensor | None,
    activation: str | None,
) -> Tensor:
    """`gemm_mn`, or with `weight_up` `gated_mlp_up`: x [T, K] -> [T, N]."""
    rows, depth = x.shape
    columns = weight.shape[0]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    width = columns // layout.groups
    gated = weight_up is not None
    up = weight if weight_up is None else weight_up
    fused = (gated, bias is not None, activation or "none", "ieee" if x.dtype is torch.float32 else "tf32")
    bias = weight if bias is None else bias  # a pointer that the kernel does not follow
    config = pattern_config(rows, depth, columns, width, gated, x.dtype)
    with on_device_of(x):
        pattern_kernel[(triton.cdiv(rows, TILE_ROWS) * triton.cdiv(columns, config["BN"]),)](
            x, weight, up, bias, out,
            layout.ids, layout.patterns.view(torch.uint8), layout.order, layout.lists, layout.listed, layout.mixed,
            rows, x.stride(0), columns, depth, width, *fused, BM=TILE_ROWS, HALF=HALF_ROWS, **config,
        )  # fmt: skip
    return out

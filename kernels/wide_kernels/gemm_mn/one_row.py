"""Triton, one row (decode): fp32 sums in registers, no tensor core, a few columns of the weight a program.

Such a product waits for memory only. Programs of skipped groups write zeros and leave; so many are resident on a
multiprocessor that nothing need be fetched ahead. A dense product's first weights are fetched before the row itself is
there, while the launch before this one ends. (Where a product has parts that no decision can skip, their programs must
come first for that to pay, as keys and values do in the engine's own projection.)

    mask[g] --0--> zeros --> out
            --1--> weight rows of g, x --> sums over K in registers --> activation --> out
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from wide_kernels.dispatch import is_hopper, on_device_of
from wide_kernels.gemm_mn.triton import activated
from wide_kernels.tuning.lookup import overlapped, tuned
from wide_kernels.tuning.tiles import largest_power, padded_rows
from wide_kernels.vector_tiles import products_with, weights_of


@triton.jit
def vector_kernel(
    x,
    weight,
    weight_up,
    bias,
    out,
    mask,
    K: tl.constexpr,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    ALWAYS: tl.constexpr,
    EARLY: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
):
    """One row times BN columns of one group. A step takes BC chunks of 8 values, 16 bytes in half precision.

    The mask has GROUPS groups, ALWAYS more follow that run whatever it says. EARLY needs GROUPS = 0: a dense product.
    """
    block = tl.program_id(0)
    if GROUPS > 0 and ALWAYS == 0:  # each after one of another group: skipped ones do not come all in a row
        block = block % GROUPS * (G // BN) + block // GROUPS
    columns = block * BN + tl.arange(0, BN)
    group = block * BN // G
    chunk = tl.arange(0, BC) * 8
    MASKED: tl.constexpr = K % (BC * 8) != 0
    if EARLY:
        tile = weights_of(weight, columns, chunk, chunk < K, K, MASKED)
        if GATED:
            tile_up = weights_of(weight_up, columns, chunk, chunk < K, K, MASKED)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    y = tl.zeros((BN,), tl.float32)
    runs = group >= GROUPS
    if ALWAYS == 0:
        runs = tl.load(mask + group) != 0
    elif GROUPS > 0:
        runs = runs | (tl.load(mask + tl.minimum(group, GROUPS - 1)) != 0)
    if runs:
        acc = tl.zeros((BC, BN), tl.float32)
        acc_up = tl.zeros((BC, BN), tl.float32)
        if EARLY:
            acc = products_with(x, tile, chunk, chunk < K, MASKED)
            if GATED:
                acc_up = products_with(x, tile_up, chunk, chunk < K, MASKED)
        for first in range(BC * 8 if EARLY else 0, K, BC * 8):
            depth = first + chunk
            tile = weights_of(weight, columns, depth, depth < K, K, MASKED)
            if GATED:
                tile_up = weights_of(weight_up, columns, depth, depth < K, K, MASKED)
                acc_up += products_with(x, tile_up, depth, depth < K, MASKED)
            acc += products_with(x, tile, depth, depth < K, MASKED)
        y = tl.sum(acc, 0)
        if HAS_BIAS:
            y += tl.load(bias + columns).to(tl.float32)
        y = activated(y, ACTIVATION)
        if GATED:
            y *= tl.sum(acc_up, 0)
    tl.store(out + columns, y.to(out.dtype.element_ty))


def vector_config(
    depth: int, width: int, gated: bool, dtype: torch.dtype, device: torch.device, early: bool = False
) -> dict[str, int]:
    """Steps of 16 KB straight to registers, of a gated dense product twice as much."""
    config = {"BN": 4, "BC": 256, "num_warps": 4, "PDL": int(is_hopper(device))}
    if gated:
        config |= {"BN": 2} | ({"BC": 512, "num_warps": 8} if early else {})  # what comes early should be much
    config |= tuned("vector_gated" if gated else "vector_mn", 1, width, dtype)
    config["BN"] = largest_power(width, config["BN"])
    config["BC"] = min(config["BC"], padded_rows(-(-depth // 8)))
    return overlapped(config)


def project(
    x: Tensor,
    weight: Tensor,
    weight_up: Tensor | None,
    mask: Tensor,
    bias: Tensor | None,
    activation: str | None,
    always: int,
    early: bool,
) -> Tensor:
    """`gemm_mn`, or with `weight_up` `gated_mlp_up`, for x [1, K]."""
    depth, columns = x.shape[1], weight.shape[0]
    groups = mask.shape[1]
    width = columns // (groups + always)
    gated = weight_up is not None
    out = torch.empty(1, columns, dtype=x.dtype, device=x.device)
    with on_device_of(x):
        early = early and groups == 0
        config = vector_config(depth, width, gated, x.dtype, x.device, early)
        vector_kernel[(columns // config["BN"],)](
            x, weight, weight if weight_up is None else weight_up, weight if bias is None else bias, out,
            mask.contiguous().view(torch.uint8), depth, width, groups, always, early, gated,
            bias is not None, activation or "none", **config,
        )  # fmt: skip
    return out

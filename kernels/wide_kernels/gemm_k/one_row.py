"""Triton, one row (decode): the down projection with the skipped groups' weights left unread.

Such a product waits for memory only. Every program owns some output columns, that is rows of the weight, and walks
along them in the order of memory: fp32 sums in registers, one program for all of K. It finds the groups that run from
the mask and takes as many as fill a step, so every load of a step is one that counts. Groups too narrow to be looked up
in time, and wide ones, are walked over with the loads of skipped ones switched off.

What stands in for skipped groups needs nothing that the launch before this one makes. With `early` its product is over
when h comes:

    mask --> groups that run --> first weights on their way ------------wait--> x h, and the steps after it --+--> out
    mask, reduced --> [1 - m, u reduced] --x standing--> sums so far -----------------------------------------+
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from wide_kernels.dispatch import is_hopper, on_device_of
from wide_kernels.stand_in import StandIn
from wide_kernels.stand_in_tiles import coefficients
from wide_kernels.tuning.lookup import overlapped, tuned
from wide_kernels.tuning.tiles import largest_power, padded_rows
from wide_kernels.vector_tiles import products_with, weights_of

MOST_COMPARED = 8192  # (groups of a step) x (all groups): what finding the groups of a step takes
STANDING = {"PC": 16, "maxnreg": 64}
"""Chunks of a tile of what stands in, and registers: 8 programs of 128 threads must fit on a multiprocessor as they do
without it, so that all of a Llama-3.1-8B's 1024 are resident at once; of 68 registers 7 would.
"""
FEWEST_AT_ONCE = 2  # groups of a step, below which skipped ones leave it whole anyway


@triton.jit
def depths(mask, before, active, first, K: tl.constexpr, G: tl.constexpr, AT_ONCE: tl.constexpr, BC: tl.constexpr):
    """(where each of BC chunks of 8 values begins, whether it counts) in the step from `first` on.

    With AT_ONCE a step takes so many of the `active` groups that run, `before` [N_G] of which come up to each group;
    else BC chunks of K in a row.
    """
    chunk = tl.arange(0, BC) * 8
    if AT_ONCE > 0:
        place = first + tl.arange(0, AT_ONCE)
        group = tl.sum((before[None, :] <= place[:, None]).to(tl.int32), 1)
        PIECES: tl.constexpr = BC // AT_ONCE
        spread = tl.reshape(tl.broadcast_to(group[:, None], (AT_ONCE, PIECES)), (BC,))
        places = tl.reshape(tl.broadcast_to(place[:, None], (AT_ONCE, PIECES)), (BC,))
        return spread * G + chunk % G, places < active
    depth = first + chunk
    return depth, tl.load(mask + depth // G, mask=depth < K, other=0) != 0


@triton.jit
def vector_kernel(
    h,
    weight,
    residual,
    out,
    mask,
    standing,
    reduced,
    K: tl.constexpr,
    G: tl.constexpr,
    NP: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    P: tl.constexpr,
    PC: tl.constexpr,
    RB: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One row times BN columns. A step takes BC chunks of 8 values, 16 bytes in half precision.

    P: columns of what stands in for skipped groups (0 = nothing does), RB of them the bypass', PC chunks a tile.
    """
    if PDL and not EARLY:
        gdc_wait()
        gdc_launch_dependents()
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    before = tl.arange(0, NP)
    end = K
    active = 0
    STEP: tl.constexpr = AT_ONCE if AT_ONCE > 0 else BC * 8
    if AT_ONCE > 0 or RB > 0:
        group = tl.arange(0, NP)
        runs = tl.load(mask + group, mask=group < K // G, other=0).to(tl.int32)
        active = tl.sum(runs, 0)
        if AT_ONCE > 0:
            before = tl.cumsum(runs, 0)
            end = active
    depth, counts = depths(mask, before, end, 0, K, G, AT_ONCE, BC)
    tile = weights_of(weight, columns, depth, counts, K, True)
    y = tl.zeros((BN,), tl.float32)
    if P > 0:
        N_G: tl.constexpr = K // G
        share = (N_G - active).to(tl.float32) / N_G if RB > 0 else 0.0
        # In tiles of their own: P has few chunks, and a step of the weights' size would leave most threads idle.
        for first in tl.static_range(0, P, PC * 8):
            column = first + tl.arange(0, PC) * 8
            place = column[:, None] + tl.arange(0, 8)[None, :]
            left = coefficients(mask, reduced, 0, place < P, share, place, N_G, RB)
            right = weights_of(standing, columns, column, column < P, P, True)
            y += tl.sum(tl.sum(left[:, None, :] * right.to(tl.float32), 2), 0)
    if PDL and EARLY:
        gdc_wait()
        gdc_launch_dependents()
    # Where the next step reads is found while this one's weights are on their way.
    next_depth, next_counts = depths(mask, before, end, STEP, K, G, AT_ONCE, BC)
    acc = products_with(h, tile, depth, counts, True)
    for first in range(STEP, end, STEP):
        depth, counts = next_depth, next_counts
        tile = weights_of(weight, columns, depth, counts, K, True)
        next_depth, next_counts = depths(mask, before, end, first + STEP, K, G, AT_ONCE, BC)
        acc += products_with(h, tile, depth, counts, True)
    y += tl.sum(acc, 0)
    if HAS_RESIDUAL:
        y += tl.load(residual + columns).to(tl.float32)
    tl.store(out + columns, y.to(out.dtype.element_ty))


def vector_config(columns: int, depth: int, width: int, dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """As in `gemm_mn`; AT_ONCE groups fill a step, 0 where it is walked over. LISTED says which, where both can be."""
    config = {"BN": 4, "BC": 128, "num_warps": 4, "PDL": int(is_hopper(device))}
    config |= tuned("vector_k", 1, width, dtype)
    config["BN"] = largest_power(columns, config["BN"])
    config["BC"] = min(config["BC"], padded_rows(-(-depth // 8)))
    groups = padded_rows(depth // width)
    at_once, rest = divmod(config["BC"] * 8, width)
    listed = config.pop("LISTED", at_once >= FEWEST_AT_ONCE) and not rest and at_once * groups <= MOST_COMPARED
    return overlapped(config | {"NP": groups, "AT_ONCE": at_once if listed else 0})


def project(
    h: Tensor, weight: Tensor, mask: Tensor, residual: Tensor | None, early: bool, stand_in: StandIn | None = None
) -> Tensor:
    """`gemm_k` for h [1, K]; the order of the sums is fixed."""
    depth, columns = h.shape[1], weight.shape[0]
    width = depth // mask.shape[1]
    out = torch.empty(1, columns, dtype=h.dtype, device=h.device)
    with on_device_of(h):
        config = vector_config(columns, depth, width, h.dtype, h.device)
        standing, read = stand_in or (None, None)
        early = early and mask.is_contiguous() and (read is None or read.is_contiguous())  # else copied just now
        vector_kernel[(columns // config["BN"],)](
            h, weight, out if residual is None else residual.contiguous(), out, mask.contiguous().view(torch.uint8),
            out if standing is None else standing, out if read is None else read.contiguous(),
            depth, width, HAS_RESIDUAL=residual is not None, P=0 if standing is None else standing.shape[1],
            **({"PC": 0} if standing is None else STANDING),
            RB=0 if read is None else read.shape[1], EARLY=early, **config,
        )  # fmt: skip
    return out

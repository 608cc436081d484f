"""The public operator `norm_route`: checks, dispatch, registration."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from wide_kernels.checks import is_bool, same_device, same_kind, same_size, shape_of
from wide_kernels.dispatch import Problem, choose
from wide_kernels.errors import UnsupportedError
from wide_kernels.norm_route.pieces import PIECES
from wide_kernels.norm_route.reference import norm_route_reference, reduced_reference

TAPS = ("residual", "normalised")


@overload
def norm_route(
    x: Tensor,
    norm_weight: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    eps: float,
    *,
    tap: str = "residual",
    bypass: None = None,
    early: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...


@overload
def norm_route(
    x: Tensor,
    norm_weight: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    eps: float,
    *,
    tap: str = "residual",
    bypass: Tensor,
    early: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]: ...


def norm_route(
    x: Tensor,
    norm_weight: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    eps: float,
    *,
    tap: str = "residual",
    bypass: Tensor | None = None,
    early: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """RMSNorm and the router in one pass over the residual stream x [T, D].

    norm_weight [D] in the dtype of x; the router w1 [r, D], b1 [r], w2 [2 N_G, r], b2 [2 N_G] is fp32: row 2g of w2
    gives group g's logit to execute, row 2g + 1 to skip; a tie executes. For a 16-bit x w1 may come in pieces [3, r,
    D], as `in_pieces(w1, x.dtype)` makes them: that is faster. `tap` says what the router reads: "residual", x as it
    is, or "normalised", x over its root mean square (eps 1e-6, no weight, unrounded). Returns (normalised x [T, D],
    mask bool [T, N_G]). Decisions are those of fp32 arithmetic: backends may differ where the two logits do so by less
    than 1e-5 of the largest difference there is. For inference: no gradients. Raises UnsupportedError.

    With a `bypass` [Rb, D] in the dtype of x a third result is `reduced` [T, Rb] in that dtype, what `StandIn` wants:
    the bypass times x over its root mean square (with `eps`, unrounded). The norm's weight is not in it: fold it into
    the bypass once, `bypass * norm_weight`. Pieces and bypass from `side_by_side` are read in one product (many rows
    of 4096, H200: 148 us against 158).

    `early` vouches that everything but x was complete before the launch that precedes this one: on a Hopper GPU a few
    rows' weights are then fetched while that launch still runs.
    """
    problem = norm_route_problem(x, norm_weight, w1, b1, w2, b2, eps, tap=tap, bypass=bypass, early=early)
    chosen = choose(problem, backend)
    given = (norm_weight, w1, b1, w2, b2, *(() if bypass is None else (bypass,)))
    early = early and all(tensor.is_contiguous() for tensor in given)  # else copied just now
    contiguous = [tensor.contiguous() for tensor in (x, norm_weight, w1, b1, w2, b2)]
    bypass = None if bypass is None else bypass.contiguous()
    normalised, mask, reduced = torch.ops.wide_kernels.norm_route(*contiguous, bypass, eps, tap, early, chosen)
    return (normalised, mask) if bypass is None else (normalised, mask, reduced)


def norm_route_problem(
    x: Tensor,
    norm_weight: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    eps: float,
    *,
    tap: str = "residual",
    bypass: Tensor | None = None,
    early: bool = False,
) -> Problem:
    """The facts that decide the backend of `norm_route`; raises UnsupportedError for what no backend takes."""
    op = "norm_route"
    is_bool(op, early=early)
    if tap not in TAPS:
        raise UnsupportedError(f"{op}: tap must be one of {', '.join(TAPS)}, got {tap!r}")
    same_kind(op, x, norm_weight=norm_weight)
    _, size = shape_of(op, "x", x, "T D")
    same_size(op, "the size of norm_weight", shape_of(op, "norm_weight", norm_weight, "D")[0], size)
    first = {"w1": w1} if w1.dim() != 3 else {}
    for name, tensor in {**first, "b1": b1, "w2": w2, "b2": b2}.items():
        same_device(op, x, name, tensor)
        if tensor.dtype is not torch.float32:
            raise UnsupportedError(
                f"{op}: routers are float32 so that ties are rare, {name} is {tensor.dtype}; cast it"
            )
    if w1.dim() == 3:
        same_size(op, "the number of pieces of w1", w1.shape[0], PIECES)
        same_kind(op, x, w1=w1)
        if x.element_size() != 2:
            raise UnsupportedError(f"{op}: only a 16-bit x takes w1 in pieces, x is {x.dtype}; give w1 whole, float32")
        w1 = w1[0]
    rank, w1_size = shape_of(op, "w1", w1, "r D")
    same_size(op, "D of w1", w1_size, size)
    same_size(op, "the size of b1", shape_of(op, "b1", b1, "r")[0], rank)
    logits, w2_rank = shape_of(op, "w2", w2, "2N_G r")
    same_size(op, "r of w2", w2_rank, rank)
    same_size(op, "the size of b2", shape_of(op, "b2", b2, "2N_G")[0], logits)
    if logits == 0 or logits % 2:
        raise UnsupportedError(f"{op}: w2 must have two rows a group, got {logits}")
    if bypass is not None:
        same_kind(op, x, bypass=bypass)
        width, bypass_size = shape_of(op, "bypass", bypass, "Rb D")
        same_size(op, "D of bypass", bypass_size, size)
        if width == 0:
            raise UnsupportedError(f"{op}: a bypass has at least one row, got {list(bypass.shape)}; leave it out")
    return Problem(op, x.device, x.dtype)


@torch.library.custom_op(
    "wide_kernels::norm_route",
    mutates_args=(),
    schema="(Tensor x, Tensor norm_weight, Tensor w1, Tensor b1, Tensor w2, Tensor b2, Tensor? bypass, float eps,"
    " str tap, bool early, str backend) -> (Tensor, Tensor, Tensor)",
)
def _norm_route(
    x: Tensor,
    norm_weight: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    bypass: Tensor | None,
    eps: float,
    tap: str,
    early: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if backend == "triton":
        from wide_kernels.norm_route.triton import norm_and_decide

        return norm_and_decide(x, norm_weight, w1, b1, w2, b2, bypass, eps, tap, early)
    found = norm_route_reference(x, norm_weight, w1, b1, w2, b2, eps, tap)
    return *found, x.new_empty(len(x), 0) if bypass is None else reduced_reference(x, bypass, eps)


@_norm_route.register_fake
def _(
    x: Tensor,
    norm_weight: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    bypass: Tensor | None,
    *rest: object,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[0]
    mask = x.new_empty(rows, w2.shape[0] // 2, dtype=torch.bool)
    return torch.empty_like(x), mask, x.new_empty(rows, 0 if bypass is None else bypass.shape[0])

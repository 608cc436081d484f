"""The public operator `norm_route_patterns`: checks, dispatch, registration."""

from __future__ import annotations

import torch
from torch import Tensor

from wide_kernels.checks import is_bool, same_device, same_size, shape_of
from wide_kernels.dispatch import Problem, choose
from wide_kernels.errors import UnsupportedError
from wide_kernels.norm_route.launch import checked_bottleneck
from wide_kernels.norm_route.reference import norm_route_patterns_reference, pattern_mask


def norm_route_patterns(
    x: Tensor,
    norm_weight: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    numbers: Tensor,
    eps: float,
    *,
    patterns: Tensor | None = None,
    tap: str = "residual",
    early: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """RMSNorm and the choice of a pattern in each of S segments, in one pass over the residual stream x [T, D].

    As `norm_route` (`early` too), but the second layer gives scores: w2 fp32 [S, C, r] and b2 [S, C] are the router's
    folded with C patterns a segment. `numbers` int32 [S, C] says what each is called: a row gets the number of the one
    that scores best, of equal ones the first. Returns (normalised x [T, D], ids int32 [S, T], None). With `patterns`
    bool [S, P, width], which the numbers index, the last is the decision group by group, bool [T, S width]: what a few
    rows need, and it costs no launch. Numbers must then lie in 0..P-1, which nothing checks: that would cost a sync.
    Choices are those of fp32 arithmetic: backends may differ where two scores do so by less than 1e-5 of the largest.
    For inference: no gradients. Raises UnsupportedError.
    """
    problem = norm_route_patterns_problem(
        x, norm_weight, w1, b1, w2, b2, numbers, eps, patterns=patterns, tap=tap, early=early
    )
    chosen = choose(problem, backend)
    early = early and all(tensor.is_contiguous() for tensor in (norm_weight, w1, b1, w2, b2))  # else copied just now
    contiguous = [tensor.contiguous() for tensor in (x, norm_weight, w1, b1, w2, b2, numbers)]
    patterns = None if patterns is None else patterns.contiguous()
    normalised, ids, mask = torch.ops.wide_kernels.norm_route_patterns(*contiguous, patterns, eps, tap, early, chosen)
    return normalised, ids, None if patterns is None else mask


def norm_route_patterns_problem(
    x: Tensor,
    norm_weight: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    numbers: Tensor,
    eps: float,
    *,
    patterns: Tensor | None = None,
    tap: str = "residual",
    early: bool = False,
) -> Problem:
    """The facts that decide the backend; raises UnsupportedError for what no backend takes."""
    op = "norm_route_patterns"
    is_bool(op, early=early)
    rank = checked_bottleneck(op, x, norm_weight, w1, b1, tap, w2=w2, b2=b2)
    segments, count, w2_rank = shape_of(op, "w2", w2, "S C r")
    same_size(op, "r of w2", w2_rank, rank)
    if segments == 0 or count == 0:
        raise UnsupportedError(f"{op}: there must be segments and patterns, w2 is {list(w2.shape)}")
    for name, tensor in {"b2": b2, "numbers": numbers}.items():
        if shape_of(op, name, tensor, "S C") != (segments, count):
            raise UnsupportedError(f"{op}: {name} must be {[segments, count]}, got {list(tensor.shape)}")
    if numbers.dtype is not torch.int32:
        raise UnsupportedError(f"{op}: numbers must be int32, got {numbers.dtype}; cast with .to(torch.int32)")
    same_device(op, x, "numbers", numbers)
    if patterns is not None:
        if patterns.dtype is not torch.bool:
            raise UnsupportedError(f"{op}: patterns must be bool (True = execute), got {patterns.dtype}")
        same_size(op, "S of patterns", shape_of(op, "patterns", patterns, "S P width")[0], segments)
        same_device(op, x, "patterns", patterns)
    return Problem(op, x.device, x.dtype)


@torch.library.custom_op(
    "wide_kernels::norm_route_patterns",
    mutates_args=(),
    schema="(Tensor x, Tensor norm_weight, Tensor w1, Tensor b1, Tensor w2, Tensor b2, Tensor numbers,"
    " Tensor? patterns, float eps, str tap, bool early, str backend) -> (Tensor, Tensor, Tensor)",
)
def _norm_route_patterns(
    x: Tensor,
    norm_weight: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    numbers: Tensor,
    patterns: Tensor | None,
    eps: float,
    tap: str,
    early: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if backend == "triton":
        from wide_kernels.norm_route.triton import norm_and_choose

        return norm_and_choose(x, norm_weight, w1, b1, w2, b2, numbers, patterns, eps, tap, early)
    normalised, ids = norm_route_patterns_reference(x, norm_weight, w1, b1, w2, b2, numbers, eps, tap)
    empty = torch.empty(0, 0, dtype=torch.bool, device=x.device)
    return normalised, ids, empty if patterns is None else pattern_mask(ids, patterns)


@_norm_route_patterns.register_fake
def _(
    x: Tensor,
    norm_weight: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    numbers: Tensor,
    patterns: Tensor | None,
    *rest: object,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, segments = x.shape[0], w2.shape[0]
    sizes = (0, 0) if patterns is None else (rows, segments * patterns.shape[2])
    ids = x.new_empty(segments, rows, dtype=torch.int32)
    return torch.empty_like(x), ids, x.new_empty(*sizes, dtype=torch.bool)

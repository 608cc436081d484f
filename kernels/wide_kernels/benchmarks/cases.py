"""The timed cases: an operator at the sizes of a model, what a dense model would call instead, and a check of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import wide_kernels as wk
from wide_kernels.benchmarks import dense
from wide_kernels.benchmarks.shapes import ModelShape
from wide_kernels.benchmarks.timing import Call
from wide_kernels.compensate.reference import compensate_reference
from wide_kernels.dispatch import OPERATORS, Explanation
from wide_kernels.gemm_k.configs import FEW_ROWS
from wide_kernels.norm_route.reference import reduced_reference
from wide_kernels.random_masks import random_masks
from wide_kernels.stand_in import coefficients

CHECKED_ROWS = 512  # compared with float64; every element is tested for being finite
RANK = 32
BYPASS = 32  # rank of the bypass around skipped groups
FLIP = 1e-5  # of the largest |execute - skip logit|: below that a decision may differ from float64's


@dataclass(frozen=True)
class TimedCase:
    """`routed` against `dense`, what a dense model calls (the fastest counts), and `others`, told beside it."""

    op: str
    rows: int
    group: int
    density: float
    explanation: Explanation
    routed: Call
    dense: Mapping[str, Call]
    check: Callable[[], float]  # relative error against float64 on some rows
    flops: float = 0.0  # executed multiply-adds x 2
    others: Mapping[str, Call] = field(default_factory=dict)
    backends: Mapping[str, Call] = field(default_factory=dict)  # every one that takes this, the chosen one too
    refused: Mapping[str, str] = field(default_factory=dict)
    compare: Callable[[Any], float] | None = None  # what `check` does, for a result
    checked_elements: int = 0
    repeats: int = 1  # how often one call does the work: times are divided by it

    @property
    def name(self) -> str:
        """A short label."""
        return f"{self.op} T={self.rows} G={self.group} density={self.density:g}"


@dataclass(frozen=True)
class Sizes:
    """One point of the grid: a model, T tokens, groups of `group` channels, a share of executed groups."""

    model: ModelShape
    rows: int
    group: int
    density: float
    dtype: torch.dtype
    device: str = "cuda"
    recorded: Tensor | None = None  # decisions of a real model; random ones otherwise
    masks: str = "random"

    @property
    def groups(self) -> int:
        """N_G of the FFN."""
        return self.model.intermediate_size // self.group

    @property
    def point(self) -> tuple[int, int, float]:
        """(T, G, density)."""
        return self.rows, self.group, self.density

    def mask(self) -> Tensor:
        """The decisions, bool [T, N_G]; the random ones are the same every time."""
        if self.recorded is not None:
            return self.recorded.to(self.device)
        torch.manual_seed(0)
        return random_masks((self.rows, self.groups), 1 - self.density, 0, None, torch.device(self.device))

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Random operands: zeros would let the GPU run faster than it does on data."""
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype) * scale


def relative_error(got: Tensor, picked: Tensor, expected: Tensor) -> float:
    """Frobenius norm over the picked rows against float64; infinite when any element of `got` is not finite."""
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got[picked].double() - expected).norm() / expected.norm().clamp_min(1e-30))


def operator_case(
    op: str,
    sizes: Sizes,
    args: tuple[Any, ...],
    options: Mapping[str, Any],
    compare: Callable[[Any], float],
    dense_calls: Mapping[str, Call],
    *,
    label: str = "",
    flops: float = 0.0,
    others: Mapping[str, Call] | None = None,
    checked: int = 0,
) -> TimedCase:
    """A case that calls `wk.<op>(*args, **options)`, by default and on every backend that takes it."""
    operator = getattr(wk, op)
    backends: dict[str, Call] = {}
    refused: dict[str, str] = {}
    for name in OPERATORS[op][1]:
        try:
            wk.explain(op, *args, **options, backend=name)
        except wk.UnsupportedError as error:
            refused[name] = str(error)
        else:
            backends[name] = lambda name=name: operator(*args, **options, backend=name)  # type: ignore[misc]
    return TimedCase(
        op + label, *sizes.point, wk.explain(op, *args, **options), lambda: operator(*args, **options), dense_calls,
        lambda: compare(operator(*args, **options)), flops, others or {}, backends, refused, compare, checked,
    )  # fmt: skip


def ffn_cases(sizes: Sizes, ops: set[str], gather: bool) -> Iterator[TimedCase]:
    """The FFN's operators at one point, one after the other."""
    model, rows = sizes.model, sizes.rows
    hidden, channels = model.hidden_size, model.intermediate_size
    mask = sizes.mask()
    layout = wk.route_layout(mask)
    form: dict[str, Any] = {"mask": mask} if rows <= FEW_ROWS else {"layout": layout}
    executed = float(mask.sum()) * sizes.group
    picked = torch.randperm(rows, device=sizes.device)[:CHECKED_ROWS]
    wide_mask = mask[picked].repeat_interleave(sizes.group, 1)
    counts = layout.count.tolist()
    pairs = dense.executed_pairs(layout, counts)
    if "route_layout" in ops:
        expected_layout = wk.route_layout(mask, backend="torch")

        def compare_layout(got: wk.RouteLayout) -> float:
            same = torch.equal(got.index, expected_layout.index) and torch.equal(got.count, expected_layout.count)
            return 0.0 if same else float("inf")

        yield operator_case(
            "route_layout", sizes, (mask,), {}, compare_layout,
            {"torch.sort": lambda: wk.route_layout(mask, backend="torch")}, checked=mask.numel(),
        )  # fmt: skip
    x = sizes.normal(rows, hidden)
    w_gate, w_up = (sizes.normal(channels, hidden, scale=0.02) for _ in range(2))
    if "gemm_mn" in ops:
        slow_mn: dict[str, Call] = {
            "gather-scatter": lambda: dense.gather_scatter_mn(x, w_up, layout, counts),
            "gather-scatter all": lambda: dense.gather_all_mn(x, w_up, pairs, counts),
        }
        yield operator_case(
            "gemm_mn", sizes, (x, w_up), form,
            lambda y: relative_error(y, picked, F.linear(x[picked].double(), w_up.double()) * wide_mask),
            {"linear": lambda: F.linear(x, w_up)},
            flops=2 * executed * hidden, others=slow_mn if gather else {}, checked=len(picked) * channels,
        )  # fmt: skip
    if "gated_mlp_up" in ops:
        yield operator_case(
            "gated_mlp_up", sizes, (x, w_gate, w_up), form,
            lambda y: relative_error(y, picked, _gated(x[picked], w_gate, w_up) * wide_mask),
            {
                "2 linear + fused silu": lambda: dense.fused_gated_mlp_up(x, w_gate, w_up),
                "eager": lambda: F.silu(F.linear(x, w_gate)) * F.linear(x, w_up),
            },
            flops=4 * executed * hidden, checked=len(picked) * channels,
        )  # fmt: skip
    if "gemm_k" in ops:
        w_down = w_up.t().contiguous()
        h = sizes.normal(rows, channels)
        expected = F.linear(h[picked].double() * wide_mask, w_down.double())
        slow_k: dict[str, Call] = {
            "gather-scatter": lambda: dense.gather_scatter_k(h, w_down, layout, counts),
            "gather-scatter all": lambda: dense.gather_all_k(h, w_down, pairs, counts),
        }
        for i, (label, extra) in enumerate(_gemm_k_variants(rows, sizes.dtype).items()):
            yield operator_case(
                "gemm_k", sizes, (h, w_down), form | extra, lambda y: relative_error(y, picked, expected),
                {"linear": lambda: F.linear(h, w_down)}, label=label,
                flops=2 * executed * hidden, others=slow_k if gather and i == 0 else {}, checked=len(picked) * hidden,
            )  # fmt: skip
    if "compensate" in ops:
        yield from _stand_in_cases(sizes, mask, form, picked, x, w_up.t().contiguous())
    if "norm_route" in ops:
        yield from (_norm_route(sizes, x, read) for read in (0, BYPASS))


def _gated(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
    """silu(x w_gate^T) * (x w_up^T) in float64."""
    return F.silu(F.linear(x.double(), w_gate.double())) * F.linear(x.double(), w_up.double())


def _stand_in_cases(
    sizes: Sizes, mask: Tensor, form: Mapping[str, Any], picked: Tensor, residual: Tensor, w_down: Tensor
) -> Iterator[TimedCase]:
    """What stands in for skipped groups: by itself beside what copies the residual stream, and in GEMM-K's sums."""
    hidden, fp32 = sizes.model.hidden_size, torch.float32
    mean, up = sizes.normal(sizes.groups, hidden, dtype=fp32), sizes.normal(hidden, BYPASS, dtype=fp32)
    stand_in = wk.StandIn(wk.stand_in_weight(mean, up, sizes.groups, sizes.dtype), sizes.normal(sizes.rows, BYPASS))
    h = sizes.normal(sizes.rows, sizes.model.intermediate_size)
    weight, reduced = stand_in
    assert reduced is not None
    start = compensate_reference(residual[picked].double(), weight.double(), mask[picked], reduced[picked].double())
    expected = start + F.linear(h[picked].double() * mask[picked].repeat_interleave(sizes.group, 1), w_down.double())
    left = coefficients(mask, reduced, weight.shape[1], sizes.dtype)
    flops = 2.0 * sizes.rows * hidden * (float((~mask).sum()) / sizes.rows + BYPASS)
    yield operator_case(
        "compensate", sizes, (residual, stand_in), form, lambda y: relative_error(y, picked, start),
        {"clone": residual.clone, "addmm of coefficients that are there": lambda: residual.addmm(left, weight.t())},
        flops=flops, checked=len(picked) * hidden,
    )  # fmt: skip
    yield operator_case(
        "gemm_k", sizes, (h, w_down), {**form, "residual": residual, "stand_in": stand_in},
        lambda y: relative_error(y, picked, expected), {"linear": lambda: F.linear(h, w_down)}, label=" stand-in",
        flops=2 * float(mask.sum()) * sizes.group * hidden + flops,
        others={"without": lambda: wk.gemm_k(h, w_down, residual=residual, **form)}, checked=len(picked) * hidden,
    )  # fmt: skip


def _gemm_k_variants(rows: int, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """How partial sums meet, by name; for a few rows there is one way."""
    if rows <= FEW_ROWS:
        return {"": {}}
    variants: dict[str, dict[str, Any]] = {" fp32": {"accumulate": "fp32"}}
    if dtype is torch.bfloat16:
        variants[" bf16"] = {"accumulate": "bf16"}
    return variants | {" deterministic": {"deterministic": True}}


def _norm_route(sizes: Sizes, x: Tensor, read: int) -> TimedCase:
    """With `read` > 0 beside a bypass of that rank."""
    hidden, groups = sizes.model.hidden_size, sizes.groups
    scale = torch.ones(hidden, device=sizes.device, dtype=sizes.dtype)
    fp32 = torch.float32
    w1, b1 = sizes.normal(RANK, hidden, dtype=fp32, scale=0.02), sizes.normal(RANK, dtype=fp32)
    w2, b2 = sizes.normal(2 * groups, RANK, dtype=fp32, scale=0.2), sizes.normal(2 * groups, dtype=fp32)
    first = w1 if x.element_size() > 2 else wk.in_pieces(w1, x.dtype)
    arguments = (x, scale, first, b1, w2, b2, 1e-5)
    bypass = sizes.normal(read, hidden, scale=0.02) if read else None

    def compare(got: tuple[Tensor, ...]) -> float:
        expected, _ = wk.norm_route(x.double(), scale.double(), w1, b1, w2, b2, 1e-5, backend="torch")
        logits = F.linear(F.linear(x.double(), w1.double(), b1.double()), w2.double(), b2.double())
        z = logits[:, 0::2] - logits[:, 1::2]
        if bool(((got[1] != (z >= 0)) & (z.abs() > FLIP * z.abs().max())).any()):
            return float("inf")
        error = float((got[0].double() - expected).norm() / expected.norm())
        if bypass is None:
            return error
        reduced = reduced_reference(x.double(), bypass.double(), 1e-5)
        return max(error, float((got[2].double() - reduced).norm() / reduced.norm()))

    return operator_case(
        "norm_route", sizes, arguments, {} if bypass is None else {"bypass": bypass}, compare,
        {"rms_norm alone": lambda: F.rms_norm(x, (hidden,), scale, 1e-5)}, label=" bypass" * bool(read),
        flops=2.0 * sizes.rows * (RANK * (hidden + 2 * groups) + read * hidden),
        checked=x.numel() + sizes.rows * (groups + read),
    )  # fmt: skip

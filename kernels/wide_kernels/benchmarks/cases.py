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
from wide_kernels.dispatch import Explanation

CHECKED_ROWS = 512  # compared with float64; every element is tested for being finite
RANK = 32


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

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Random operands: zeros would let the GPU run faster than it does on data."""
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype) * scale


def _error(got: Tensor, picked: Tensor, expected: Tensor) -> float:
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got[picked].double() - expected).norm() / expected.norm().clamp_min(1e-30))


def ffn_cases(sizes: Sizes, ops: set[str], gather: bool) -> Iterator[TimedCase]:
    """The FFN's operators at one point. Up to 64 rows they read the mask, above that a layout made beforehand."""
    model, rows, dtype = sizes.model, sizes.rows, sizes.dtype
    hidden, channels = model.hidden_size, model.intermediate_size
    torch.manual_seed(0)
    mask = torch.rand(rows, sizes.groups, device=sizes.device) < sizes.density
    if sizes.recorded is not None:
        mask = sizes.recorded.to(sizes.device)
    layout = wk.route_layout(mask)
    form: dict[str, Any] = {"mask": mask} if rows <= 64 else {"layout": layout}
    executed = float(mask.sum()) * sizes.group
    picked = torch.randperm(rows, device=sizes.device)[:CHECKED_ROWS]
    wide_mask = mask[picked].repeat_interleave(sizes.group, 1)
    counts = layout.count.tolist()
    point = (rows, sizes.group, sizes.density)
    if "route_layout" in ops:

        def check_layout() -> float:
            expected = wk.route_layout(mask, backend="torch")
            same = torch.equal(layout.index, expected.index) and torch.equal(layout.count, expected.count)
            return 0.0 if same else float("inf")

        yield TimedCase(
            "route_layout", *point, wk.explain("route_layout", mask), lambda: wk.route_layout(mask),
            {"torch.sort": lambda: wk.route_layout(mask, backend="torch")}, check_layout,
        )  # fmt: skip
    x = sizes.normal(rows, hidden)
    w_gate, w_up = (sizes.normal(channels, hidden, scale=0.02) for _ in range(2))
    if "gemm_mn" in ops:
        slow_mn: dict[str, Call] = {"gather-scatter": lambda: dense.gather_scatter_mn(x, w_up, layout, counts)}
        yield TimedCase(
            "gemm_mn", *point, wk.explain("gemm_mn", x, w_up, **form),
            lambda: wk.gemm_mn(x, w_up, **form), {"linear": lambda: F.linear(x, w_up)},
            lambda: _error(
                wk.gemm_mn(x, w_up, **form), picked,
                F.linear(x[picked].double(), w_up.double()) * wide_mask,
            ),
            2 * executed * hidden, slow_mn if gather else {},
        )  # fmt: skip
    if "gated_mlp_up" in ops:
        yield TimedCase(
            "gated_mlp_up", *point, wk.explain("gated_mlp_up", x, w_gate, w_up, **form),
            lambda: wk.gated_mlp_up(x, w_gate, w_up, **form),
            {
                "2 linear + fused silu": lambda: dense.fused_gated_mlp_up(x, w_gate, w_up),
                "eager": lambda: F.silu(F.linear(x, w_gate)) * F.linear(x, w_up),
            },
            lambda: _error(
                wk.gated_mlp_up(x, w_gate, w_up, **form), picked,
                F.silu(F.linear(x[picked].double(), w_gate.double()))
                * F.linear(x[picked].double(), w_up.double()) * wide_mask,
            ),
            4 * executed * hidden,
        )  # fmt: skip
    if "gemm_k" in ops:
        w_down = w_up.t().contiguous()
        h = sizes.normal(rows, channels)
        for name, extra in _gemm_k_variants(rows, dtype).items():
            options = form | extra
            slow_k: dict[str, Call] = {"gather-scatter": lambda: dense.gather_scatter_k(h, w_down, layout, counts)}
            yield TimedCase(
                f"gemm_k{name}", *point, wk.explain("gemm_k", h, w_down, **options),
                lambda options=options: wk.gemm_k(h, w_down, **options),  # type: ignore[misc]
                {"linear": lambda: F.linear(h, w_down)},
                lambda options=options: _error(  # type: ignore[misc]
                    wk.gemm_k(h, w_down, **options), picked, F.linear(h[picked].double() * wide_mask, w_down.double())
                ),
                2 * executed * hidden, slow_k if gather and not extra else {},
            )  # fmt: skip
    if "norm_route" in ops:
        yield _norm_route(sizes, x, point)


def _gemm_k_variants(rows: int, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """How partial sums meet; for a few rows there is one way."""
    variants: dict[str, dict[str, Any]] = {"": {}}
    if rows > 64:
        if dtype is torch.bfloat16:
            variants[" bf16"] = {"accumulate": "bf16"}
        variants[" deterministic"] = {"deterministic": True}
    return variants


def _norm_route(sizes: Sizes, x: Tensor, point: tuple[int, int, float]) -> TimedCase:
    hidden, groups = sizes.model.hidden_size, sizes.groups
    scale = torch.ones(hidden, device=sizes.device, dtype=sizes.dtype)
    fp32 = torch.float32
    w1, b1 = sizes.normal(RANK, hidden, dtype=fp32, scale=0.02), sizes.normal(RANK, dtype=fp32)
    w2, b2 = sizes.normal(2 * groups, RANK, dtype=fp32, scale=0.2), sizes.normal(2 * groups, dtype=fp32)

    def check() -> float:
        y, _ = wk.norm_route(x, scale, w1, b1, w2, b2, 1e-5)
        expected, _ = wk.norm_route(x.double(), scale.double(), w1, b1, w2, b2, 1e-5, backend="torch")
        return float((y.double() - expected).norm() / expected.norm())

    return TimedCase(
        "norm_route", *point, wk.explain("norm_route", x, scale, w1, b1, w2, b2, 1e-5),
        lambda: wk.norm_route(x, scale, w1, b1, w2, b2, 1e-5),
        {"rms_norm alone": lambda: F.rms_norm(x, (hidden,), scale, 1e-5)},
        check, 2.0 * sizes.rows * RANK * (hidden + 2 * groups),
        {"eager": lambda: wk.norm_route(x, scale, w1, b1, w2, b2, 1e-5, backend="torch")},
    )  # fmt: skip

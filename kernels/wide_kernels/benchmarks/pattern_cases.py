"""The timed cases of tokens that follow patterns, beside dense calls and the same share of independent bits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import wide_kernels as wk
from wide_kernels.benchmarks import dense
from wide_kernels.benchmarks.cases import (
    CHECKED_ROWS,
    FLIP,
    RANK,
    Sizes,
    TimedCase,
    operator_case,
    relative_error,
)
from wide_kernels.benchmarks.timing import Call
from wide_kernels.dispatch import Explanation
from wide_kernels.errors import UnsupportedError
from wide_kernels.gemm_k.packing import pack_rows
from wide_kernels.pattern_classes import classed_lists
from wide_kernels.pattern_layout import HALF_ROWS

PATTERN_OPS = ("norm_route_patterns", "pattern_layout", "gemm_mn", "gated_mlp_up", "gemm_k", "ffn")
BITS = "independent bits"


@dataclass(frozen=True)
class PatternSizes:
    """A point of the grid: sizes, C patterns, and how often each is taken (`histogram`, or a built-in `frequency`)."""

    sizes: Sizes
    count: int
    frequency: str
    histogram: tuple[float, ...] = ()

    def __str__(self) -> str:
        rows, group, density = self.sizes.point
        return f"T={rows} G={group} density={density:g} C={self.count} {self.frequency}"

    def shares(self) -> Tensor:
        """How often each pattern is taken, adding up to 1, the most frequent first."""
        if self.histogram:
            return resampled(self.histogram, self.count)
        weights = torch.ones(self.count, dtype=torch.float64)
        if self.frequency == "zipf":
            weights /= torch.arange(1, self.count + 1)
        return weights / weights.sum()

    def decision(self) -> tuple[Tensor, Tensor]:
        """(ids, patterns): random patterns of exactly that density, similar ones adjacent; the same every time."""
        generator = torch.Generator().manual_seed(0)
        noise = torch.rand(self.count, self.sizes.groups, generator=generator)
        live = round(self.sizes.density * self.sizes.groups)
        patterns = noise.argsort(1).argsort(1) < live
        patterns = patterns[wk.similar_order(patterns)]
        shuffled = torch.randperm(self.count, generator=generator)  # which patterns are the frequent ones
        taken = torch.multinomial(self.shares(), self.sizes.rows, replacement=True, generator=generator)
        return shuffled[taken].to(self.sizes.device, torch.int32), patterns.to(self.sizes.device)


def read_histogram(path: Path) -> tuple[float, ...]:
    """How often each pattern was taken in a measurement: a JSON list of numbers, in any order."""
    try:
        found = [float(entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
        if not found or min(found) < 0 or sum(found) <= 0:
            raise ValueError("it must hold numbers of at least 0, not all of them 0")
    except (OSError, ValueError, TypeError) as error:
        raise UnsupportedError(f"{path} is no JSON list of how often each pattern was taken: {error}") from error
    return tuple(sorted(found, reverse=True))


def resampled(histogram: tuple[float, ...], count: int) -> Tensor:
    """The shares of `count` patterns that follow the same curve as a histogram of another number of them."""
    summed = torch.tensor((0.0, *histogram), dtype=torch.float64).cumsum(0)
    at = torch.linspace(0, len(histogram), count + 1, dtype=torch.float64)
    low = at.floor().long().clamp(max=len(histogram) - 1)
    curve = summed[low] + (at - low) * (summed[low + 1] - summed[low])
    return curve.diff() / summed[-1]


def wasted(layout: wk.PatternLayout) -> float:
    """What tiles multiply beyond what their rows run: (listed halves x their rows) / (executed row-groups) - 1."""
    halves = ((layout.lists & 1) + (layout.lists >> 1 & 1)).sum()
    return float(halves * HALF_ROWS / layout.mask.sum().clamp_min(1)) - 1


def pattern_cases(point: PatternSizes, ops: set[str]) -> Iterator[TimedCase]:
    """The operators at one point, one after the other, then the FFN with the layout included."""
    sizes = point.sizes
    rows, hidden, channels = sizes.rows, sizes.model.hidden_size, sizes.model.intermediate_size
    ids, patterns = point.decision()
    layout = wk.pattern_layout(ids, patterns)
    mask, bits_mask = layout.mask, sizes.mask()
    bits = wk.route_layout(bits_mask)
    flops = 2.0 * float(mask.sum()) * sizes.group * hidden
    picked = torch.randperm(rows, device=sizes.device)[:CHECKED_ROWS]
    wide_mask = mask[picked].repeat_interleave(sizes.group, 1)
    if "norm_route_patterns" in ops:
        yield _choice(point)
    if "pattern_layout" in ops:
        expected_layout = wk.pattern_layout(ids, patterns, backend="torch").tensors

        def compare_layout(got: wk.PatternLayout) -> float:
            return 0.0 if all(map(torch.equal, got.tensors, expected_layout)) else float("inf")

        yield operator_case(
            "pattern_layout", sizes, (ids, patterns), {}, compare_layout,
            {"route_layout": lambda: wk.route_layout(bits_mask)}, checked=sum(t.numel() for t in layout.tensors),
        )  # fmt: skip
    x = sizes.normal(rows, hidden)
    w_gate, w_up = (sizes.normal(channels, hidden, scale=0.02) for _ in range(2))
    w_down = w_up.t().contiguous()
    whole = wk.explain("gated_mlp", x, w_gate, w_up, w_down, layout)
    up = F.linear(x[picked].double(), w_up.double())
    gated = F.silu(F.linear(x[picked].double(), w_gate.double())) * up * wide_mask
    if "gemm_mn" in ops:
        yield operator_case(
            "gemm_mn", sizes, (x, w_up, layout), {}, lambda y: relative_error(y, picked, up * wide_mask),
            {"linear": lambda: F.linear(x, w_up)}, others={BITS: lambda: wk.gemm_mn(x, w_up, bits)},
            flops=flops, checked=len(picked) * channels,
        )  # fmt: skip
    if "gated_mlp_up" in ops:
        yield operator_case(
            "gated_mlp_up", sizes, (x, w_gate, w_up, layout), {}, lambda y: relative_error(y, picked, gated),
            {"2 linear + fused silu": lambda: dense.fused_gated_mlp_up(x, w_gate, w_up)},
            others={BITS: lambda: wk.gated_mlp_up(x, w_gate, w_up, bits)} | _packed_up(whole, x, w_gate, w_up, layout),
            flops=2 * flops, checked=len(picked) * channels,
        )  # fmt: skip
    if "gemm_k" in ops:
        h = sizes.normal(rows, channels)
        expected = F.linear(h[picked].double() * wide_mask, w_down.double())
        yield operator_case(
            "gemm_k", sizes, (h, w_down, layout), {}, lambda y: relative_error(y, picked, expected),
            {"linear": lambda: F.linear(h, w_down)},
            others={BITS: lambda: wk.gemm_k(h, w_down, bits)} | _packed_down(whole, h, w_down, layout),
            flops=flops, checked=len(picked) * hidden,
        )  # fmt: skip
    if "ffn" in ops:
        yield _ffn(point, (ids, patterns), bits_mask, (x, w_gate, w_up, w_down), picked, gated, flops)


def _packed_up(
    gated: Explanation, x: Tensor, w_gate: Tensor, w_up: Tensor, layout: wk.PatternLayout
) -> dict[str, Call]:
    """The first kernel of `gated_mlp` where that is a pair of its own."""
    if gated.backend != "gluon":
        return {}
    from wide_kernels.gemm_mn.pattern_gluon import gated_packed

    return {"packed": lambda: gated_packed(x, w_gate, w_up, layout, "silu")}


def _packed_down(gated: Explanation, h: Tensor, w_down: Tensor, layout: wk.PatternLayout) -> dict[str, Call]:
    """The second one, on rows that are packed already, for both forms of the weight."""
    if gated.backend != "gluon":
        return {}
    from wide_kernels.gemm_k.pattern_gluon import project_packed

    packed, by_channel = pack_rows(h, layout, *classed_lists(layout)), w_down.t().contiguous().t()
    return {
        "packed": lambda: project_packed(packed, w_down, layout, None),
        "packed, w_down by channel": lambda: project_packed(packed, by_channel, layout, None),
    }


def _choice(point: PatternSizes) -> TimedCase:
    """Norm and choice of the patterns' numbers, beside the norm and the decision on as many groups."""
    sizes, count = point.sizes, point.count
    hidden, groups, fp32 = sizes.model.hidden_size, sizes.groups, torch.float32
    x, scale = sizes.normal(sizes.rows, hidden), sizes.normal(hidden)
    w1, b1 = sizes.normal(RANK, hidden, dtype=fp32, scale=0.02), sizes.normal(RANK, dtype=fp32)
    w2, b2 = sizes.normal(1, count, RANK, dtype=fp32, scale=0.2), sizes.normal(1, count, dtype=fp32)
    to_bits = sizes.normal(2 * groups, RANK, dtype=fp32), sizes.normal(2 * groups, dtype=fp32)
    numbers = torch.arange(count, dtype=torch.int32, device=sizes.device)[None]
    first = (x, scale, w1 if x.element_size() > 2 else wk.in_pieces(w1, x.dtype), b1)

    def compare(got: tuple[Tensor, Tensor, Tensor | None]) -> float:
        full = x.double()
        expected, _ = wk.norm_route(full, scale.double(), w1, b1, *to_bits, 1e-5, backend="torch")
        scores = F.linear(F.linear(full, w1.double(), b1.double()), w2[0].double(), b2[0].double())
        lost = scores.amax(-1) - scores.gather(1, got[1].t().long()).squeeze(1)
        if float(lost.max()) > FLIP * float(scores.abs().max()):
            return float("inf")
        return float((got[0].double() - expected).norm() / expected.norm())

    return operator_case(
        "norm_route_patterns", sizes, (*first, w2, b2, numbers, 1e-5), {}, compare,
        {"rms_norm alone": lambda: F.rms_norm(x, (hidden,), scale, 1e-5)},
        others={BITS: lambda: wk.norm_route(*first, *to_bits, 1e-5)},
        flops=2.0 * sizes.rows * RANK * (hidden + count), checked=x.numel() + sizes.rows,
    )  # fmt: skip


def _ffn(
    point: PatternSizes,
    decision: tuple[Tensor, Tensor],
    bits_mask: Tensor,
    operands: tuple[Tensor, Tensor, Tensor, Tensor],
    picked: Tensor,
    gated: Tensor,
    flops: float,
) -> TimedCase:
    """Layout, gate and up, down, from the ids on; independent bits from their mask on."""
    x, w_gate, w_up, w_down = operands

    def routed(backend: str = "auto") -> Tensor:
        return wk.gated_mlp(*operands, wk.pattern_layout(*decision), backend=backend)

    def compare(got: Tensor) -> float:
        return relative_error(got, picked, F.linear(gated, w_down.double()))

    layout = wk.pattern_layout(*decision)
    explanation = wk.explain("gated_mlp", *operands, layout)
    others: dict[str, Call] = {BITS: lambda: wk.gated_mlp(*operands, wk.route_layout(bits_mask))}
    if explanation.backend == "gluon":
        by_channel = w_down.t().contiguous().t()
        others["w_down by channel"] = lambda: wk.gated_mlp(x, w_gate, w_up, by_channel, wk.pattern_layout(*decision))
    return TimedCase(
        "ffn", *point.sizes.point, replace(explanation, op="ffn"), routed,
        {"dense ffn": lambda: F.linear(dense.fused_gated_mlp_up(x, w_gate, w_up), w_down)},
        lambda: compare(routed()), 3 * flops, others,
        compare=compare, checked_elements=len(picked) * w_down.shape[0],
    )  # fmt: skip

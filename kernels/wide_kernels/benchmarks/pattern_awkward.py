"""Awkward cases of tokens that follow patterns, in the manner of `awkward`: float64 beside, NaN where nothing reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import wide_kernels as wk
from wide_kernels.benchmarks.awkward import TOLERANCE, poison_free_memory, relative_error
from wide_kernels.errors import UnsupportedError
from wide_kernels.gated_mlp.reference import gated_mlp_reference
from wide_kernels.gemm_k.reference import gemm_k_reference
from wide_kernels.gemm_mn.reference import gated_mlp_up_reference, gemm_mn_reference


@dataclass(frozen=True)
class PatternCase:
    """Sizes: `rows` tokens that choose among `count` patterns of `groups` x `width` channels; how they choose."""

    rows: int
    other: int
    groups: int
    width: int
    count: int
    choice: str = "even"

    def __str__(self) -> str:
        sizes = f"T={self.rows} other={self.other} groups={self.groups}x{self.width}"
        return f"{sizes} patterns={self.count} {self.choice}"


# From uniform noise in 0..1 to numbers in 0..1 that say which pattern a token takes.
CHOICES: dict[str, Callable[[Tensor], Tensor]] = {
    "even": lambda noise: noise,
    "skewed": lambda noise: noise**4,
    "single tokens": lambda noise: torch.where(torch.arange(len(noise)) % 50 == 7, noise, torch.full_like(noise, 0.5)),
}

SMALL_PATTERNS = (
    PatternCase(1, 64, 3, 16, 2),
    PatternCase(7, 80, 5, 48, 3),
    PatternCase(65, 48, 4, 32, 1),
    PatternCase(140, 48, 5, 16, 1),
    PatternCase(130, 64, 3, 48, 200),
    PatternCase(256, 64, 2, 64, 4),
    PatternCase(200, 80, 7, 16, 6, "skewed"),
    PatternCase(257, 48, 2, 144, 9, "single tokens"),
    PatternCase(150, 192, 3, 128, 5, "skewed"),
)
LARGE_PATTERNS = (
    PatternCase(100, 4096, 896, 16, 64),
    PatternCase(1000, 576, 96, 16, 16, "skewed"),
    PatternCase(4096, 1024, 224, 16, 64),
    PatternCase(4097, 1024, 112, 32, 256, "skewed"),
    PatternCase(5000, 512, 7, 96, 1000, "skewed"),
    PatternCase(3000, 1040, 9, 192, 40, "single tokens"),
    PatternCase(16385, 512, 16, 128, 64),
    PatternCase(16384, 256, 28, 512, 16, "skewed"),
)


def decision(case: PatternCase) -> tuple[Tensor, Tensor]:
    """(ids, patterns) with an empty, a dense and an unused pattern where there are that many; group 0 never runs."""
    generator = torch.Generator().manual_seed(case.rows * 31 + case.count)
    patterns = torch.rand(case.count, case.groups, generator=generator) < 0.5
    if case.count > 2:
        patterns[0], patterns[1] = False, True
    patterns[:, 0] = False
    choice = CHOICES[case.choice](torch.rand(case.rows, generator=generator))
    ids = (choice * case.count).to(torch.int32).clamp(max=case.count - 1)
    if case.count > 3:
        ids[ids == 3] = 2
    return ids, patterns


def pattern_operands(
    case: PatternCase, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(ids, patterns, x, weight, other weight, h), with NaN where nothing may read."""
    ids, patterns = decision(case)
    mask = patterns[ids]
    generator = torch.Generator().manual_seed(case.rows)
    channels = case.groups * case.width

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x, h = normal(case.rows, case.other), normal(case.rows, case.groups, case.width)
    weights = [normal(channels, case.other) / case.other**0.5 for _ in range(2)]
    idle = ~mask.any(0).repeat_interleave(case.width)
    for weight in weights:
        weight[idle] = math.nan
    x[~mask.any(1)] = math.nan
    h[~mask] = math.nan
    cast = [tensor.to(device, dtype) for tensor in (x, *weights, h.view(case.rows, channels))]
    return ids.to(device), patterns.to(device), cast[0], cast[1], cast[2], cast[3]


def pattern_errors(
    case: PatternCase, dtype: torch.dtype, device: str, backend: str
) -> Iterator[tuple[str, float, float]]:
    """(what, relative error, tolerance) of every operator of the backend on this case; skipped outputs must be zero."""
    ids, patterns, x, weight, up, h = pattern_operands(case, dtype, device)
    expected_layout = wk.pattern_layout(ids, patterns, backend="torch")
    layout = wk.pattern_layout(ids, patterns, backend="triton" if backend == "gluon" else backend)
    same = all(map(torch.equal, layout.tensors, expected_layout.tensors))
    yield "pattern_layout", 0.0 if same else math.inf, 0.0
    mask, bound = expected_layout.mask, TOLERANCE[dtype]
    skipped = ~mask.repeat_interleave(case.width, 1)
    clean = [torch.nan_to_num(tensor.double()) for tensor in (x, weight, up, h)]
    bias = torch.linspace(-1, 1, weight.shape[0], device=device).to(dtype)
    if _takes(backend, "gemm_mn", x, weight, layout):
        poison_free_memory(case.rows * weight.shape[0], dtype, device)
        y = wk.gemm_mn(x, weight, layout, bias, "gelu", backend=backend)
        expected = gemm_mn_reference(clean[0], clean[1], mask, bias.double(), "gelu")
        yield "gemm_mn", math.inf if bool(y[skipped].any()) else relative_error(y, expected), bound
        poison_free_memory(case.rows * weight.shape[0], dtype, device)
        y = wk.gated_mlp_up(x, weight, up, layout, backend=backend)
        expected = gated_mlp_up_reference(clean[0], clean[1], clean[2], mask, "silu")
        yield "gated_mlp_up", math.inf if bool(y[skipped].any()) else relative_error(y, expected), bound
    down, clean_down = weight.t().contiguous(), clean[1].t().contiguous()
    residual = torch.linspace(-1, 1, case.rows * case.other, device=device).view(case.rows, case.other).to(dtype)
    by_channel = weight.clone().t()  # the transpose of a contiguous [D', N]
    if _takes(backend, "gated_mlp", x, weight, up, down, layout):
        for name, w_down, added in (("", down, residual), (" by channel", by_channel, None)):
            poison_free_memory(case.rows * case.other, dtype, device)
            y = wk.gated_mlp(x, weight, up, w_down, layout, added, backend=backend)
            cleaned = None if added is None else added.double()
            expected = gated_mlp_reference(clean[0], clean[1], clean[2], clean_down, mask, cleaned, "silu")
            # the hidden channels are rounded, too
            yield f"gated_mlp{name}", relative_error(y, expected), 1.5 * bound
            again = wk.gated_mlp(x, weight, up, w_down, layout, added, backend=backend)
            yield f"gated_mlp{name} again", 0.0 if torch.equal(y, again) else math.inf, 0.0
    if not _takes(backend, "gemm_k", h, down, layout):
        return
    for name, added in (("", None), (" residual", residual)):
        poison_free_memory(case.rows * case.other, dtype, device)
        y = wk.gemm_k(h, down, layout, added, backend=backend)
        expected = gemm_k_reference(clean[3], clean_down, mask, None if added is None else added.double())
        yield f"gemm_k{name}", relative_error(y, expected), bound
        again = wk.gemm_k(h, down, layout, added, backend=backend)
        yield f"gemm_k{name} again", 0.0 if torch.equal(y, again) else math.inf, 0.0


def _takes(backend: str, op: str, *args: object) -> bool:
    """Gluon leaves some sizes to Triton, which must take every case."""
    if backend != "gluon":
        return True
    try:
        wk.explain(op, *args, backend=backend)
    except UnsupportedError:
        return False
    return True

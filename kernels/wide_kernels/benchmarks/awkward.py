"""Awkward cases that every backend must get right: the benchmark checks them before it times, and the tests use them.

Expected values are in float64. Before each call the allocator's free blocks are filled with NaN, so an element that a
kernel forgets shows; weights of groups that nobody runs and inputs that a token skips are NaN too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import wide_kernels as wk
from wide_kernels.compensate.reference import compensate_reference
from wide_kernels.errors import UnsupportedError
from wide_kernels.gemm_k.reference import gemm_k_reference
from wide_kernels.gemm_mn.reference import gated_mlp_up_reference, gemm_mn_reference
from wide_kernels.layout import RouteLayout
from wide_kernels.norm_route.reference import TAP_EPS, norm_route_reference, reduced_reference

# Relative error in the Frobenius norm. Inputs are exact in every dtype, products are summed in fp32, so the error is
# the rounding of the result (2^-9 for bf16, 2^-12 for fp16, uniform in a binade: about half of it), and in fp32 that of
# sums of up to ten thousand terms. bf16 accumulation rounds once a segment.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 5e-6}
BF16_ACCUMULATION = 2e-2
BYPASS_RANKS = (32, 0)


@dataclass(frozen=True)
class Case:
    """Sizes and a mask: `rows` x `groups` groups of `width` channels, the other side of the weight `other`."""

    rows: int
    other: int
    groups: int
    width: int
    mask: str

    def __str__(self) -> str:
        return f"T={self.rows} other={self.other} groups={self.groups}x{self.width} mask={self.mask}"


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "half": lambda noise: noise < 0.5,
    "all": lambda noise: noise < 2,
    "none": lambda noise: noise > 2,
    "one": lambda noise: noise == noise.max(),
    "correlated": lambda noise: (noise[:, :1] < 0.5).expand(noise.shape),
}

SMALL = (
    Case(1, 64, 3, 16, "half"),
    Case(1, 48, 1, 32, "all"),
    Case(2, 80, 3, 48, "half"),
    Case(3, 48, 5, 16, "half"),
    Case(17, 48, 2, 128, "half"),
    Case(7, 80, 5, 48, "half"),
    Case(64, 64, 4, 16, "none"),
    Case(65, 48, 4, 32, "one"),
    Case(129, 48, 4, 32, "one"),
    Case(140, 64, 9, 16, "half"),
    Case(130, 64, 2, 48, "correlated"),
    Case(150, 32, 3, 64, "none"),
    Case(150, 32, 3, 64, "all"),
)
LARGE = (
    Case(1, 4096, 112, 128, "half"),
    Case(1, 4096, 896, 16, "half"),
    Case(3, 4096, 112, 128, "half"),
    Case(33, 4096, 28, 512, "half"),
    Case(100, 4096, 112, 128, "half"),
    Case(1000, 576, 24, 64, "half"),
    Case(2049, 1024, 224, 16, "half"),
    Case(5000, 512, 7, 96, "correlated"),
    Case(16385, 512, 16, 128, "half"),
)


def operands(case: Case, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(mask, x, weight, other weight, h), with NaN where nothing may read."""
    generator = torch.Generator().manual_seed(case.rows * 31 + case.groups)
    channels = case.groups * case.width

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    mask = MASKS[case.mask](torch.rand(case.rows, case.groups, generator=generator)).contiguous()
    x = normal(case.rows, case.other)
    weights = [normal(channels, case.other) / case.other**0.5 for _ in range(2)]
    h = normal(case.rows, case.groups, case.width)
    idle = ~mask.any(0).repeat_interleave(case.width)
    for weight in weights:
        weight[idle] = math.nan
    x[~mask.any(1)] = math.nan
    h[~mask] = math.nan
    cast = [tensor.to(device, dtype) for tensor in (x, *weights, h.view(case.rows, channels))]
    return mask.to(device), cast[0], cast[1], cast[2], cast[3]


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`; infinite for anything but finite values."""
    if got.shape != expected.shape or not bool(torch.isfinite(got).all()):
        return math.inf
    return float((got.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def poison_free_memory(size: int, dtype: torch.dtype, device: str) -> None:
    """Leave NaN in the block that the next allocation of this size is likely to get."""
    torch.full((size,), math.nan, dtype=dtype, device=device)


def _takes(backend: str, op: str, *args: object, **kwargs: Any) -> bool:
    """Gluon has kernels for some operators and sizes only; the other backends must take every case."""
    if backend != "gluon":
        return True
    try:
        wk.explain(op, *args, backend=backend, **kwargs)
    except UnsupportedError:
        return False
    return True


def errors(case: Case, dtype: torch.dtype, device: str, backend: str) -> Iterator[tuple[str, float, float]]:
    """(what, relative error, tolerance) of every operator of the backend on this case."""
    mask, x, weight, up, h = operands(case, dtype, device)
    layout = wk.route_layout(mask, backend="triton" if backend == "gluon" else backend)
    if _takes(backend, "route_layout", mask):
        expected_layout = wk.route_layout(mask, backend="torch")
        same = torch.equal(layout.index, expected_layout.index) and torch.equal(layout.count, expected_layout.count)
        yield "route_layout", 0.0 if same else math.inf, 0.0
    bound = TOLERANCE[dtype]
    clean = [torch.nan_to_num(tensor.double()) for tensor in (x, weight, up, h)]
    bias = torch.linspace(-1, 1, weight.shape[0], device=device).to(dtype)
    forms: tuple[dict[str, Any], ...] = ({"layout": layout}, {"mask": mask})
    for form in forms:
        name = next(iter(form))
        if not _takes(backend, "gemm_mn", x, weight, **form):
            continue
        poison_free_memory(case.rows * weight.shape[0], dtype, device)
        y = wk.gemm_mn(x, weight, bias=bias, activation="gelu", backend=backend, **form)
        yield (
            f"gemm_mn {name}",
            relative_error(y, gemm_mn_reference(clean[0], clean[1], mask, bias.double(), "gelu")),
            bound,
        )
        poison_free_memory(case.rows * weight.shape[0], dtype, device)
        y = wk.gated_mlp_up(x, weight, up, backend=backend, **form)
        yield (
            f"gated_mlp_up {name}",
            relative_error(y, gated_mlp_up_reference(clean[0], clean[1], clean[2], mask, "silu")),
            bound,
        )
    down, clean_down = weight.t().contiguous(), clean[1].t().contiguous()
    residual = torch.linspace(-1, 1, case.rows * case.other, device=device).view(case.rows, case.other).to(dtype)
    variants: list[tuple[str, dict[str, Any]]] = [
        ("fp32", {"accumulate": "fp32"}),
        ("fp32 residual", {"accumulate": "fp32", "residual": residual}),
        ("deterministic", {"deterministic": True}),
    ]
    if dtype is torch.bfloat16:
        variants.append(("bf16", {"accumulate": "bf16"}))
    for name, extra in variants:
        if not _takes(backend, "gemm_k", h, down, layout, **extra):
            continue
        poison_free_memory(case.rows * case.other, dtype, device)
        y = wk.gemm_k(h, down, layout, backend=backend, **extra)
        added = residual.double() if "residual" in extra else None
        expected = gemm_k_reference(clean[3], clean_down, mask, added)
        yield f"gemm_k {name}", relative_error(y, expected), BF16_ACCUMULATION if name == "bf16" else bound
    yield from stand_in_errors(case, h, down, residual, layout, backend)
    if backend != "gluon":
        yield from router_errors(case, clean[0].to(dtype), device, backend)


def stand_in_errors(
    case: Case, h: Tensor, down: Tensor, residual: Tensor, layout: RouteLayout, backend: str
) -> Iterator[tuple[str, float, float]]:
    """What stands in for skipped groups: with GEMM-K in all its forms, and by itself."""
    mask, dtype = layout.mask, h.dtype
    generator = torch.Generator().manual_seed(case.rows)
    clean_h, clean_down = (torch.nan_to_num(tensor.double()) for tensor in (h, down))
    # The bypass' coefficients are rounded once, and what many rows start from.
    bound = 2 * TOLERANCE[dtype]
    for rank in BYPASS_RANKS:
        shapes = ((case.groups, case.other), (case.other, rank), (case.rows, rank))
        mean, up, read = (torch.randn(*shape, generator=generator).to(h.device) for shape in shapes)
        stand_in = wk.StandIn(wk.stand_in_weight(mean, up, case.groups, dtype), read.to(dtype) if rank else None)
        wide = None if stand_in.reduced is None else stand_in.reduced.double()
        start = compensate_reference(residual.double(), stand_in.weight.double(), mask, wide)
        expected = gemm_k_reference(clean_h, clean_down, mask, start)
        given: dict[str, Any] = {"residual": residual, "stand_in": stand_in}
        variants: list[tuple[str, dict[str, Any]]] = [
            ("fp32", {"layout": layout, "accumulate": "fp32"}),
            ("deterministic", {"layout": layout, "deterministic": True}),
            ("early", {"mask": mask, "early": True}),
        ]
        if dtype is torch.bfloat16:
            variants.append(("bf16", {"layout": layout, "accumulate": "bf16"}))
        for name, extra in variants:
            if not _takes(backend, "gemm_k", h, down, **given, **extra):
                continue
            poison_free_memory(case.rows * case.other, dtype, str(h.device))
            y = wk.gemm_k(h, down, **given, **extra, backend=backend)
            rounded_often = h.is_cuda and dtype is torch.bfloat16 and name in ("bf16", "early")
            yield (
                f"gemm_k {name} stand-in {rank}",
                relative_error(y, expected),
                BF16_ACCUMULATION if rounded_often else bound,
            )
        if _takes(backend, "compensate", residual, stand_in, mask=mask):
            poison_free_memory(case.rows * case.other, dtype, str(h.device))
            y = wk.compensate(residual, stand_in, mask=mask, backend=backend)
            yield f"compensate {rank}", relative_error(y, start), bound


def router_errors(case: Case, x: Tensor, device: str, backend: str) -> Iterator[tuple[str, float, float]]:
    """Norm and decision; a decision may differ where the logits agree to fp32 rounding."""
    generator = torch.Generator().manual_seed(case.rows)
    shapes = ((20, case.other), (20,), (2 * case.groups, 20), (2 * case.groups,))
    w1, b1, w2, b2 = ((torch.randn(*shape, generator=generator) / 4).to(device) for shape in shapes)
    scale = torch.linspace(0.5, 1.5, case.other, device=device).to(x.dtype)
    full = x.double()
    expected, _ = norm_route_reference(full, scale.double(), w1, b1, w2, b2, 1e-5)
    bypass = (torch.randn(32, case.other, generator=generator) / case.other**0.5).to(device, x.dtype)
    reduced = reduced_reference(full, bypass.double(), 1e-5)
    forms = {"": w1} if x.element_size() > 2 else {"": w1, " in pieces": wk.in_pieces(w1, x.dtype)}
    for tap, (form, first) in itertools.product(("residual", "normalised"), forms.items()):
        y, mask = wk.norm_route(x, scale, first, b1, w2, b2, 1e-5, tap=tap, backend=backend)
        # The norm rounds twice as Llama's does: before and after the weight.
        yield f"norm_route norm {tap}{form}", relative_error(y, expected), 2 * TOLERANCE[x.dtype]
        read = full * torch.rsqrt(full.square().mean(-1, keepdim=True) + TAP_EPS) if tap == "normalised" else full
        hidden = read @ w1.double().t() + b1.double()
        logits = (hidden @ w2.double().t() + b2.double()).view(case.rows, case.groups, 2)
        z = logits[..., 0] - logits[..., 1]
        wrong = z[mask != (z >= 0)].abs()
        yield f"norm_route mask {tap}{form}", float(wrong.max() / z.abs().max()) if wrong.numel() else 0.0, 1e-5
        # The bypass' digits are the dtype's, what it reads is rounded once. The other sums are in another order then.
        poison_free_memory(case.rows * len(bypass), x.dtype, device)
        y, mask, read = wk.norm_route(
            x, scale, first, b1, w2, b2, 1e-5, tap=tap, bypass=bypass, early=True, backend=backend
        )
        wrong = z[mask != (z >= 0)].abs()
        flipped = float(wrong.max() / z.abs().max()) if wrong.numel() else 0.0
        yield f"norm_route norm beside a bypass {tap}{form}", relative_error(y, expected), 2 * TOLERANCE[x.dtype]
        yield f"norm_route mask beside a bypass {tap}{form}", flipped, 1e-5
        yield f"norm_route bypass {tap}{form}", relative_error(read, reduced), TOLERANCE[x.dtype]

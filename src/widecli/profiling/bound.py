"""The time below which no implementation can go: each part limited by its FLOPs or by its bytes, whichever is slower.

Counted are the matrix products, attention, the routers and what is added for skipped groups, with weights, KV cache and
activations moved once. Norms, rotation and activation functions are left out: ideal kernels do them on the way. Weights
of a group are read when at least one row executes it, its mean when one skips it; rows are taken as independent, so
with learned decisions and many rows the bytes are an estimate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import torch

from widecli.model.cost import mean_keys
from widecli.model.plan import ModelShape, RoutingPlan

Phase = Literal["ttft", "tpot"]
GroupRates = Sequence[Sequence[float]]
"""Skip rate of every group of every layer; an empty list where a layer is not routed."""

# Data sheets: dense bf16 FLOP/s with fp32 sums, bytes a second. The first name found in the device's counts.
_DATA_SHEETS: tuple[tuple[str, float, float], ...] = (
    ("GH200", 989.4e12, 4.0e12),
    ("H200", 989.4e12, 4.8e12),
    ("H100 PCIe", 756e12, 2.0e12),
    ("H100", 989.4e12, 3.35e12),
    ("B200", 2250e12, 8.0e12),
    ("A100-SXM4-80GB", 312e12, 2.039e12),
    ("A100", 312e12, 1.555e12),
    ("L40S", 362e12, 0.864e12),
    ("RTX 5090", 209.5e12, 1.792e12),
    ("RTX 4090", 165.2e12, 1.008e12),
)


@dataclass(frozen=True)
class Peaks:
    """What a device can do at most, and where that is from: `data sheet` or `measured`."""

    flops: float
    bytes: float
    source: str


@dataclass(frozen=True)
class Skipped:
    """What a plan's routers skip."""

    plan: RoutingPlan
    attention: GroupRates
    ffn: GroupRates

    @classmethod
    def evenly(cls, plan: RoutingPlan, shape: ModelShape, sparsity: float) -> Skipped:
        """Every group with the same chance."""
        layers = plan.layers(shape)
        return cls(
            plan,
            [[sparsity] * layer.attention_groups for layer in layers],
            [[sparsity] * layer.ffn_groups for layer in layers],
        )


@dataclass(frozen=True)
class Work:
    """FLOPs and bytes of one part of one layer."""

    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def seconds(self, peaks: Peaks) -> float:
        """The slower of the two."""
        return max(self.flops / peaks.flops, self.bytes / peaks.bytes)


@dataclass(frozen=True)
class Bound:
    """Seconds by part (named as the engine's ranges), and what they add up to."""

    parts: dict[str, float]
    flops: float
    bytes: float

    @property
    def seconds(self) -> float:
        """The whole pass."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Pass:
    """One prefill, or one decode step at a context of `keys` tokens."""

    shape: ModelShape
    phase: Phase
    batch: int
    prompt: int
    keys: float
    itemsize: int

    @classmethod
    def of(cls, shape: ModelShape, phase: Phase, batch: int, prompt: int, gen: int, itemsize: int) -> Pass:
        """A decode step stands for all of its generation: it sees the prompt and half of what is generated."""
        keys = mean_keys(prompt) if phase == "ttft" else prompt + gen / 2
        return cls(shape, phase, batch, prompt, keys, itemsize)

    @property
    def rows(self) -> int:
        """Tokens that go through the layers."""
        return self.batch * self.prompt if self.phase == "ttft" else self.batch


def bound(step: Pass, peaks: Peaks, skipped: Skipped | None = None) -> Bound:
    """The ideal time of a pass, dense or with what is skipped."""
    parts: dict[str, float] = {}
    flops = moved = 0.0
    works = [_layer(step, skipped, i) for i in range(step.shape.num_hidden_layers)]
    works.append({"lm_head": _lm_head(step)})
    for work in (item for layer in works for item in layer.items()):
        parts[work[0]] = parts.get(work[0], 0.0) + work[1].seconds(peaks)
        flops += work[1].flops
        moved += work[1].bytes
    return Bound(parts, flops, moved)


def _layer(step: Pass, skipped: Skipped | None, index: int) -> dict[str, Work]:
    shape, rows, size = step.shape, step.rows, step.itemsize
    hidden, channels = shape.hidden_size, shape.intermediate_size
    width = shape.num_attention_heads * shape.head_dim
    kv = 2 * shape.num_key_value_heads * shape.head_dim
    heads = _rates(skipped.attention[index] if skipped else ())
    groups = _rates(skipped.ffn[index] if skipped else ())
    a, f = 1 - fmean(heads), 1 - fmean(groups)  # executed by a row
    a_read, f_read = (fmean(1 - rate**rows for rate in rates) for rates in (heads, groups))  # by at least one
    # a prefill reads its own keys and values once, a decode step the whole context of every sequence
    cache_moved = rows * kv * (1.0 if step.phase == "ttft" else step.keys * _kv_heads_read(shape, heads))
    work = {
        "qkv": Work(
            2 * rows * hidden * (width * a + kv),
            size * (hidden * (width * a_read + kv) + rows * (hidden + width * a + kv)),
        ),
        "attention": Work(4 * rows * step.keys * width * a, size * (2 * rows * width * a + cache_moved)),
        "o": Work(2 * rows * width * hidden * a, size * (hidden * width * a_read + rows * (width * a + 2 * hidden))),
        "gate_up": Work(
            4 * rows * hidden * channels * f, size * (2 * hidden * channels * f_read + rows * (hidden + channels * f))
        ),
        "down": Work(
            2 * rows * channels * hidden * f, size * (hidden * channels * f_read + rows * (channels * f + 2 * hidden))
        ),
    }
    if skipped is not None:
        layer = skipped.plan.layer(shape, index)
        counts = [1] if layer.shared else [n for n in (layer.attention_groups, layer.ffn_groups) if n]
        weights = sum(skipped.plan.rank * (hidden + 2 * n) for n in counts)
        # router weights are fp32; a pass over the residual for each decision is the norm's, which is not counted
        work["norm_route"] = Work(2.0 * rows * weights, 4.0 * weights)
        _compensate(work, step, skipped, index)
    return work


def _compensate(work: dict[str, Work], step: Pass, skipped: Skipped, index: int) -> None:
    """Add the means of skipped groups, which the output projections read, and the bypass, half of which comes with the
    norm; both are of the model's dtype.
    """
    compensation = skipped.plan.compensation
    if compensation is None:
        return
    hidden, rank, rows = step.shape.hidden_size, compensation.rank, step.rows
    for part, rates in (("o", skipped.attention[index]), ("down", skipped.ffn[index])):
        if not rates:
            continue
        groups = len(rates) if compensation.mean else 0
        added, read = groups * fmean(rates), groups * fmean(1 - (1 - rate) ** rows for rate in rates)
        work[part] += Work(2.0 * rows * hidden * (added + rank), step.itemsize * hidden * (read + rank))
        work["norm_route"] += Work(2.0 * rows * hidden * rank, step.itemsize * hidden * rank)


def _lm_head(step: Pass) -> Work:
    """On the last position of every sequence alone."""
    shape, batch = step.shape, step.batch
    weights = shape.hidden_size * shape.vocab_size
    return Work(2.0 * batch * weights, step.itemsize * (weights + batch * (shape.hidden_size + shape.vocab_size)))


def _rates(rates: Sequence[float]) -> Sequence[float]:
    return rates or (0.0,)


def _kv_heads_read(shape: ModelShape, rates: Sequence[float]) -> float:
    """Share of the KV heads that a decode step reads: those with at least one query group that runs."""
    kv_heads = shape.num_key_value_heads
    if len(rates) <= kv_heads:
        return 1 - fmean(rates)
    each = len(rates) // kv_heads
    read = 0.0
    for head in range(kv_heads):
        none = 1.0
        for rate in rates[head * each : (head + 1) * each]:
            none *= rate
        read += 1 - none
    return read / kv_heads


_peaks: dict[tuple[torch.device, torch.dtype], Peaks] = {}


def peaks_of(device: torch.device, dtype: torch.dtype) -> Peaks:
    """Of the data sheet where the device is in the table and computes in 16 bits, else measured in a moment, once."""
    if (device, dtype) not in _peaks:
        _peaks[device, dtype] = _found_peaks(device, dtype)
    return _peaks[device, dtype]


def remember_peaks(device: torch.device, dtype: torch.dtype, peaks: Peaks) -> None:
    """Take these from now on: those that the beginning of a run was measured with hold for its rest, too."""
    _peaks[device, dtype] = peaks


def _found_peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    if device.type == "cuda" and dtype.itemsize == 2:
        name = torch.cuda.get_device_name(device)
        for known, flops, moved in _DATA_SHEETS:
            if known in name:
                return Peaks(flops, moved, "data sheet")
    n, elements = (8192, 1 << 28) if device.type == "cuda" else (768, 1 << 24)
    a = torch.randn(n, n, device=device, dtype=dtype)
    data = torch.ones(elements, device=device, dtype=dtype)
    flops = 2 * n**3 / _fastest(lambda: a @ a, device)
    moved = elements * dtype.itemsize / _fastest(data.sum, device)
    return Peaks(flops, moved, "measured")


def _fastest(call: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best

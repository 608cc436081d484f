"""The timed cases of the attention operators: prefill of one sequence, decode of several, against torch's SDPA."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import wide_kernels as wk
from wide_kernels.benchmarks.cases import TimedCase
from wide_kernels.benchmarks.shapes import ModelShape
from wide_kernels.benchmarks.timing import Call
from wide_kernels.random_masks import random_masks

LIBRARIES = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
CHECKED_TOKENS = 64  # queries compared with float64; every element is tested for being finite
# (B, T, keys, density): T = keys is a prefill, T = 1 a step of decoding.
ATTENTION_GRID = (
    (1, 16384, 16384, 0.5),
    (1, 1, 16384, 0.5),
    (1, 1, 32768, 0.5),
    (8, 1, 16384, 0.5),
    (16, 1, 4096, 0.5),
    (1, 4096, 4096, 0.5),
    (1, 1024, 1024, 0.5),
    (4, 4096, 4096, 0.5),
    (1, 1, 4096, 0.5),
    (1, 16384, 16384, 1.0),
    (1, 1, 16384, 1.0),
    (1, 16384, 16384, 0.0),
)


@dataclass(frozen=True)
class AttentionSizes:
    """One point: B sequences of T queries against `keys` keys; one group of query heads a KV head."""

    model: ModelShape
    batch: int
    tokens: int
    keys: int
    density: float
    dtype: torch.dtype
    device: str = "cuda"

    @property
    def op(self) -> str:
        """The operator that this point times."""
        return "attention_decode" if self.tokens == 1 else "attention_prefill"

    def __str__(self) -> str:
        return f"{self.op} B={self.batch} T={self.tokens} keys={self.keys} density={self.density:g}"

    def normal(self, length: int, heads: int) -> Tensor:
        """Random operands: zeros would let the GPU run faster than it does on data."""
        shape = (self.batch, length, heads, self.model.head_dim)
        return torch.randn(*shape, device=self.device, dtype=self.dtype)


def _library(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Call:
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    causal, shared = q.shape[2] > 1, q.shape[1] != k.shape[1]

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared).transpose(1, 2)

    return call


def libraries(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Call]:
    """Torch's fused kernels that take these operands; a CPU has one form."""
    if not q.is_cuda:
        return {"sdpa": _library(q, k, v, SDPBackend.MATH)}
    found = {}
    for name, backend in LIBRARIES.items():
        call = _library(q, k, v, backend)
        try:
            call()
        except RuntimeError:  # this one does not take them
            continue
        found[name] = call
    return found


def attention_case(sizes: AttentionSizes) -> TimedCase:
    """One point; the layout is made beforehand, as it is for the other operators."""
    torch.manual_seed(0)
    model, rows = sizes.model, sizes.batch * sizes.tokens
    groups = model.num_key_value_heads
    q = sizes.normal(sizes.tokens, model.num_attention_heads)
    k, v = (sizes.normal(sizes.keys, groups) for _ in range(2))
    mask = random_masks((rows, groups), 1 - sizes.density, 0, None, torch.device(sizes.device))
    # Multiply-adds of the executed heads over the keys that they see, twice: scores and values.
    heads = model.num_attention_heads // groups
    if sizes.tokens == 1:
        seen = float(mask.sum()) * sizes.keys
        routed: Call = lambda: wk.attention_decode(q, k, v, mask)  # noqa: E731
        explanation = wk.explain("attention_decode", q, k, v, mask)
    else:
        layout = wk.route_layout(mask)
        position = torch.arange(sizes.tokens, device=sizes.device).repeat(sizes.batch) + sizes.keys - sizes.tokens
        seen = float((mask.sum(1) * (position + 1)).double().sum())
        routed = lambda: wk.attention_prefill(q, k, v, layout)  # noqa: E731
        explanation = wk.explain("attention_prefill", q, k, v, layout)

    def check() -> float:
        got = routed()
        assert isinstance(got, Tensor)
        if not bool(torch.isfinite(got).all()):
            return float("inf")
        picked = torch.randperm(sizes.tokens, device=sizes.device)[:CHECKED_TOKENS].sort().values
        expected = _exact(q[:, picked], k, v, picked + sizes.keys - sizes.tokens)
        by_head = mask.view(sizes.batch, sizes.tokens, groups)[:, picked].repeat_interleave(heads, 2)
        expected = expected.masked_fill(~by_head[..., None], 0)
        return float((got[:, picked].double() - expected).norm() / expected.norm().clamp_min(1e-30))

    return TimedCase(
        sizes.op, rows, heads, sizes.density, explanation, routed, libraries(q, k, v), check,
        4 * seen * heads * model.head_dim,
    )  # fmt: skip


def _exact(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
    """Dense attention in float64, one KV head at a time; query t stands at key position[t]."""
    shared = q.shape[2] // k.shape[2]
    hidden = torch.arange(k.shape[1], device=q.device) > position[:, None]
    parts = []
    for head in range(k.shape[2]):
        rows = q[:, :, head * shared : (head + 1) * shared].double()
        scores = torch.einsum("bthd,bjd->bhtj", rows, k[:, :, head].double()) / q.shape[3] ** 0.5
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        parts.append(torch.einsum("bhtj,bjd->bthd", weights, v[:, :, head].double()))
    return torch.cat(parts, 2)


def grid(model: ModelShape, dtype: torch.dtype, ops: set[str]) -> list[AttentionSizes]:
    """The points of the attention operators among `ops`."""
    every = [AttentionSizes(model, *point, dtype) for point in ATTENTION_GRID]
    return [sizes for sizes in every if sizes.op in ops]

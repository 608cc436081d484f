"""Awkward cases of the attention operators, with NaN in everything that no query may see; see benchmarks.awkward."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

import wide_kernels as wk
from wide_kernels.attention_decode.reference import attention_decode_reference
from wide_kernels.attention_prefill.reference import attention_prefill_reference
from wide_kernels.benchmarks.awkward import MASKS, TOLERANCE, poison_free_memory, relative_error


@dataclass(frozen=True)
class AttentionCase:
    """Sizes, a mask, and whether queries are a chunk anywhere among the keys (`chunk`) and keys are left-padded."""

    batch: int
    tokens: int
    keys: int
    heads: int
    kv_heads: int
    size: int
    groups: int
    mask: str
    causal: bool = True
    chunk: bool = False
    padded: bool = False

    def __str__(self) -> str:
        flags = [name for name in ("causal", "chunk", "padded") if getattr(self, name)]
        return (
            f"attention B={self.batch} T={self.tokens} T_k={self.keys} heads={self.heads}/{self.kv_heads}x{self.size}"
            f" groups={self.groups} mask={self.mask} {' '.join(flags)}"
        )


SMALL_ATTENTION = (
    AttentionCase(1, 1, 1, 4, 4, 64, 4, "all"),
    AttentionCase(2, 1, 37, 8, 2, 64, 2, "half", padded=True),
    AttentionCase(1, 70, 70, 8, 2, 64, 2, "half"),
    AttentionCase(1, 70, 70, 8, 2, 16, 4, "none"),
    AttentionCase(3, 33, 50, 6, 2, 48, 3, "half", padded=True),
    AttentionCase(2, 40, 90, 8, 1, 32, 4, "half", chunk=True, padded=True),
    AttentionCase(2, 20, 40, 12, 2, 16, 3, "one", chunk=True),
    AttentionCase(2, 30, 65, 4, 4, 80, 1, "half", causal=False, padded=True),
    AttentionCase(1, 40, 40, 4, 2, 256, 4, "correlated"),
)
LARGE_ATTENTION = (
    AttentionCase(1, 1, 5000, 32, 8, 128, 8, "half"),
    AttentionCase(3, 777, 1500, 32, 8, 128, 8, "half", chunk=True, padded=True),
    AttentionCase(1, 2049, 2049, 32, 8, 128, 8, "half"),
    AttentionCase(2, 1000, 1000, 9, 3, 64, 3, "half", padded=True),
    AttentionCase(5, 300, 301, 16, 16, 128, 4, "one", causal=False),
    AttentionCase(4, 129, 700, 16, 2, 64, 4, "correlated", chunk=True),
    AttentionCase(2, 300, 300, 8, 2, 256, 2, "half"),
    AttentionCase(300, 1, 400, 32, 8, 128, 16, "half", padded=True),
)


@dataclass(frozen=True)
class Operands:
    """What one call gets; NaN where nothing may read."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor
    first: Tensor  # [B] first visible key
    end: Tensor  # [B] one past the last key that any query sees

    def clean(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same in float64 without NaN."""
        q, k, v = (torch.nan_to_num(tensor.double()) for tensor in (self.q, self.k, self.v))
        return q, k, v


def operands(case: AttentionCase, tokens: int, end: Tensor, dtype: torch.dtype, device: str) -> Operands:
    """Random operands for `tokens` queries a sequence of which the last sees keys up to `end` [B]."""
    generator = torch.Generator().manual_seed(case.keys * 7 + tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rows, width = case.batch * tokens, case.heads // case.groups
    mask = MASKS[case.mask](torch.rand(rows, case.groups, generator=generator)).contiguous()
    first = torch.zeros(case.batch, dtype=torch.int64)
    if case.padded:
        first = torch.minimum(torch.randint(0, max(2, case.keys // 3), (case.batch,), generator=generator), end)
    q = normal(case.batch, tokens, case.heads, case.size)
    by_head = mask.view(case.batch, tokens, case.groups).repeat_interleave(width, 2)
    q[~by_head] = math.nan
    key = torch.arange(case.keys)
    unseen = (key < first[:, None]) | (key >= end[:, None])
    idle = ~by_head.view(case.batch, tokens, case.kv_heads, -1).any(3).any(1)
    k, v = (normal(case.batch, case.keys, case.kv_heads, case.size) for _ in range(2))
    for tensor in (k, v):
        tensor[unseen] = math.nan
        tensor.transpose(1, 2)[idle] = math.nan
    q, k, v = (tensor.to(device, dtype) for tensor in (q, k, v))
    return Operands(q, k, v, mask.to(device), first.to(device), end.to(device))


def attention_errors(
    case: AttentionCase, dtype: torch.dtype, device: str, backend: str
) -> Iterator[tuple[str, float, float]]:
    """(what, relative error, tolerance) of prefill and of decode, on Gluon too where it runs."""
    generator = torch.Generator().manual_seed(case.tokens)
    starts = torch.full((case.batch,), case.keys - case.tokens)
    if case.chunk:
        starts = torch.randint(0, case.keys - case.tokens + 1, (case.batch,), generator=generator)
    end = starts + case.tokens if case.causal else torch.full((case.batch,), case.keys)
    given = operands(case, case.tokens, end, dtype, device)
    q_start = starts.to(device) if case.chunk else None
    kv_start = given.first if case.padded else None
    layout = wk.route_layout(given.mask)
    options = (case.causal, q_start, kv_start)
    expected = attention_prefill_reference(*given.clean(), given.mask, *options, None)
    call = (given.q, given.k, given.v, layout, *options)
    for name in {backend, wk.explain("attention_prefill", *call).backend} - {"torch"} or {backend}:
        poison_free_memory(given.q.numel(), dtype, device)
        o = wk.attention_prefill(*call, backend=name)
        yield f"attention_prefill {name}", relative_error(o, expected), TOLERANCE[dtype]

    lengths = torch.randint(0, case.keys + 1, (case.batch,), generator=generator)
    lengths[0] = case.keys
    given = operands(case, 1, lengths, dtype, device)
    first = given.first if case.padded else None
    expected = attention_decode_reference(*given.clean(), given.mask, given.end, first, None)
    step = (given.q, given.k, given.v, given.mask, given.end)
    names = [backend]
    with suppress(wk.UnsupportedError):  # auto passes Gluon over; where it can run it must be right all the same
        names.append(wk.explain("attention_decode", *step, kv_start=first, backend="gluon").backend)
    for name in dict.fromkeys(names):
        poison_free_memory(given.q.numel(), dtype, device)
        o = wk.attention_decode(*step, kv_start=first, backend=name)
        yield f"attention_decode {name}", relative_error(o, expected), TOLERANCE[dtype]

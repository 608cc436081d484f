"""From logits to decisions: hard Gumbel-softmax with a straight-through gradient in training, argmax in inference.

With two classes the Gumbel-softmax needs one random number, not two: the difference of two Gumbel variables is
logistic, and softmax over two logits is a sigmoid of their difference. So a decision is
`z + noise > 0` with `z = execute logit - skip logit`, and its gradient that of `sigmoid((z + noise) / temperature)`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

UNIFORM_EPS = 1e-7  # keeps log(u) finite; fp32 has about 1.2e-7 between neighbours just below 1


@dataclass(frozen=True)
class Gumbel:
    """How a training pass decides: `temperature` is a 0-d fp32 tensor, `noise` [B, T, total groups] logistic."""

    temperature: Tensor
    noise: Tensor


def margins(logits: Tensor) -> Tensor:
    """z = execute logit - skip logit: logits [..., N, 2] -> [..., N]."""
    return logits[..., 0] - logits[..., 1]


def argmax_gate(z: Tensor) -> Tensor:
    """Execute where class 0 is at least as likely as class 1: margins [..., N] -> bool [..., N]."""
    return z >= 0


def gumbel_gate(z: Tensor, temperature: Tensor, noise: Tensor) -> Tensor:
    """Straight-through sample: values exactly 0 or 1 (fp32 [..., N]), gradient that of the relaxed sample."""
    perturbed = z + noise
    soft = torch.sigmoid(perturbed / temperature)
    hard = (perturbed >= 0).to(soft.dtype)
    return hard + (soft - soft.detach())  # the bracket is exactly 0, so the value stays exactly 0 or 1


def noise_seed(*key: int | str) -> int:
    """A generator's seed (63 bits) from what the draw belongs to: recipe seed, step, row and, if need be, a purpose."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def logistic_noise(seed: int, step: int, rows: Sequence[int], tokens: int, groups: int, device: torch.device) -> Tensor:
    """Noise [len(rows), tokens, groups], fp32, for the sequences `rows` of the global batch of `step`.

    Every sequence has a generator of its own, keyed by (seed, step, row). So noise does not depend on how the batch is
    cut into micro-batches or spread over ranks, a resumed run draws what the unbroken one would have drawn, and
    recomputation under activation checkpointing sees the same values because they are an input, not a draw.
    """
    generator = torch.Generator(device)
    out = torch.empty(len(rows), tokens, groups, device=device, dtype=torch.float32)
    for i, row in enumerate(rows):
        generator.manual_seed(noise_seed(seed, step, row))
        torch.rand(tokens, groups, generator=generator, out=out[i])
    uniform = out.clamp_(UNIFORM_EPS, 1 - UNIFORM_EPS)
    return torch.logit(uniform)

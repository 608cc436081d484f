"""From logits to the next token: the most likely one, or a draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from widecli.engine.fused import take_likeliest
from widecli.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """`temperature` 0 takes the most likely token; else a draw from the smallest set that holds `top_p` of the mass."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature must be 0 (take the most likely token) or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.seed < 0:
            raise UsageError(f"seed must be 0 or more, got {self.seed}")


class Sampler:
    """Draws with a generator of its own: the same seed, batch and logits give the same tokens."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self.sampling = sampling
        self._generator = torch.Generator(device).manual_seed(sampling.seed)

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits [B, V] -> tokens int64 [B], on the device."""
        if self.sampling.temperature == 0:
            token = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
            take_likeliest(logits, token)
            return token
        from transformers import TopPLogitsWarper

        scores = logits.float() / self.sampling.temperature
        if self.sampling.top_p < 1:
            scores = cast(Tensor, TopPLogitsWarper(self.sampling.top_p)(None, scores))
        return torch.multinomial(scores.softmax(-1), 1, generator=self._generator)[:, 0]

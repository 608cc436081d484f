"""Engine and Hugging Face path side by side on the same tiny random models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tiny_models import shake_routers, tiny_model, tiny_plan
from widecli.engine.model import InferenceModel
from widecli.model.routed import RoutedModel


class Pair:
    """One model twice: with hooks (the reference) and in the engine, on the same weights."""

    def __init__(self, model: Any, routed: RoutedModel | None) -> None:
        self.model = model
        self.routed = routed
        if routed is None:
            self.engine = InferenceModel.from_dense(model)
        else:
            self.engine = InferenceModel.from_routed(
                model, routed.plan, routed.routers, compensations=routed.compensations
            )

    @torch.no_grad()
    def reference(self, ids: Tensor) -> Tensor:
        """Logits [B, T, V] of the Hugging Face path, no padding."""
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits


def make_pair(
    family: str = "llama",
    *,
    routed: bool,
    seed: int = 0,
    plan: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Pair:
    model = tiny_model(family, seed, **changes).to(dtype)
    if not routed:
        return Pair(model, None)
    attached = RoutedModel.attach(model, tiny_plan(**(plan or {})), seed=seed)
    shake_routers(attached, seed)
    return Pair(model, attached)


def padded(prompts: Sequence[Tensor], filler: int = 7) -> tuple[Tensor, list[int]]:
    """Prompts as one batch, padded on the right with an ordinary token."""
    lengths = [len(p) for p in prompts]
    ids = torch.full((len(prompts), max(lengths)), filler)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    return ids, lengths

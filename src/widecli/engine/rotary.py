"""Cosines and sines of the rotary embedding for every cache slot, by the model's own Hugging Face module."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from widecli.errors import UsageError

_CHANGING = ("dynamic", "longrope")  # their frequencies depend on the sequence's length


@torch.no_grad()
def rotary_tables(
    rotary: nn.Module, tokens: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [tokens, d] in `dtype`: row p for position p. Raises UsageError for what it cannot tabulate."""
    module = cast(Any, rotary)
    if module.rope_type in _CHANGING:
        settings = module.config.rope_parameters or {}
        limit = int(settings.get("original_max_position_embeddings") or module.config.max_position_embeddings)
        if tokens > limit:
            raise UsageError(
                f"rotary embedding {module.rope_type!r} changes its frequencies beyond {limit} tokens, "
                f"and {tokens} were asked for; the engine serves at most {limit}"
            )
    positions = torch.arange(tokens, device=device)[None]
    cos, sin = module(torch.empty(0, dtype=dtype, device=device), positions)
    if cos.shape[-1] != head_dim:
        raise UsageError(f"the engine rotates whole heads of {head_dim}, this model rotates {cos.shape[-1]} of them")
    return cos[0].contiguous(), sin[0].contiguous()

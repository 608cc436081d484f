"""The longest sequence that a model is made for: one rule for everything that feeds it tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from widecli.errors import UsageError


def positions(config: Any) -> int:
    """Tokens of the longest sequence, by the Hugging Face config. Beyond it a model computes, but knows nothing."""
    return int(config.max_position_embeddings)


def refuse_beyond(name: str, config: Any, lengths: Mapping[str, int]) -> None:
    """Raise UsageError for the first length, under the key or flag that sets it, that is more than the model's."""
    limit = positions(config)
    for key, tokens in lengths.items():
        if tokens > limit:
            raise UsageError(
                f"{key}={tokens} is more than the {limit} positions that {name} is made for: take at most {limit}, or "
                "add --beyond-positions if you mean it"
            )

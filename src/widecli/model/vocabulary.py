"""The token ids that a model knows: its tokenizer may have more words than its embedding has rows."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from widecli.errors import UsageError


def vocabulary(model: Any) -> int:
    """Rows of the embedding of a Hugging Face model: ids from 0 to below this are known."""
    return int(model.get_input_embeddings().weight.shape[0])


def refuse_unknown(what: str, ids: Collection[int], model: Any) -> None:
    """Raise UsageError where `what`, made of these token ids, holds one that the model's embedding lacks."""
    known, largest = vocabulary(model), max(ids, default=0)
    if largest >= known:
        raise UsageError(
            f"{what} has a token of id {largest}, and the model knows {known}: its tokenizer was given words that its "
            "embedding has no rows for; take the model's own tokenizer, or leave those words out"
        )

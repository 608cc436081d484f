"""Work that points have in common, done once before they start side by side: the model's folder and the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from widecli.errors import WideError
from widecli.recipe.schema import Recipe


def prepare(recipes: Iterable[Recipe], note: Callable[[str], None], warn: Callable[[str], None], offline: bool) -> None:
    """Convert models and fill the token cache for trainings. What goes wrong is left to the points that need it.

    Text sampled from the model itself (`data.source=self`) needs the model: the points prepare it.
    """
    from widecli.data.sources import open_source
    from widecli.data.tokens import prepare_tokens, tokens_to_prepare
    from widecli.model.backbone import load_tokenizer
    from widecli.train.job import tokens_needed

    distinct = {
        (recipe.model, recipe.data, tokens_to_prepare(recipe.data, tokens_needed(recipe))): recipe for recipe in recipes
    }
    tokenizers = {}
    for (model, data, _), recipe in distinct.items():
        try:
            if model not in tokenizers:
                note(f"loading the tokenizer of {model.name}")
                tokenizers[model] = load_tokenizer(model)
            if data.source == "self":
                continue
            source = open_source(data.source, section=data, offline=offline)
            note(f"preparing tokens from {source.name}, for all points")
            prepare_tokens(source, tokenizers[model], data, tokens_needed=tokens_needed(recipe))
        except WideError as error:
            warn(f"nothing could be prepared ahead: {error}")

"""Turns what pydantic refuses into one sentence: the key, the value received, what is valid."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import NoReturn

from pydantic import ValidationError

from widecli.errors import UsageError
from widecli.recipe.keys import Tree, accepted, accepts, key_before_branch, known_key, leaves, recipe_keys, value_at
from widecli.recipe.retired import MODE, RETIRED
from widecli.recipe.schema import LARGEST


def refuse_odd_numbers(tree: Tree, provenance: Mapping[str, str]) -> None:
    """Refuses what pydantic would let pass: `train.steps=true` as 1, an infinite learning rate."""
    for key in leaves(tree):
        value = value_at(tree, key)
        if key not in recipe_keys():
            continue
        bool_as_number = isinstance(value, bool) and not accepts(recipe_keys()[key], bool)
        if bool_as_number or (isinstance(value, float) and not math.isfinite(value)):
            raise UsageError(_sentence(key, value, provenance))


def raise_usage_error(error: ValidationError, tree: Tree, provenance: Mapping[str, str]) -> NoReturn:
    """Raises a UsageError with a sentence for each thing that `error` found in `tree`."""
    sentences: list[str] = []
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"] if part != "[key]")
        known = known_key(key) or key_before_branch(key)
        if known is None:  # a rule over several keys: the schema's own sentence
            sentences.append(str(item.get("ctx", {}).get("error") or item["msg"]).removesuffix(".") + ".")
        elif key != known and accepts(recipe_keys()[known], dict):
            sentences.append(
                f"{key}={_show_value(item['input'])}{_origin(known, provenance)} is not valid: {item['msg']}."
            )
        else:
            sentences.append(_sentence(known, value_at(tree, known), provenance))
    raise UsageError(" ".join(dict.fromkeys(sentences))) from None


def _sentence(key: str, value: object, provenance: Mapping[str, str]) -> str:
    if key == "routing.mode" and value == MODE:
        return f"{key}={MODE}{_origin(key, provenance)} asks for pattern routing, {RETIRED}."
    valid = accepted(recipe_keys()[key])
    hint = ""
    if isinstance(value, (int, float)) and 2 <= value < 100 and "below 1" in valid:
        hint = f" ({value / 100:g} means {value:g} %)"
    if isinstance(value, int) and value > LARGEST:
        hint = ", of at most 63 bits"
    return f"{key}={_show_value(value)}{_origin(key, provenance)} must be {valid}{hint}."


def _origin(key: str, provenance: Mapping[str, str]) -> str:
    origin = provenance.get(key, "")
    return f" in {origin}" if origin.endswith((".yaml", ".yml")) else ""


def _show_value(value: object) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    text = text.strip('"') if isinstance(value, str) else text
    return text if len(text) <= 60 else text[:57] + "..."

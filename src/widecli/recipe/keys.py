"""The dotted keys of a recipe: which exist, what each accepts in words, and what an unknown one may have meant."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from widecli.recipe.retired import PATTERN_KEYS, RETIRED
from widecli.recipe.schema import LARGEST, Recipe, Section

Tree = dict[Any, Any]
"""A recipe before validation: sections as nested dictionaries."""

# Names people use for a key: the paper's letters and the command line's short flags.
ALIASES: Mapping[str, str] = {
    "G": "routing.ffn_group_size",
    "S": "budget.sparsity",
    "group_size": "routing.ffn_group_size",
    "lr": "train.learning_rate",
    "alpha": "budget.weight",
    "tau": "train.temperature_start",
    "wandb": "track.wandb",
    "model": "model.name",
    "data": "data.source",
}


@cache
def recipe_keys() -> Mapping[str, FieldInfo]:
    """Every dotted key that takes a value, in the order of the schema."""
    return types.MappingProxyType(dict(_walk(Recipe, "")))


def section_keys() -> tuple[str, ...]:
    """The names of the recipe's sections."""
    return tuple(Recipe.model_fields)


def _walk(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, Section):
            yield from _walk(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def suggestion(unknown: str) -> str:
    """What to say after an unknown key: the closest known ones, else the sections."""
    if unknown in PATTERN_KEYS:
        return f"it belongs to pattern routing, {RETIRED}."
    candidates: list[str] = []
    last = unknown.rsplit(".", 1)[-1]
    if unknown in ALIASES:
        candidates.append(ALIASES[unknown])
    if last in recipe_keys_by_leaf():
        candidates.extend(recipe_keys_by_leaf()[last])
    if not candidates:
        candidates.extend(difflib.get_close_matches(unknown, recipe_keys(), n=1, cutoff=0.75))
    if not candidates:
        for leaf in difflib.get_close_matches(last, recipe_keys_by_leaf(), n=1, cutoff=0.7):
            candidates.extend(recipe_keys_by_leaf()[leaf])
    if not candidates and last in ALIASES:
        candidates.append(ALIASES[last])
    unique = list(dict.fromkeys(candidates))[:3]
    if unique:
        return f"did you mean {' or '.join(unique)}?"
    section = unknown.split(".", 1)[0]
    if section in section_keys():
        return f"{section} has {', '.join(k.split('.', 1)[1] for k in recipe_keys() if k.startswith(section + '.'))}."
    if near := difflib.get_close_matches(section, section_keys(), n=1):
        return f"did you mean {unknown.replace(section, near[0], 1)}?"
    return f"the sections are {', '.join(section_keys())}."


@cache
def recipe_keys_by_leaf() -> Mapping[str, tuple[str, ...]]:
    """Last name of a key -> the keys that end in it."""
    by_leaf: dict[str, tuple[str, ...]] = {}
    for key in recipe_keys():
        leaf = key.rsplit(".", 1)[-1]
        by_leaf[leaf] = (*by_leaf.get(leaf, ()), key)
    return types.MappingProxyType(by_leaf)


def accepted(field: FieldInfo) -> str:
    """What a field accepts, in words: `a whole number above 0, or null`."""
    words = _in_words(field.annotation, tuple(field.metadata))
    return ", or ".join(dict.fromkeys(words))


def _in_words(annotation: Any, metadata: tuple[Any, ...]) -> list[str]:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        return _in_words(inner, (*more, *metadata))
    if origin in (Union, types.UnionType):
        words = [w for member in get_args(annotation) for w in _in_words(member, metadata)]
        return [w for w in words if w != "null"] + (["null"] if "null" in words else [])
    if origin is Literal:
        choices = ", ".join(map(str, get_args(annotation)))
        return [f"one of {choices}" if "," in choices else choices]
    if origin is tuple:
        return ["a list of texts"]
    if origin is dict:
        numbered = get_args(annotation)[0] is int
        return [f"a table of {'layer numbers with what differs there' if numbered else 'recipe keys with values'}"]
    bounds = _bounds(metadata)
    named = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
    word = named.get(annotation, "a value of another kind")
    return [f"{word}{bounds}" if annotation in (int, float) else word]


def _bounds(metadata: tuple[Any, ...]) -> str:
    parts: list[str] = []
    for item in metadata:
        # A FieldInfo inside Annotated carries its own list of constraints.
        for bound in getattr(item, "metadata", None) or [item]:
            match bound:
                case Ge(ge=low):
                    parts.append(f"of at least {low:g}")
                case Gt(gt=low):
                    parts.append(f"above {low:g}")
                case Lt(lt=high):
                    parts.append(f"below {high:g}")
                case Le(le=high) if high != LARGEST:
                    parts.append(f"of at most {high:g}")
    return f" {' and '.join(parts)}" if parts else ""


def accepts(field: FieldInfo, kind: type) -> bool:
    """Whether the annotation names `kind` (str, bool, tuple, NoneType...) as one of its alternatives."""
    return any(alternative is kind for alternative in _alternatives(field.annotation))


def _alternatives(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _alternatives(member)
    elif origin is Literal:
        yield from {type(choice) for choice in get_args(annotation)}
    else:
        yield origin or annotation


def leaves(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    """Dotted keys that hold a value; `routing.layers` counts as one."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in recipe_keys():
            yield from leaves(value, f"{key}.")
        else:
            yield key


def keys_of(section: str) -> str:
    """The keys of a section as people read them, comma-separated."""
    return ", ".join(key for key in recipe_keys() if key.startswith(f"{section}."))


def known_key(key: str) -> str | None:
    """The recipe key that `key` names or lies inside (`routing.layers.3.parts`), if any."""
    parts = key.split(".")
    for length in range(len(parts), 1, -1):
        if (prefix := ".".join(parts[:length])) in recipe_keys():
            inside_table = length < len(parts)
            return prefix if not inside_table or accepts(recipe_keys()[prefix], dict) else None
    return None


def key_path(key: str) -> list[str | int]:
    """`routing.layers.3.parts` -> its steps; layer numbers are ints, as YAML reads them."""
    return [int(part) if part.isdigit() else part for part in key.split(".")]


def key_before_branch(key: str) -> str | None:
    """Pydantic appends the union's branch to a location: data.source.str -> data.source."""
    parts = key.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 1, -1))
    return next((prefix for prefix in prefixes if prefix in recipe_keys()), None)


def value_at(tree: Tree, key: str) -> object:
    """What the tree holds under a dotted key; None where there is nothing."""
    node: Any = tree
    for name in key_path(key):
        node = node.get(name) if isinstance(node, dict) else None
    return node

"""From a recipe's name, overrides and flags to one validated `Recipe`.

Later wins: defaults < the recipe's `base` < the recipe < `key=value` and `~key` < flags. `~key` takes the key back to
its default. Whatever is wrong ends as one `UsageError` that names the key, the value and what is valid.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from widecli.errors import UsageError
from widecli.recipe.complaints import raise_usage_error, refuse_odd_numbers
from widecli.recipe.dialect import dump_yaml, parse_value
from widecli.recipe.files import (
    as_stored,
    check_keys,
    find_recipe,
    parse_mapping,
    read_with_base,
    recipe_text,
    shown_path,
)
from widecli.recipe.keys import (
    Tree,
    accepts,
    key_path,
    keys_of,
    known_key,
    leaves,
    recipe_keys,
    section_keys,
    suggestion,
)
from widecli.recipe.schema import DistributedSection, LoraSection, Recipe, SweepSection


@dataclass(frozen=True)
class ResolvedRecipe:
    """A validated recipe and where it came from."""

    recipe: Recipe
    source: str
    """The recipe file as a person would name it, or `defaults`."""
    hash8: str
    """Names the run: equal for equal recipes, whatever `track` says."""
    provenance: Mapping[str, str] = field(default_factory=dict)
    """Dotted key -> who set it (a file, `command line`, `flag`); keys at their default are absent."""


def default_recipe_name(cuda: bool) -> str | None:
    """The base of a command without a named recipe: the schema's defaults on a GPU, `demo` without one."""
    return None if cuda else "demo"


def resolve(
    recipe: str | None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
    command: str = "calibrate",
) -> ResolvedRecipe:
    """Builds the recipe that a command runs.

    Args:
        recipe: a path, a name below `recipes/` (`smollm2_s50_g64`, `calibrate/smollm2_s50_g64`), or None = defaults.
        overrides: `key=value` (value in YAML) and `~key` (or `~section`) in the order given.
        flags: dotted key -> value; None means that the flag was not given.
        command: whose recipe a shipped name means when several commands have one of that name.

    Raises:
        UsageError: an unknown recipe or key, an unreadable file, or a value that is not valid.
    """
    tree: Tree = {}
    provenance: dict[str, str] = {}
    source = "defaults"
    if recipe is not None:
        path = find_recipe(recipe, command)
        source = shown_path(path)
        tree = read_with_base(path, provenance)
    for override in overrides:
        _apply_override(tree, override, provenance)
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    for key in given:
        _refuse_bad_value(tree, key, provenance)  # before the flag hides it
    for key, value in given.items():
        _set(tree, key, _fitted(key, value), provenance, "flag")
    resolved = _validated(tree, provenance)
    return ResolvedRecipe(resolved, source, recipe_hash(resolved), provenance)


def recipe_hash(recipe: Recipe) -> str:
    """First 8 hex digits of the SHA-256 of everything but `track`, `sweep` and `distributed`.

    A `lora` section at its defaults, contiguous groups, no compensation, no distillation and no sequences beyond the
    model's positions leave no trace: nothing reads them, and recipes from before they existed keep their hash.
    """
    without = {"track", "sweep", "distributed"} | ({"lora"} if recipe.lora == LoraSection() else set())
    content = recipe.model_dump(mode="json", exclude=without)
    if not content["model"]["beyond_positions"]:
        del content["model"]["beyond_positions"]
    routing, compensation = content["routing"], content["compensation"]
    if routing["grouping"] == "contiguous":
        del routing["grouping"]
    if not content["train"]["distill"]:
        del content["train"]["distill"]
    if not compensation["mean"] and not compensation["rank"]:
        del content["compensation"]
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:8]


def dump(recipe: Recipe) -> str:
    """The whole recipe as YAML, without `sweep`, `distributed` and `model.beyond_positions` where these say nothing.

    `load_text` brings it back.
    """
    without: dict[str, Any] = {"sweep": True} if recipe.sweep == SweepSection() else {}
    if recipe.distributed == DistributedSection():
        without["distributed"] = True
    if not recipe.model.beyond_positions:
        without["model"] = {"beyond_positions"}
    return dump_yaml(recipe.model_dump(mode="json", exclude=without))


def load_text(text: str, name: str = "recipe") -> Recipe:
    """Validates the text of a stored recipe (`recipe.yaml` of a run or checkpoint); `name` is for the error."""
    tree = as_stored(parse_mapping(text, name))
    provenance = dict.fromkeys(leaves(tree), name)
    check_keys(tree, name)
    return _validated(tree, provenance)


def _validated(tree: Tree, provenance: Mapping[str, str]) -> Recipe:
    refuse_odd_numbers(tree, provenance)
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise_usage_error(error, tree, provenance)


def _refuse_bad_value(tree: Tree, key: str, provenance: Mapping[str, str]) -> None:
    """Refuses what a tree says under one key, if it says something that the key does not take."""
    section, _, name = key.partition(".")
    part = tree.get(section)
    if key in provenance and isinstance(part, dict) and name in part:
        alone = {section: {name: part[name]}}
        refuse_odd_numbers(alone, provenance)
        try:
            Recipe.model_validate(alone)
        except ValidationError as error:
            if any(item["loc"][:2] == (section, name) for item in error.errors()):  # not a rule over several keys
                raise_usage_error(error, alone, provenance)


def load_stored(path: Path) -> Recipe:
    """The recipe that a run or checkpoint stored."""
    return load_text(recipe_text(path), str(path))


def _apply_override(tree: Tree, override: str, provenance: dict[str, str]) -> None:
    if override.startswith("~"):
        _unset(tree, override[1:], provenance)
        return
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals:
        raise UsageError(f"The override {override!r} is neither key=value nor ~key.")
    known = known_key(key)
    if known is None:
        if key in section_keys():
            raise UsageError(f"{key} is a section; set one of its keys ({keys_of(key)}).")
        raise UsageError(f"Unknown key {key} in {override!r}; {suggestion(key)}")
    try:
        value = parse_value(text)
    except (yaml.YAMLError, ValueError):
        value = text  # the field's own check says what is valid
    if known == key:
        field_info = recipe_keys()[key]
        takes_text = accepts(field_info, str) and not accepts(field_info, int)
        if takes_text and value is not None and not isinstance(value, (str, list)):
            value = text.strip()  # a revision such as 1234567 or 12e4 is a text
        if value is None and not text.strip() and accepts(field_info, tuple):
            value = []
        value = _fitted(key, value)
    _set(tree, key, value, provenance, "command line")


def _fitted(key: str, value: object) -> object:
    """A lone text for a list of texts becomes that list: `eval.tasks=piqa,boolq`, `--tasks paper`."""
    field_info = recipe_keys().get(key)
    if field_info is None:
        raise UsageError(f"Unknown key {key}; {suggestion(key)}")
    takes_text = accepts(field_info, str)
    if isinstance(value, str) and accepts(field_info, tuple) and not takes_text:
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, (list, tuple)) and takes_text and len(value) == 1:
        return value[0]
    return value


def _set(tree: Tree, key: str, value: object, provenance: dict[str, str], origin: str) -> None:
    *parents, last = key_path(key)
    node = tree
    for name in parents:
        child = node.get(name)
        node[name] = dict(child) if isinstance(child, dict) else {}
        node = node[name]
    node[last] = value
    provenance[known_key(key) or key] = origin


def _unset(tree: Tree, key: str, provenance: dict[str, str]) -> None:
    if known_key(key) is None and key not in section_keys():
        raise UsageError(f"Unknown key {key} in '~{key}'; {suggestion(key)}")
    *parents, last = key_path(key)
    node: Any = tree
    for name in parents:
        node = node.get(name) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node.pop(last, None)
    for known in [k for k in provenance if k == key or k.startswith(f"{key}.")]:
        del provenance[known]

"""From axes to points: every combination of their values, each with the recipe that it stands for."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import yaml

from widecli.errors import UsageError
from widecli.recipe.dialect import parse_value
from widecli.recipe.keys import ALIASES, accepts, known_key, recipe_keys, section_keys, suggestion
from widecli.recipe.load import ResolvedRecipe, resolve
from widecli.recipe.schema import Recipe

STAGES = ("calibrate", "lora", "eval", "profile")
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"\s*({_NUMBER}):({_NUMBER}):({_NUMBER})\s*")
_RANGE_WITHOUT_STEP = re.compile(rf"\s*{_NUMBER}:{_NUMBER}\s*")
_MOST_VALUES = 1000
# What a calibration does not read: with these left out, points that differ in them alone share one calibration, and it
# has the name that `wide calibrate` gives it.
_LATER = ("lora", "eval.tasks", "eval.limit", "eval.batch_size", "eval.max_length", "eval.perplexity")
# Mean nothing in token and layer mode, where there are no groups.
_OF_GROUPS = ("routing.ffn_group_size", "routing.attention_group_size", "routing.grouping")
_NO_AXIS = ("track", "sweep")
SHORT_NAMES = {
    "routing.ffn_group_size": "G",
    "budget.sparsity": "S",
    "routing.mode": "mode",
    "compensation.mean": "means",
    "compensation.rank": "compensation rank",
    "train.seed": "seed",
    "train.steps": "steps",
}


@dataclass(frozen=True)
class Point:
    """One combination. `values` holds the axes that matter for it; `calibration` is its first stage's recipe."""

    values: Mapping[str, Any]
    resolved: ResolvedRecipe
    calibration: ResolvedRecipe


def parse_values(text: str) -> list[Any]:
    """`16,64` or `0.1:0.7:0.1` (both ends included) or both mixed, as typed values. Raises UsageError."""
    pieces = [piece.strip() for piece in text.split(",")]
    values: list[Any] = []
    for piece in pieces:
        if not piece:
            raise UsageError(f"{text!r} has an empty value: write 0.25,0.5 or start:stop:step")
        if _RANGE_WITHOUT_STEP.fullmatch(piece):
            raise UsageError(f"{piece!r} lacks its step: write start:stop:step")
        if match := _RANGE.fullmatch(piece):
            values.extend(_range(piece, *match.groups()))
            continue
        try:
            values.append(parse_value(piece))
        except (yaml.YAMLError, ValueError):
            values.append(piece)  # a glob, say
    return values


def _range(text: str, *ends: str) -> list[int | float]:
    start, stop, step = map(Decimal, ends)
    if step == 0 or (stop - start) * step < 0:
        raise UsageError(f"the range {text} has no values: write start:stop:step with a step that leads to the stop")
    count = int((stop - start) / step) + 1
    if count > _MOST_VALUES:
        raise UsageError(f"the range {text} has {count} values: take a larger step")
    whole = all(re.fullmatch(r"[-+]?\d+", end) for end in ends)
    return [int(start + i * step) if whole else float(start + i * step) for i in range(count)]


def check_axes(axes: Mapping[str, Any], where: str = "the sweep") -> dict[str, list[Any]]:
    """Axes as lists of values. Raises UsageError for a key that no recipe has, or that cannot be an axis."""
    checked: dict[str, list[Any]] = {}
    for name, values in axes.items():
        key = name if known_key(name) else ALIASES.get(name, name)
        if known_key(key) is None:
            if key in section_keys():
                raise UsageError(f"the axis {name} of {where} is a section; sweep one of its keys")
            raise UsageError(f"unknown key {name} among the axes of {where}; {suggestion(name)}")
        if key.split(".")[0] in _NO_AXIS:
            raise UsageError(f"{key} cannot be an axis of {where}: it does not change what a run measures")
        listed = parse_values(values) if isinstance(values, str) else values
        listed = list(listed) if isinstance(listed, (list, tuple)) else [listed]
        if not listed:
            raise UsageError(f"the axis {key} of {where} has no values")
        checked[key] = listed
    return checked


def check_stages(stages: Iterable[str], commands: Iterable[str]) -> tuple[str, ...]:
    """The stages in the order in which they run. Raises UsageError for one that is not, or whose command is not."""
    named = list(stages)
    for stage in named:
        if stage not in STAGES:
            raise UsageError(f"there is no stage {stage!r}: choose among {', '.join(STAGES)}")
        if stage not in commands:
            raise UsageError(f"the stage {stage} needs wide {stage}, which this version does not have; leave it out")
    if not named:
        raise UsageError(f"the sweep has no stages: choose among {', '.join(STAGES)}")
    return tuple(stage for stage in STAGES if stage in named)


def expand(
    recipe: str | None, overrides: Sequence[str], flags: Mapping[str, object], axes: Mapping[str, Sequence[Any]]
) -> list[Point]:
    """Every combination of the axes' values, the first axis slowest; combinations that come to the same are one point.

    Args:
        recipe: the recipe around the axes; None = defaults.
        overrides: `key=value` and `~key`, for every point.
        flags: dotted key -> value, for every point; None = not given.
        axes: dotted key -> values.

    Raises:
        UsageError: a key is both fixed and an axis, or a value that the recipe's schema refuses.
    """
    for key in [key_of(override) for override in overrides] + [
        key for key, value in flags.items() if value is not None
    ]:
        if key in axes:
            raise UsageError(f"{key} is both set for the whole sweep and an axis of it: give it once")
    mode = resolve(recipe, overrides, flags, "sweep").recipe.routing.mode
    points: dict[str, Point] = {}
    for combination in itertools.product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        if values.get("routing.mode", mode) in ("token", "layer"):
            values = {key: value for key, value in values.items() if key not in _OF_GROUPS}
        point = _point(recipe, overrides, flags, values)
        identity = point.resolved.recipe.model_dump_json(exclude={"track", "sweep"})
        points.setdefault(identity, point)
    return list(points.values())


def calibration_key(recipe: Recipe) -> str:
    """Equal for recipes whose calibrations are the same, whatever they say about later stages."""
    measured = {key.removeprefix("eval.") for key in _LATER if key.startswith("eval.")}
    kept = recipe.model_dump(mode="json", exclude={"track": True, "sweep": True, "lora": True, "eval": measured})
    return json.dumps(kept, sort_keys=True)


def key_of(override: str) -> str:
    """The key that an override sets or takes back."""
    return override.removeprefix("~").partition("=")[0].strip()


def _point(
    recipe: str | None, overrides: Sequence[str], flags: Mapping[str, object], values: Mapping[str, Any]
) -> Point:
    own = [f"{key}={_as_text(key, value)}" for key, value in values.items()]
    # where a sweep lies and what it spans is no part of its points
    resolved = resolve(recipe, [*overrides, *own, "~sweep", "~track.run_dir"], flags, "sweep")
    first = resolve(
        recipe,
        [*(o for o in (*overrides, *own) if not _is_later(key_of(o))), "~sweep", "~track.run_dir", "~lora"],
        {key: value for key, value in flags.items() if not _is_later(key)},
        "sweep",
    )
    if "budget.sparsity" in values and resolved.recipe.budget.kind == "parts":
        raise UsageError("budget.sparsity means nothing with budget.kind=parts: sweep budget.attention or budget.ffn.")
    return Point(values, resolved, first)


def _is_later(key: str) -> bool:
    return key in _LATER or key.split(".")[0] in _LATER


def _as_text(key: str, value: Any) -> str:
    """A value as `key=value` reads it; one text for a list of texts is a list of one."""
    field = recipe_keys().get(key)
    if isinstance(value, str) and field is not None and accepts(field, tuple) and not accepts(field, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def show(value: Any) -> str:
    """A value as a table shows it."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(show, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def heads(keys: Sequence[str]) -> list[str]:
    """The short names of axes; the whole key where two would be called alike."""
    named = [SHORT_NAMES.get(key, key.rsplit(".", 1)[-1]) for key in keys]
    return [key if named.count(name) > 1 else name for key, name in zip(keys, named, strict=True)]

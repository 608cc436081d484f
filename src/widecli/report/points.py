"""Rows -> points: one for each configuration of a model, its figures averaged over seeds, each naming its runs."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from widecli.model.plan import CompensationPlan
from widecli.recipe.keys import recipe_keys
from widecli.report.load import DENSE, figure_columns

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Figure:
    """A measured figure: the mean over the runs of one configuration, sample standard deviation where several."""

    value: float
    spread: float | None
    runs: tuple[str, ...]


@dataclass(frozen=True)
class Together:
    """Figures that may stand in one row: of one evaluation a training, what was skipped with what was measured."""

    figures: dict[str, Figure]
    runs: tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """One configuration. `extra` says what sets it apart from others of the same mode, sparsity, G and steps.

    `kind` says how it groups channels and compensates, where a model's points differ in that and it is not the default;
    `began_with` is the configuration that a second stage started from.
    """

    model: str
    stage: str
    mode: str
    sparsity: float | None
    group_size: float | None
    steps: float | None
    seeds: tuple[float, ...]
    configuration: str
    figures: dict[str, Figure]
    runs: tuple[str, ...]
    extra: str = ""
    began_with: str | None = None
    kind: str = ""
    evaluations: tuple[Together, ...] = ()

    def rows(self) -> list[Point]:
        """The point once for each thing that evaluations measured: what stands in one row comes from one of them."""
        if len(self.evaluations) == 1:
            return [replace(self, figures=self.evaluations[0].figures)]
        return [replace(self, figures=one.figures, runs=one.runs) for one in self.evaluations] or [self]

    @property
    def trained_as(self) -> str:
        """Mode and stage."""
        if self.stage == "patterns":
            return "converted patterns"
        return self.mode if self.stage in (DENSE, "calibrate") else f"{self.mode} + {self.stage}"

    @property
    def series(self) -> str:
        """What a plot's legend calls it."""
        return f"{self.trained_as}, {self.kind}" if self.kind else self.trained_as

    @property
    def grouping(self) -> str | None:
        """`clustered` or `contiguous`; None where there are no groups of channels."""
        return self.setting("plan.grouping") or "contiguous" if self.mode == "wide" else None

    @property
    def compensation(self) -> str | None:
        """What skipped groups leave, `means and rank 32` or `none`; None for a dense model."""
        if self.mode == DENSE:
            return None
        mean, rank = (self.setting(f"plan.compensation.{key}") for key in ("mean", "rank"))
        return CompensationPlan(bool(mean), rank or 0).described or "none"

    @property
    def label(self) -> str:
        """Mode, sparsity, group size, number of patterns, steps and what else is special."""
        if self.mode == DENSE:
            return DENSE
        parts = [self.series]
        if self.sparsity is not None:
            parts.append(f"S {100 * self.sparsity:.4g} %")
        if self.group_size is not None:
            parts.append(f"G {self.group_size:.0f}")
        if self.patterns is not None:
            parts.append(f"C {self.patterns:.0f}")
        if self.steps is not None:
            parts.append(f"{self.steps:.0f} steps")
        return ", ".join([*parts, *([self.extra] if self.extra else [])])

    def setting(self, key: str) -> Any:
        """What the configuration says of a key, `plan.mode`, `train.steps`; None where it says nothing."""
        return None if self.configuration == DENSE else json.loads(self.configuration).get(key)

    @property
    def patterns(self) -> float | None:
        """C, where tokens pick one of so many patterns."""
        count = self.setting("plan.patterns.count")
        return None if count is None else float(count)

    def value(self, name: str) -> float | None:
        """A figure's mean, or None where it was not measured."""
        found = self.figures.get(name)
        return found.value if found else None

    def without(self, *keys: str) -> str:
        """The configuration with some recipe keys left out: equal for points that differ in nothing else."""
        if self.configuration == DENSE:
            return DENSE
        return json.dumps({k: v for k, v in json.loads(self.configuration).items() if k not in keys}, sort_keys=True)


def points(frame: pd.DataFrame) -> list[Point]:
    """Group the rows of `load` by configuration; dense models first, then by mode, stage, sparsity, group size."""
    made: list[Point] = []
    for (model, configuration), rows in frame.groupby(["model", "configuration"], sort=False):
        described = rows[rows["command"] != "profile"]
        first = (described if len(described) else rows).iloc[0]
        if first["mode"] == "shape":
            continue  # a profile of a bare shape is no configuration: it stands in the throughput table alone
        made.append(
            Point(
                model=str(model),
                stage=str(first["stage"]),
                mode=str(first["mode"]),
                sparsity=_optional(first["sparsity"]),
                group_size=_optional(first["group_size"]),
                steps=_optional(first["steps"]),
                seeds=tuple(sorted({float(seed) for seed in rows["seed"].dropna()})),
                configuration=str(configuration),
                figures={name: figure for name in figure_columns(frame) if (figure := _figure(rows, name))},
                runs=tuple(dict.fromkeys(rows["run"])),
                began_with=next(iter(rows["began_with"].dropna()), None),
                evaluations=_evaluations(rows, figure_columns(frame)) if first["mode"] != DENSE else (),
            )
        )
    return _told_apart(sorted(_of_kinds(made), key=_order))


def _of_kinds(made: Sequence[Point]) -> list[Point]:
    """Say how points group and compensate, where those of a model that decide on groups are not all alike."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for point in made:
        if point.mode == "wide":
            kinds[point.model].add(_kind(point))
    return [
        replace(point, kind=_kind(point)) if point.mode != "wide" or len(kinds[point.model]) > 1 else point
        for point in made
    ]


def _kind(point: Point) -> str:
    """`contiguous, no compensation`: what is not as its mode has it by default."""
    if point.mode not in ("wide", "token", "layer"):
        return ""
    usual = CompensationPlan().described if point.mode == "wide" else "none"
    words = ["contiguous"] if point.grouping == "contiguous" else []
    if point.compensation != usual:
        words.append("no compensation" if point.compensation == "none" else f"compensation by {point.compensation}")
    return ", ".join(words)


def _order(point: Point) -> tuple[Any, ...]:
    mode = (point.mode != DENSE, point.mode != "wide", point.mode, point.stage, point.kind)
    return (point.model, *mode, point.sparsity or 0, point.group_size or 0, point.steps or 0)


def _figure(rows: pd.DataFrame, name: str) -> Figure | None:
    """Average over trainings, not over evaluations: of each training, the fullest evaluation that has the figure."""
    known = rows[rows[name].notna()]
    if name.startswith(("skip ", "flops ")):
        # what an evaluation saw goes before what the training ended with
        measured = known[known["command"] != known["stage"]]
        known = measured if len(measured) else known
    if not len(known):
        return None
    chosen = known.sort_values("fullness", ascending=False, kind="stable").drop_duplicates("origin")
    values = [float(value) for value in chosen[name]]
    return Figure(mean(values), stdev(values) if len(values) > 1 else None, tuple(chosen["run"]))


_MEASURED = ("perplexity ", "average ", "task ")
_BESIDE = ("validation ", "ttft ", "tpot ")


def _evaluations(rows: pd.DataFrame, names: Sequence[str]) -> tuple[Together, ...]:
    """What evaluations of a configuration measured, each training by one of them; another one has a row of its own.

    A row is for what an evaluation measured, unless another measured that among more, or on more items; a training
    whose evaluations all measured less is in it by the one that measured most. Trainings' own held-out figures and
    measured speeds, which have names of their own, stand beside each.
    """
    evaluated = rows[rows["command"] == "eval"]
    columns = {name: name.partition(" [")[0] for name in names if name.startswith(_MEASURED)}  # however many items
    measured = [
        frozenset(what for name, what in columns.items() if not math.isnan(row[name]))
        for _, row in evaluated.iterrows()
    ]
    others = rows[rows["command"] != "eval"]
    beside = {name: figure for name in names if name.startswith(_BESIDE) if (figure := _figure(rows, name))}
    found = []
    for widest in [one for one in dict.fromkeys(measured) if not any(one < more for more in measured)]:
        within = evaluated[[one <= widest for one in measured]]
        sizes = [len(one) for one in measured if one <= widest]
        ordered = within.assign(size=sizes).sort_values(["size", "fullness"], ascending=False, kind="stable")
        chosen = ordered.drop_duplicates("origin")
        own = {name: figure for name in names if not name.startswith(_BESIDE) if (figure := _figure(chosen, name))}
        found.append(Together(own | beside, tuple(dict.fromkeys([*chosen["run"], *others["run"]]))))
    return tuple(found)


def _optional(value: Any) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def _told_apart(made: Sequence[Point]) -> list[Point]:
    """Give points of the same label an `extra` that names the recipe keys in which they differ."""
    alike: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in made:
        alike[point.model, point.label].append(point)
    extra: dict[int, str] = {}
    for same in alike.values():
        if len(same) == 1:
            continue
        settings = [json.loads(point.configuration) for point in same]
        keys = sorted({key for one in settings for key in one})
        differing = [key for key in keys if len({json.dumps(one.get(key)) for one in settings}) > 1]
        for point, one in zip(same, settings, strict=True):
            words = [_difference(key, one.get(key), [other.get(key) for other in settings]) for key in differing]
            extra[id(point)] = ", ".join(word for word in words if word)
    return [replace(point, extra=extra.get(id(point), "")) for point in made]


def _difference(key: str, value: Any, values: Sequence[Any]) -> str:
    """What a point says about a key in which others differ; nothing where it has the recipe's default."""
    section, _, name = key.rpartition(".")
    name = name.replace("_", " ")
    if section == "compensation":
        name = f"{section} {name}"
    if isinstance(value, list):
        shared = set.intersection(*(set(map(str, other)) for other in values if isinstance(other, list)))
        added = [_last_folders(str(item)) for item in value if str(item) not in shared]
        return f"{name} +{' +'.join(added)}" if added else ""
    if value is None or (key in recipe_keys() and recipe_keys()[key].default == value):
        return ""
    if value is True:
        return name
    return f"{name} {_last_folders(f'{value:g}' if isinstance(value, float) else str(value))}"


def _last_folders(text: str) -> str:
    return "/".join(PurePath(text).parts[-2:]) if "/" in text else text


def by_model(made: Iterable[Point]) -> dict[str, list[Point]]:
    """Points of different models are never compared: one list each."""
    groups: dict[str, list[Point]] = defaultdict(list)
    for point in made:
        groups[point.model].append(point)
    return dict(groups)


def names_of(made: Iterable[Point], prefix: str) -> list[str]:
    """The figures beginning with `prefix` that at least one point has, the most frequent first."""
    counts: dict[str, int] = defaultdict(int)
    for point in made:
        for name in point.figures:
            if name.startswith(prefix):
                counts[name] += 1
    return sorted(counts, key=lambda name: (-counts[name], len(name), name))


def best_protocol(point: Point, kind: str) -> str | None:
    """The fullest protocol under which a point has `kind` (`average`): `average [all]` before `average [400]`."""
    names = [name for name in point.figures if name.startswith(f"{kind} [")]
    return min(names, key=fullness_order, default=None)


def fullness_order(name: str) -> tuple[bool, bool, float]:
    """Sorts `average [all]` before `average [400]` before an average of a few tasks."""
    items = items_of(name)
    limit = items.rsplit(", ", 1)[-1]
    return (", " in items, limit != "all", -float(limit) if limit.isdecimal() else 0.0)


def items_of(name: str) -> str:
    """`average [400]` -> `400`."""
    return name.partition("[")[2].rstrip("]")

"""Runs that differ in one setting: along sparsity, along the group size, and what profiles measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from widecli.report.find import StoredRun
from widecli.report.load import DENSE, number
from widecli.report.points import Point

Axis = Literal["sparsity", "group_size"]
# What moves with an axis: the recipe's key, and the plan's copy of it.
_KEYS: dict[Axis, tuple[str, ...]] = {
    "sparsity": ("budget.sparsity", "budget.attention", "budget.ffn"),
    "group_size": ("routing.ffn_group_size", "plan.ffn_group_size"),
}
_TITLES: dict[Axis, str] = {"sparsity": "sparsity", "group_size": "group size G, channels"}


@dataclass(frozen=True)
class Sweep:
    """Lines of configurations along one axis: (name, points by rising value), two values or more on each."""

    model: str
    axis: Axis
    lines: tuple[tuple[str, tuple[Point, ...]], ...]

    @property
    def title(self) -> str:
        """The axis in words."""
        return _TITLES[self.axis]

    def value(self, point: Point) -> float | None:
        """Where a point lies on the axis."""
        return point.sparsity if self.axis == "sparsity" else point.group_size


def sweeps(made: Sequence[Point]) -> list[Sweep]:
    """The sweeps among one model's points: configurations equal in everything but the axis."""
    found = []
    axes: tuple[Axis, ...] = ("sparsity", "group_size")
    for axis in axes:
        lines: dict[str, list[Point]] = defaultdict(list)
        for point in made:
            value = point.sparsity if axis == "sparsity" else point.group_size
            if point.mode != DENSE and value is not None:
                lines[point.without(*_KEYS[axis])].append(point)
        kept = []
        for points in lines.values():
            values = {point.sparsity if axis == "sparsity" else point.group_size for point in points}
            if len(values) > 1:
                ordered = sorted(points, key=lambda p: (p.sparsity if axis == "sparsity" else p.group_size) or 0.0)
                kept.append((_line_name(points[0], axis), tuple(ordered)))
        if kept:
            found.append(Sweep(made[0].model, axis, tuple(kept)))
    return found


def _line_name(point: Point, axis: Axis) -> str:
    parts = [point.series]
    if axis != "sparsity" and point.sparsity is not None:
        parts.append(f"S {100 * point.sparsity:.4g} %")
    if axis != "group_size" and point.group_size is not None:
        parts.append(f"G {point.group_size:.0f}")
    if point.patterns is not None:
        parts.append(f"C {point.patterns:.0f}")
    if point.steps is not None:
        parts.append(f"{point.steps:.0f} steps")
    return ", ".join([*parts, *([point.extra] if point.extra else [])])


@dataclass(frozen=True)
class ThroughputPoint:
    """One setting that a profile run measured; times in milliseconds (medians), `speedup` = dense / routed.

    `transformers_ms`: the same dense model through Hugging Face, where it was compared. `library`: the dense model's
    products of one row were the library's, not the own kernels'. `compensation`: what is added for skipped groups.
    `machine`: device and dtype.
    """

    model: str
    run: str
    phase: str
    batch: float | None
    prompt: float | None
    gen: float | None
    sparsity: float | None
    group_size: float | None
    masks: str
    dense_ms: float | None
    routed_ms: float | None
    speedup: float
    transformers_ms: float | None = None
    mode: str | None = None
    patterns: float | None = None
    compensation: str | None = None
    library: bool = False
    machine: str = ""

    @property
    def label(self) -> str:
        """The setting in one line."""
        sparsity = "" if self.sparsity is None else f", S {100 * self.sparsity:.4g} %"
        setting = f"batch {self.shown('batch')}, prompt {self.shown('prompt')}{sparsity}"
        patterns = "" if self.patterns is None else f", {self.patterns:g} patterns"
        compensation = "" if self.compensation is None else f", {self.compensation}"
        baseline = ", dense by the library" if self.library else ""
        return f"{self.phase.upper()}, {setting}{patterns}, {self.masks} masks{compensation}{baseline}"

    @property
    def times(self) -> str:
        """Both medians."""
        if self.dense_ms is None or self.routed_ms is None:
            return ""
        return f"dense {self.dense_ms:.2f} ms, routed {self.routed_ms:.2f} ms"

    def shown(self, key: str) -> str:
        """A setting's value for people."""
        value = getattr(self, key)
        if value is None:
            return "?"
        return f"{100 * value:.4g} %" if key == "sparsity" else f"{value:g}"


CURVE = 3
"""How many shares of skipping make a curve."""


def share_curves(measured: Iterable[ThroughputPoint]) -> list[tuple[ThroughputPoint, ...]]:
    """The points of one run that differ in nothing but the share they skip, by rising share, `CURVE` or more each."""
    curves: dict[tuple[object, ...], dict[float, ThroughputPoint]] = defaultdict(dict)
    for point in measured:
        if point.sparsity is not None:
            sizes = (point.phase, point.batch, point.prompt, point.gen if point.phase == "tpot" else None)
            made = (point.masks, point.mode, point.group_size, point.patterns, point.compensation)
            curves[*sizes, *made, point.run][point.sparsity] = point
    found = [tuple(by_share[share] for share in sorted(by_share)) for by_share in curves.values()]
    kept = [curve for curve in found if len(curve) >= CURVE]
    return sorted(kept, key=lambda c: (c[0].phase == "tpot", c[0].batch or 0, c[0].prompt or 0, c[0].group_size or 0))


def throughput(runs: Iterable[StoredRun], models: Mapping[str, str]) -> list[ThroughputPoint]:
    """The points of all profile runs that hold a speed-up; `models` maps a run's label to its model's name."""
    found = []
    for run in runs:
        if run.command != "profile":
            continue
        library, machine = by_library(run.summary), _machine(run)
        for point in run.summary.get("points") or []:
            speedup = number(point.get("speedup"))
            if speedup is not None:
                found.append(_throughput_point(point, run.label, models[run.label], speedup, library, machine))
    return sorted(found, key=_order)


def _order(point: ThroughputPoint) -> tuple[str | float, ...]:
    sizes = (point.prompt, point.batch, point.patterns, point.sparsity, point.group_size)
    return (point.model, point.phase, *(size or 0.0 for size in sizes), point.compensation or "")


def compensation_of(point: Mapping[str, Any]) -> str | None:
    """What a profile's point adds for skipped groups, in words; None for nothing, as in all records of old."""
    made = point.get("compensation")
    if not isinstance(made, Mapping):
        return None
    parts = ["means"] if made.get("mean") else []
    return " and ".join([*parts, *([f"rank {made['rank']}"] if made.get("rank") else [])])


def by_library(summary: Mapping[str, Any]) -> bool:
    """Whether a profile's dense products of one row were the library's."""
    settings = summary.get("settings")
    return isinstance(settings, dict) and settings.get("dense") == "library"


def _machine(run: StoredRun) -> str:
    device = run.summary.get("device_name") or run.environment.get("cpu") or run.summary.get("device")
    return ", ".join(str(fact) for fact in (device, run.summary.get("dtype")) if fact)


def _throughput_point(
    point: Mapping[str, Any], run: str, model: str, speedup: float, library: bool, machine: str
) -> ThroughputPoint:
    def median(side: str) -> float | None:
        times = point.get(side)
        return number(times.get("p50_ms")) if isinstance(times, dict) else None

    return ThroughputPoint(
        model=model,
        run=run,
        phase=str(point.get("phase", "")).lower(),
        batch=number(point.get("batch")),
        prompt=number(point.get("prompt")),
        gen=number(point.get("gen")),
        sparsity=number(point.get("sparsity")),
        group_size=number(point.get("group_size")),
        masks=str(point.get("masks") or "learned"),
        dense_ms=median("dense"),
        routed_ms=median("routed"),
        speedup=speedup,
        transformers_ms=median("hugging_face"),
        mode=point.get("mode"),
        patterns=number(point.get("patterns")),
        compensation=compensation_of(point),
        library=library,
        machine=machine,
    )

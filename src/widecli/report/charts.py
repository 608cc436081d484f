"""What a plot shows, before anybody draws it: `plots.py` draws files with matplotlib, `svg.py` the page's own SVG."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from widecli.report.load import DENSE
from widecli.report.pareto import Front, qualities
from widecli.report.points import Figure, Point, best_protocol, items_of
from widecli.report.reference import PUBLISHED, Published
from widecli.report.sweeps import Sweep, ThroughputPoint, share_curves

Scale = Literal["linear", "log"]
# A step changes y before x moves on; pairs are joined two by two.
Line = Literal["none", "straight", "steps", "pairs"]
_LETTER_WIDTH, _NAME_HEIGHT = 0.0143, 0.06  # what a name beside a mark takes of a plot
_WIDE_RANGE = 4  # largest / smallest above which an axis is logarithmic


@dataclass(frozen=True)
class Mark:
    """One point of a plot; `runs` is what hovering shows."""

    x: float
    y: float
    label: str
    runs: tuple[str, ...]
    y_spread: float | None = None
    hollow: bool = False  # dominated, or published elsewhere
    note: str = ""


@dataclass(frozen=True)
class Series:
    """Marks of one colour; `line` joins them by rising x. Without `dots` a dashed line alone; `published`: in grey."""

    name: str
    marks: tuple[Mark, ...]
    line: Line = "none"
    dots: bool = True
    published: bool = False


@dataclass(frozen=True)
class Chart:
    """A plot of one question. `name` is its file's name; `percent` says which axes hold fractions."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    caption: str
    x_percent: bool = False
    y_percent: bool = False
    x_scale: Scale = "linear"
    y_scale: Scale = "linear"
    x_ticks_at_values: bool = False  # a sweep: one tick for each value tried
    named: tuple[tuple[Mark, str], ...] = ()  # marks with a text beside them
    names_below: bool = False  # on the side where a front leaves room


def slug(text: str) -> str:
    """A file name that any system takes."""
    words = "".join(c if c.isalnum() or c in "._" else "-" for c in text.lower())
    return "-".join(part for part in words.split("-") if part)


def front_chart(front: Front) -> Chart:
    """Quality against gain: a colour for each mode, dominated points hollow, the front as a line of steps."""
    colours: dict[str, list[Mark]] = {}
    named = []
    for candidate in front.candidates:
        point, winner = candidate.point, candidate.dominated_by
        mark = Mark(
            candidate.gain.value,
            candidate.quality.value,
            point.label,
            tuple(dict.fromkeys((*candidate.quality.runs, *candidate.gain.runs))),
            candidate.quality.spread,
            hollow=winner is not None,
            note=f"dominated by {winner.label}" if winner else "on the front",
        )
        colours.setdefault(point.series, []).append(mark)
        if winner is None:
            named.append((mark, _short(point)))
    series = [Series(name, tuple(marks)) for name, marks in colours.items()]
    edge = tuple(Mark(c.gain.value, c.quality.value, c.point.label, ()) for c in front.front)
    if len(edge) > 1:
        series.append(Series("front", edge, line="steps", dots=False))
    if second := _second_stages(front):
        series.append(Series("from a calibration to its second stage", second, line="pairs", dots=False))
    marks = [mark for found in colours.values() for mark in found]
    y_scale = _scale(mark.y for mark in marks)
    y_label, y_percent = quality_label(front.quality)
    return Chart(
        name=slug(f"pareto {front.model} {front.quality} {front.gain}"),
        title=f"{front.model}: {_bare(y_label)} against {_gained(front.gain)}",
        x_label=gain_label(front.gain),
        y_label=y_label,
        series=tuple(series),
        caption="Hollow: another configuration is at least as good on both axes.",
        x_percent=is_share(front.gain),
        y_percent=y_percent,
        y_scale=y_scale,
        named=_uncluttered(named, marks, y_scale),
        names_below=front.better == "lower",
    )


def _second_stages(front: Front) -> tuple[Mark, ...]:
    """Pairs of marks: what a second stage (LoRA) began with, and where it ended."""
    begun = {candidate.point.configuration: candidate for candidate in front.candidates}
    pairs = [(begun[c.point.began_with], c) for c in front.candidates if c.point.began_with in begun]
    return tuple(Mark(c.gain.value, c.quality.value, c.point.label, ()) for pair in pairs for c in pair)


def edge_styles(chart: Chart) -> dict[str, bool]:
    """The lines without dots by name; True for one to be dotted, so that it is told from the dashed one before it."""
    edges = [series.name for series in chart.series if not series.dots]
    return {name: i % 2 == 1 for i, name in enumerate(edges)}


def is_share(gain: str) -> bool:
    """Whether a gain is a fraction, shown in percent; a speed-up is none."""
    return gain.startswith("flops ")


def _gained(gain: str) -> str:
    return (
        f"FLOPs skipped, {flops_kind(gain)}" if gain.startswith("flops ") else f"{gain.split(' ')[0].upper()} speed-up"
    )


def _scale(values: Iterable[float]) -> Scale:
    low, high = min(found := list(values)), max(found)
    return "log" if low > 0 and high > _WIDE_RANGE * low else "linear"


def _uncluttered(
    named: Sequence[tuple[Mark, str]], marks: Sequence[Mark], y_scale: Scale
) -> tuple[tuple[Mark, str], ...]:
    """Without the names that would stand on an earlier one."""

    def place(mark: Mark) -> tuple[float, float]:
        return mark.x, math.log(mark.y) if y_scale == "log" else mark.y

    width, height = (max(values) - min(values) or 1.0 for values in zip(*map(place, marks), strict=True))
    kept: list[tuple[Mark, str]] = []

    def overlaps(mark: Mark, text: str, other: Mark, other_text: str) -> bool:
        (x, y), (other_x, other_y) = place(mark), place(other)
        left = text if x < other_x else other_text  # names stand on the right of their marks
        return abs(x - other_x) < _LETTER_WIDTH * len(left) * width and abs(y - other_y) < _NAME_HEIGHT * height

    for mark, text in named:
        if not any(overlaps(mark, text, *other) for other in kept):
            kept.append((mark, text))
    return tuple(kept)


def _bare(label: str) -> str:
    return label.removesuffix(" of dense").removesuffix(", %")


def _short(point: Point) -> str:
    if point.mode == DENSE:
        return DENSE
    parts = [f"S {100 * point.sparsity:.4g} %"] if point.sparsity is not None else []
    if point.group_size is not None:
        parts.append(f"G {point.group_size:.0f}")
    if point.patterns is not None:
        parts.append(f"C {point.patterns:.0f}")
    return ", ".join(parts) or point.mode


def quality_label(name: str) -> tuple[str, bool]:
    """An axis label for a quality figure, and whether it holds a fraction."""
    if name.startswith("perplexity "):
        return f"token perplexity, {name.removeprefix('perplexity ')}", False
    items = items_of(name)
    subset = ""
    if ", " in items:
        tasks, items = items.rsplit(", ", 1)
        subset = f" of {tasks}"
    count = "all items" if items == "all" else f"{items} items a task"
    if name.startswith("average "):
        return f"average accuracy{subset or ' of seven tasks'}, {count}, %", True
    return f"accuracy kept{subset}, {count}, % of dense", True


def flops_kind(gain: str) -> str:
    """`flops net at wikitext2` -> `net`."""
    return gain.split(" ")[1]


def gain_label(name: str) -> str:
    """An axis label for what is gained."""
    if name.startswith("flops "):
        cost = "net of routers and compensation" if flops_kind(name) == "net" else "gross"
        return f"prunable FLOPs skipped, {cost}, %"
    phase, *setting = name.split(" ")
    words = {"b": "batch ", "p": "prompt ", "g": "generated "}
    shown = [words[s[0]] + s[1:] if s[0] in words and s[1:].isdecimal() else s for s in setting]
    return f"measured {phase.upper()} speed-up over dense ({', '.join(shown)})"


def sweep_chart(sweep: Sweep) -> list[Chart]:
    """Kept accuracy and each perplexity along a sweep's axis, with the paper's points where they fit."""
    charts = []
    kinds: list[tuple[str, str, Callable[[Point], Figure | None]]] = []
    if any(best_protocol(point, "retention") for _, points in sweep.lines for point in points):
        kinds.append(("retention", "accuracy kept, % of dense", _kept))
    for quality in qualities([point for _, line in sweep.lines for point in line]):
        if quality.startswith("perplexity "):
            kinds.append((quality, quality_label(quality)[0], functools.partial(_named, quality)))
    for kind, label, figure in kinds:
        along = [(name, _along(sweep, points, figure)) for name, points in sweep.lines]
        series = [Series(name, marks, "straight") for name, marks in along if marks]
        if not any(len(one.marks) > 1 for one in series):
            continue
        if kind == "retention" and sweep.axis == "sparsity":
            series += _published()
        charts.append(
            Chart(
                name=slug(f"{sweep.axis} {sweep.model} {kind}"),
                title=f"{sweep.model}: {_bare(label)} by {sweep.title.split(',')[0]}",
                x_label=sweep.title + (", %" if sweep.axis == "sparsity" else ""),
                y_label=label,
                series=tuple(series),
                caption="Lines join configurations that differ in nothing else; bars are the spread over seeds.",
                x_percent=sweep.axis == "sparsity",
                y_percent=kind == "retention",
                x_scale="linear" if sweep.axis == "sparsity" else "log",
                x_ticks_at_values=True,
                y_scale=_scale(mark.y for one in series for mark in one.marks),
            )
        )
    return charts


def _named(name: str, point: Point) -> Figure | None:
    return point.figures.get(name)


def _kept(point: Point) -> Figure | None:
    name = best_protocol(point, "retention")
    return point.figures.get(name) if name else None


def _along(sweep: Sweep, points: Sequence[Point], figure: Callable[[Point], Figure | None]) -> tuple[Mark, ...]:
    marks = []
    for point in points:
        x, found = sweep.value(point), figure(point)
        if x is not None and found is not None:
            marks.append(Mark(x, found.value, point.label, found.runs, found.spread))
    return tuple(marks)


def _published() -> list[Series]:
    """The paper's retentions, hollow and named as what they are."""
    marks: dict[str, list[Mark]] = {}
    for entry in PUBLISHED:
        if entry.retention is not None:
            marks.setdefault(entry.method, []).append(_published_mark(entry, entry.retention))
    return [Series(f"published: {method}", tuple(found), published=True) for method, found in marks.items()]


def _published_mark(entry: Published, value: float) -> Mark:
    note = ", ".join(filter(None, ("published by the paper, not measured here", entry.remark)))
    return Mark(entry.sparsity, value, entry.label, (), hollow=True, note=note)


def _published_speed(phase: str) -> list[Series]:
    """The paper's end-to-end speed-ups, where it states them, with the device they are of."""
    return [
        Series(f"published: {entry.description}", (_published_mark(entry, speedup),), published=True)
        for entry in PUBLISHED
        if (speedup := entry.speedup(phase)) is not None
    ]


def throughput_chart(model: str, measured: Sequence[ThroughputPoint]) -> list[Chart]:
    """Speed-up over dense by batch size, prompt length or sparsity: whichever varies, one plot a phase.

    By sparsity, where some settings have a whole curve, only those, and the paper's figures beside.
    """
    charts = []
    axes = (("batch", "batch size"), ("prompt", "prompt, tokens"), ("sparsity", "sparsity, %"))
    for phase in ("ttft", "tpot"):
        here = [point for point in measured if point.phase == phase]
        for axis, title in axes:
            shown = [point for point in here if axis != "sparsity" or not _decided_by_one(point, here)]
            if len({getattr(point, axis) for point in shown} - {None}) < 2:
                continue
            curves = [point for curve in share_curves(shown) for point in curve] if axis == "sparsity" else []
            lines = _speed_lines(curves or shown, axis, [key for key, _ in axes if key != axis])
            charts.append(
                Chart(
                    name=slug(f"throughput {model} {phase} {axis}"),
                    title=f"{model}: {phase.upper()} speed-up by {title.split(',')[0]}",
                    x_label=title,
                    y_label=f"{phase.upper()}, dense time / routed time",
                    series=(
                        *(Series(name, marks, "straight") for name, marks in lines.items()),
                        *(_published_speed(phase) if curves else ()),
                    ),
                    caption="Above 1 the routed model is faster. Medians; dense and routed by the same code.",
                    x_percent=axis == "sparsity",
                    x_scale="linear" if axis == "sparsity" else "log",
                    x_ticks_at_values=True,
                )
            )
    return charts


def _decided_by_one(point: ThroughputPoint, among: Sequence[ThroughputPoint]) -> bool:
    """Whether a checkpoint's own decisions set the share, and there is no other checkpoint to compare it with."""
    return point.masks == "learned" and len({other.run for other in among if other.masks == "learned"}) < 2


def _speed_lines(measured: Sequence[ThroughputPoint], axis: str, others: Sequence[str]) -> dict[str, tuple[Mark, ...]]:
    """A line for each setting of the other sizes; one for each run where several measured the same."""
    groups: dict[str, list[ThroughputPoint]] = {}
    kinds = len({point.masks for point in measured})
    for point in measured:
        if getattr(point, axis) is not None:
            # what learned masks skip is not set: it differs a little from prompt to prompt
            sizes = [key for key in others if key != "sparsity" or point.masks != "learned"]
            name = ", ".join([*(f"{key} {point.shown(key)}" for key in sizes), f"G {point.shown('group_size')}"])
            if kinds > 1:
                name += f", {point.masks} masks"
            if point.patterns is not None:
                name += f", {point.patterns:g} patterns"
            if point.compensation is not None:
                name += f", {point.compensation}"
            if point.library:
                name += ", dense by the library"
            groups.setdefault(name, []).append(point)
    lines: dict[str, list[ThroughputPoint]] = {}
    for name, points in groups.items():
        repeated = len({getattr(point, axis) for point in points}) < len(points)
        for point in points:
            lines.setdefault(f"{name}, {point.run}" if repeated else name, []).append(point)
    several = {name: points for name, points in lines.items() if len({getattr(point, axis) for point in points}) > 1}
    lines = several or lines  # a lone point says nothing about the axis
    return {
        name: tuple(
            Mark(getattr(point, axis), point.speedup, point.label, (point.run,), note=point.times)
            for point in sorted(points, key=lambda point: float(getattr(point, axis)))
        )
        for name, points in lines.items()
    }

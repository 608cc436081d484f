"""Charts and heat maps as SVG inside the page: colours come from its style sheet, so light and dark both fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from widecli.report.charts import Chart, Mark, Scale, Series, edge_styles
from widecli.report.heatmap import HeatMap

WIDTH, HEIGHT = 640, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 24, 16, 46
COLOURS = 8
_SHADES = 10
_MOST_TICKS = 10


def chart_svg(chart: Chart) -> str:
    """A chart; each mark carries what hovering shows in `data-tip`."""
    xs = [_x(chart, mark) for series in chart.series for mark in series.marks]
    ys = [y for series in chart.series for mark in series.marks for y in _spread_ends(chart, mark)]
    x_ticks, place_x = _axis(xs, chart.x_scale, _LEFT, WIDTH - _RIGHT, chart.x_ticks_at_values)
    y_ticks, place_y = _axis(ys, chart.y_scale, HEIGHT - _BOTTOM, _TOP)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}">']
    for tick in x_ticks:
        x = place_x(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
        parts.append(_text(x, HEIGHT - _BOTTOM + 18, f"{tick:g}"))
    for tick in y_ticks:
        y = place_y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{tick:g}", "end"))
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 8, chart.x_label))
    parts.append(_text(14, middle, chart.y_label, extra=f'transform="rotate(-90 14 {middle:.0f})"'))
    lines, dots = [], []
    for series, css, shape in styled(chart):
        places = [(place_x(_x(chart, mark)), place_y(_y(chart, mark))) for mark in series.marks]
        lines.append(_line(series, places, css))
        if not series.dots:
            continue
        for mark, (x, y) in zip(series.marks, places, strict=True):
            if mark.y_spread:
                low, high = (place_y(end) for end in _spread_ends(chart, mark))
                lines.append(f'<line class="bar {css}" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>')
            hollow = " hollow" if mark.hollow else ""
            tip = escape(tip_of(chart, series, mark), quote=True)
            dots.append(f'<g class="mark {css}{hollow}" tabindex="0" data-tip="{tip}">{glyph(shape, x, y)}</g>')
    named = []
    for mark, text in chart.named:
        x, y = place_x(_x(chart, mark)), place_y(_y(chart, mark))
        anchor, shift = ("end", -8) if x > WIDTH - _RIGHT - 90 else ("start", 8)
        named.append(_text(x + shift, y + (16 if chart.names_below else -9), text, anchor, 'class="name"'))
    return "".join([*parts, *lines, *named, *dots, "</svg>"])


def _text(x: float, y: float, text: str, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {extra}>{escape(text)}</text>'


def legend(chart: Chart) -> str:
    """The series with their colours and shapes."""
    items = []
    for series, css, shape in styled(chart):
        if series.dots:
            hollow = " hollow" if series.marks and all(mark.hollow for mark in series.marks) else ""
            drawn = f'<g class="mark {css}{hollow}">{glyph(shape, 8, 8)}</g>'
        else:
            drawn = f'<path class="line {css}" d="M1 8H15"/>'
        items.append(f'<span><svg width="16" height="16" viewBox="0 0 16 16">{drawn}</svg>{escape(series.name)}</span>')
    return f'<div class="legend">{"".join(items)}</div>' if len(items) > 1 else ""


def styled(chart: Chart) -> list[tuple[Series, str, int]]:
    """Each series with its style class and its shape's number."""
    found: list[tuple[Series, str, int]] = []
    number = 0
    dotted = edge_styles(chart)
    for series in chart.series:
        if not series.dots:
            found.append((series, "edge dotted" if dotted[series.name] else "edge", 0))
            continue
        found.append((series, "published" if series.published else f"c{number % COLOURS}", number))
        number += 1
    return found


def tip_of(chart: Chart, series: Series, mark: Mark) -> str:
    """What hovering shows: the configuration, both values, its runs."""
    spread = f" ± {_scaled(mark.y_spread, chart.y_percent):.3g}" if mark.y_spread else ""
    lines = [
        mark.label if not series.published else f"published: {mark.label}",
        f"{chart.x_label}: {_x(chart, mark):.4g}",
        f"{chart.y_label}: {_y(chart, mark):.4g}{spread}",
    ]
    if mark.note:
        lines.append(mark.note)
    if mark.runs:
        lines.append(f"{'run' if len(mark.runs) == 1 else 'runs'}: {', '.join(mark.runs)}")
    return "\n".join(lines)


def _scaled(value: float, percent: bool) -> float:
    return 100 * value if percent else value


def _x(chart: Chart, mark: Mark) -> float:
    return _scaled(mark.x, chart.x_percent)


def _y(chart: Chart, mark: Mark) -> float:
    return _scaled(mark.y, chart.y_percent)


def _spread_ends(chart: Chart, mark: Mark) -> tuple[float, float]:
    spread = _scaled(mark.y_spread or 0.0, chart.y_percent)
    low = _y(chart, mark) - spread
    if chart.y_scale == "log" and low <= 0:
        low = _y(chart, mark)  # a bar below zero has no end on a logarithmic axis
    return low, _y(chart, mark) + spread


def _axis(
    values: Sequence[float], scale: Scale, start: float, end: float, every: bool = False
) -> tuple[list[float], Callable[[float], float]]:
    """Ticks, and the function from a value to a place between `start` and `end`."""
    low, high = min(values), max(values)
    logarithmic = scale == "log" and low > 0

    def forward(value: float) -> float:
        return math.log10(value) if logarithmic else value

    a, b = forward(low), forward(high)
    margin = 0.07 * (b - a) or (0.1 * abs(a) or 1.0)
    a, b = a - margin, b + margin

    def place(value: float) -> float:
        return start + (forward(value) - a) / (b - a) * (end - start)

    distinct = sorted(set(values))
    if every and len(distinct) <= _MOST_TICKS:
        return distinct, place
    if logarithmic:
        decades = range(math.floor(a) - 1, math.ceil(b) + 1)
        ticks = [m * 10.0**d for d in decades for m in (1, 2, 5) if a <= math.log10(m) + d <= b]
        return (ticks if len(ticks) > 1 else distinct), place
    return _round_ticks(a, b), place


def _round_ticks(low: float, high: float) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten, five or so of them."""
    rough = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough)
    return [round(i * step, 12) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _line(series: Series, places: Sequence[tuple[float, float]], css: str) -> str:
    if series.line == "none" or len(places) < 2:
        return ""
    x, y = places[0]
    path = f"M{x:.1f} {y:.1f}"
    for i, (x, y) in enumerate(places[1:], start=1):
        if series.line == "pairs" and i % 2 == 0:
            path += f"M{x:.1f} {y:.1f}"
            continue
        # steps: between two points of a front only the quality of the one with more gain can be had
        path += f"V{y:.1f}H{x:.1f}" if series.line == "steps" else f"L{x:.1f} {y:.1f}"
    return f'<path class="line {css}" d="{path}"/>'


def glyph(shape: int, x: float, y: float) -> str:
    """One of eight shapes around a place."""
    corners: tuple[tuple[tuple[float, float], ...], ...] = (
        ((-4.6, -4.6), (4.6, -4.6), (4.6, 4.6), (-4.6, 4.6)),
        ((0, -6), (5.5, 4.5), (-5.5, 4.5)),
        ((0, -6.3), (6.3, 0), (0, 6.3), (-6.3, 0)),
        ((0, 6), (5.5, -4.5), (-5.5, -4.5)),
        ((-6, 0), (4.5, -5.5), (4.5, 5.5)),
        ((6, 0), (-4.5, -5.5), (-4.5, 5.5)),
        ((-6, -2), (0, -6.5), (6, -2), (4, 5.5), (-4, 5.5)),
    )
    if shape % COLOURS == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners[shape % COLOURS - 1])
    return f'<polygon points="{points}"/>'


def heat_svg(heat: HeatMap) -> str:
    """A heat map in ten shades; the page's script finds the value under the pointer in `data-heat`."""
    columns = max(map(len, heat.values))
    cell_x = max(7.0, min(24.0, 1200 / columns))
    cell_y = 13.0
    left, top = 46.0, 6.0
    bottom = 96.0 if heat.columns_vertical else 36.0
    width, height = left + columns * cell_x + 8, top + len(heat.values) * cell_y + bottom
    parts = [
        f'<svg class="heat" viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px" role="img" '
        f'aria-label="{escape(heat.title)}" data-cell="{left},{top},{cell_x:.4f},{cell_y}">'
    ]
    family = "d" if heat.low < 0 else "h"
    for i, row in enumerate(heat.values):
        for j, value in enumerate(row):
            shade = "none" if value is None else str(_shade(value, heat.low, heat.high))
            place = f'x="{left + j * cell_x:.1f}" y="{top + i * cell_y:.1f}"'
            size = f'width="{cell_x + 0.3:.1f}" height="{cell_y + 0.3:.1f}"'  # a hair more: no seams between cells
            parts.append(f'<rect {place} {size} class="{family}{shade}"/>')
    for i in range(0, len(heat.rows), max(1, math.ceil(len(heat.rows) / 16))):
        parts.append(_text(left - 6, top + i * cell_y + 10, heat.rows[i], "end"))
    below = top + len(heat.values) * cell_y
    for j in range(0, columns, 1 if heat.columns_vertical else max(1, math.ceil(columns / 16))):
        x = left + (j + 0.5) * cell_x
        if heat.columns_vertical:
            turned = f'transform="translate({x + 3:.1f} {below + 5:.1f}) rotate(90)"'
            parts.append(f'<text class="word" {turned}>{escape(heat.columns[j])}</text>')
        else:
            parts.append(_text(x, below + 14, heat.columns[j]))
    parts.append(_text(left + columns * cell_x / 2, height - 6, heat.x_label))
    return "".join([*parts, "</svg>"])


def _shade(value: float, low: float, high: float) -> int:
    return max(0, min(_SHADES - 1, int((value - low) / (high - low) * _SHADES)))

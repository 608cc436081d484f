"""Draws charts and heat maps as PNG or SVG files with matplotlib (the extra `plots`)."""

from __future__ import annotations

import importlib.util
import io
import math
import textwrap
from typing import TYPE_CHECKING, Any

from widecli.report.charts import Chart, Mark, Series, edge_styles

if TYPE_CHECKING:
    from widecli.report.heatmap import HeatMap

INSTALL = "pip install 'widecli[plots]'"
# Okabe and Ito's colours without the yellow, which vanishes on white: told apart by colour-blind readers too.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7a5195", "#8c6d1f")
PUBLISHED_COLOUR = "#777777"
_MOST_TICKS = 10
_CAPTION_WIDTH = 128  # characters of a line below a plot
_TITLE_WIDTH = 66  # of a line above it
_HEIGHT = 4.4
_LINE = 0.03  # of that
_LEGEND_ROW = 0.17
_MOST_INSIDE = 8  # names in a plot; more stand below it
SHAPES = ("o", "s", "^", "D", "v", "P", "X", "*")


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(chart: Chart, kind: str) -> bytes:
    """One chart as `png` or `svg`."""
    lines = textwrap.wrap(chart.caption, _CAPTION_WIDTH) or [""]
    named = len([series for series in chart.series if series.marks])
    many = named > _MOST_INSIDE
    height = _HEIGHT + (_LEGEND_ROW * math.ceil(named / 2) if many else 0)
    figure, axes = _figure((6.4, height), below=_LINE * len(lines) * _HEIGHT / height)
    colours = 0
    dotted = edge_styles(chart)
    for series in chart.series:
        if not series.dots:
            _edge(axes, chart, series, ":" if dotted[series.name] else "--")
            continue
        colour = PUBLISHED_COLOUR if series.published else PALETTE[colours % len(PALETTE)]
        _series(axes, chart, series, colour, SHAPES[colours % len(SHAPES)])
        colours += 1
    if chart.x_scale == "log":
        _log_axis(axes, "x")
    if chart.y_scale == "log":
        _log_axis(axes, "y")
    values = sorted({_scaled(chart, mark)[0] for series in chart.series for mark in series.marks})
    if chart.x_ticks_at_values and len(values) <= _MOST_TICKS:
        axes.set_xticks(values, [f"{value:g}" for value in values])
    for mark, text in chart.named:
        shift = (5, -11 if chart.names_below else 6)
        axes.annotate(text, _scaled(chart, mark), shift, textcoords="offset points", fontsize=7.5, color="#444444")
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.set_title(textwrap.fill(chart.title, _TITLE_WIDTH), fontsize=11, loc="left")
    axes.grid(True, color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.margins(x=0.09, y=0.1)
    if many:
        axes.legend(fontsize=7, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.6 / _HEIGHT))
    elif named > 1:
        axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.text(0.01, 0.005, "\n".join(lines), fontsize=6.5, color="#666666")
    return _bytes(figure, kind)


def _figure(size: tuple[float, float], below: float = _LINE) -> tuple[Any, Any]:
    """A figure and its axes; the share `below` of its height stays free for a caption."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=150, layout="constrained")  # no pyplot: no global state, no display
    figure.get_layout_engine().set(rect=(0, below, 1, 1 - below))  # type: ignore[union-attr, call-arg]
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _bytes(figure: Any, kind: str) -> bytes:
    import matplotlib

    out = io.BytesIO()
    # the same runs give the same file: no date, and ids from a fixed salt
    with matplotlib.rc_context({"svg.hashsalt": "wide"}):
        figure.savefig(out, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": "wide report"})
    return out.getvalue()


def _scaled(chart: Chart, mark: Mark) -> tuple[float, float]:
    return mark.x * (100 if chart.x_percent else 1), mark.y * (100 if chart.y_percent else 1)


def _edge(axes: Any, chart: Chart, series: Series, dashes: str) -> None:
    """A dashed line; in steps it is a front: what a configuration with at least that gain reaches."""
    xs, ys = zip(*(_scaled(chart, mark) for mark in series.marks), strict=True)
    style = {"color": "#888888", "linewidth": 1, "linestyle": dashes, "label": series.name, "zorder": 1}
    if series.line == "steps":
        axes.step(xs, ys, where="pre", **style)
        return
    step = 2 if series.line == "pairs" else len(xs)
    for i in range(0, len(xs), step):
        axes.plot(xs[i : i + step], ys[i : i + step], **(style if i == 0 else {**style, "label": None}))


def _series(axes: Any, chart: Chart, series: Series, colour: str, shape: str) -> None:
    places = [_scaled(chart, mark) for mark in series.marks]
    if series.line == "straight":
        axes.plot(*zip(*places, strict=True), color=colour, linewidth=1.2, zorder=2)
    for hollow in (False, True):
        some = [place for place, mark in zip(places, series.marks, strict=True) if mark.hollow is hollow]
        if some:
            xs, ys = zip(*some, strict=True)
            face = "none" if hollow else colour
            axes.scatter(xs, ys, s=34, marker=shape, facecolors=face, edgecolors=colour, linewidths=1.3, zorder=3)
    for (x, y), mark in zip(places, series.marks, strict=True):
        if mark.y_spread:
            spread = mark.y_spread * (100 if chart.y_percent else 1)
            axes.errorbar(x, y, yerr=spread, color=colour, linewidth=1, capsize=2.5, zorder=2)
    hollow_only = all(mark.hollow for mark in series.marks)
    axes.scatter([], [], marker=shape, color=colour, facecolors="none" if hollow_only else colour, label=series.name)


def _log_axis(axes: Any, name: str) -> None:
    """Plain numbers instead of powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, StrMethodFormatter

    axis = getattr(axes, f"{name}axis")
    getattr(axes, f"set_{name}scale")("log")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def draw_heat_map(heat: HeatMap, kind: str) -> bytes:
    """One heat map as `png` or `svg`: light = skipped, dark = run."""
    import numpy as np

    rows, columns = len(heat.values), max(map(len, heat.values))
    size = (max(5.0, min(16.0, 1.6 + 0.13 * columns)), max(2.4, min(9.0, 1.4 + 0.16 * rows)))
    figure, axes = _figure(size)
    grid = np.full((rows, columns), np.nan)
    for i, row in enumerate(heat.values):
        grid[i, : len(row)] = [np.nan if value is None else value for value in row]
    image = axes.imshow(
        grid, aspect="auto", cmap=heat.colours, vmin=heat.low, vmax=heat.high, interpolation="nearest", origin="upper"
    )
    step = math.ceil(rows / 16)
    axes.set_yticks(range(0, rows, step), [heat.rows[i] for i in range(0, rows, step)], fontsize=7)
    if heat.columns_vertical:
        axes.set_xticks(range(columns), [_drawable(label) for label in heat.columns], rotation=90, fontsize=5.5)
    else:
        step = math.ceil(columns / 16)
        axes.set_xticks(range(0, columns, step), [heat.columns[i] for i in range(0, columns, step)], fontsize=7)
    axes.set_xlabel(heat.x_label)
    axes.set_ylabel(heat.y_label)
    axes.set_title(textwrap.fill(heat.title, _TITLE_WIDTH), fontsize=10, loc="left")
    figure.colorbar(image, ax=axes, label=heat.value_label, fraction=0.03, pad=0.01)
    return _bytes(figure, kind)


def _drawable(label: str) -> str:
    """matplotlib reads a dollar sign as mathematics."""
    return label.replace("$", r"\$")

"""One page that needs nothing else: tables that sort, plots that say which run a point is, light and dark.

The page forbids itself the network by its content policy; script and style stand inside it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

from widecli.report.charts import Chart
from widecli.report.heatmap import HeatMap
from widecli.report.points import Figure
from widecli.report.svg import chart_svg, heat_svg, legend
from widecli.report.tables import Column, Table, shown, value_of

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_LONG_TEXT = 18


@dataclass(frozen=True)
class Lines:
    """Sentences, one below the other."""

    lines: tuple[str, ...]


Block = Table | Chart | HeatMap | Lines


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it, in order; neighbouring charts share a row."""

    title: str
    blocks: tuple[Block, ...]


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole document. Runs named in a table link to the row of that run in the table `runs`, where there is one."""
    tables = [block for section in sections for block in section.blocks if isinstance(block, Table)]
    linked = {name for table in tables if table.name == "runs" for runs in table.row_runs for name in runs}
    body = "".join(_section(section, linked) for section in sections)
    style, script = (_asset(name) for name in ("page.css", "page.js"))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f'<link rel="icon" href="data:,">\n<style>\n{style}</style>\n</head>\n<body>\n'
        f'<header><h1>{escape(title)}</h1><button class="theme" type="button">light / dark</button></header>\n'
        f'<p class="soft">{escape(lead)}</p>\n{body}<div id="tip" role="status"></div>\n'
        f"<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return resources.files("widecli.report").joinpath(name).read_text(encoding="utf-8")


def _section(section: Section, linked: set[str]) -> str:
    parts = [f"<section>\n<h2>{escape(section.title)}</h2>\n"]
    charts: list[str] = []
    for block in [*section.blocks, None]:
        if isinstance(block, Chart):
            charts.append(_chart(block))
            continue
        if charts:
            parts.append(f'<div class="charts">\n{"".join(charts)}</div>\n')
            charts = []
        if isinstance(block, Table):
            parts.append(table_html(block, linked, titled=block.title != section.title))
        elif isinstance(block, HeatMap):
            parts.append(_heat_map(block))
        elif isinstance(block, Lines):
            items = "".join(f"<li>{escape(line)}</li>" for line in block.lines)
            parts.append(f'<ul class="lines soft">{items}</ul>\n')
    return "".join([*parts, "</section>\n"])


def _chart(chart: Chart) -> str:
    return (
        f"<figure>\n<h3>{escape(chart.title)}</h3>\n{legend(chart)}\n{chart_svg(chart)}\n"
        f"<figcaption>{escape(chart.caption)}</figcaption>\n</figure>\n"
    )


def _heat_map(heat: HeatMap) -> str:
    rounded = [[None if value is None else round(value, 3) for value in row] for row in heat.values]
    data = {
        "x": heat.x_label,
        "y": heat.y_label,
        "label": heat.value_label,
        "rows": heat.rows,
        "columns": heat.columns,
        "values": rounded,
    }
    # "</" would end the element early, whatever stands inside
    stored = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    family = "d" if heat.low < 0 else "h"
    cells = "".join(f'<rect x="{12 * i}" width="12" height="10" class="{family}{i}"/>' for i in range(10))
    scale = f'<span class="scale">{heat.low:g}<svg viewBox="0 0 120 10">{cells}</svg>{heat.high:g}</span>'
    return (
        f'<figure class="wide">\n<h3>{escape(heat.title)}</h3>\n'
        f'<p class="soft">{escape(heat.value_label)} {scale}</p>\n'
        f'{heat_svg(heat)}<script type="application/json">{stored}</script>\n'
        f"<figcaption>{escape(heat.caption)}</figcaption>\n</figure>\n"
    )


def table_html(table: Table, linked: set[str], titled: bool = True) -> str:
    """A table whose heads sort it. Cells carry their bare value in `data-v`."""
    heads = "".join(
        f'<th scope="col" class="{_css(column)}"><button type="button">{escape(column.head)}</button></th>'
        for column in table.columns
    )
    rows = []
    names = table.row_runs or ((),) * len(table.rows)
    for row, runs in zip(table.rows, names, strict=True):
        anchor = f' id="run-{escape(runs[0], quote=True)}"' if table.name == "runs" and runs else ""
        cells = []
        for column in table.columns:
            value = row.get(column.key)
            head = f' data-h="{escape(column.head.replace(chr(10), " "), quote=True)}"'  # where a row is a list
            if column.key == "runs" and runs:
                cells.append(f'<td class="text runs"{head}><span>{_runs(runs, linked)}</span></td>')
                continue
            bare = value_of(value)
            sort = f' data-v="{bare!r}"' if isinstance(bare, float) else ""
            tip = ""
            if isinstance(value, Figure):
                tip = f' title="{escape(", ".join(value.runs), quote=True)}"'
            text = shown(value, column.kind)
            css = _css(column) + (" long" if column.kind == "text" and len(text) > _LONG_TEXT else "")
            cells.append(f'<td class="{css}"{head}{sort}{tip}>{escape(text)}</td>')
        rows.append(f"<tr{anchor}>{''.join(cells)}</tr>\n")
    title = f"<h3>{escape(table.title)}</h3>\n" if titled else ""
    caption = f'<p class="soft">{escape(table.caption)}</p>\n' if table.caption else ""
    return (
        f'{title}<div class="scroll"><table data-name="{escape(table.name, quote=True)}">\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{''.join(rows)}</tbody></table></div>\n{caption}"
    )


def _css(column: Column) -> str:
    return "text" if column.kind == "text" else "number"


def _runs(runs: Sequence[str], linked: set[str]) -> str:
    """All runs by name, those with a row of their own as links; several are folded."""
    names = [
        f'<a href="#run-{escape(name, quote=True)}">{escape(name)}</a>' if name in linked else escape(name)
        for name in runs
    ]
    if len(names) == 1:
        return names[0]
    return f"<details><summary>{len(names)} runs</summary>{', '.join(names)}</details>"

"""A table before anybody lays it out, and its text formats: Markdown, CSV, LaTeX, and rich's for a terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from widecli.report.points import Figure

if TYPE_CHECKING:
    from rich.table import Table as RichTable

Kind = Literal["text", "percent", "figure", "times", "count", "rate", "ms"]
Value = str | float | Figure | None


@dataclass(frozen=True)
class Column:
    """One column. `importance` 0 stays on every terminal; the highest number goes first when space is short."""

    key: str
    head: str
    kind: Kind = "text"
    importance: int = 0


@dataclass(frozen=True)
class Table:
    """Rows by column key; an absent key is an empty cell. `row_runs` names the runs behind each row."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Value], ...]
    caption: str = ""
    row_runs: tuple[tuple[str, ...], ...] = field(default=())

    def filled(self) -> Table:
        """Without the columns in which no row has anything."""
        columns = tuple(c for c in self.columns if any(row.get(c.key) not in (None, "") for row in self.rows))
        return Table(self.name, self.title, columns, self.rows, self.caption, self.row_runs)


def value_of(value: Value) -> str | float | None:
    """The bare value, for sorting and for programs."""
    return value.value if isinstance(value, Figure) else value


def shown(value: Value, kind: Kind) -> str:
    """A cell as people read it: percent without its sign (the head has it), the spread behind ±."""
    if isinstance(value, Figure):
        spread = "" if value.spread is None else f" ± {shown(value.spread, kind).rstrip('x')}"
        return f"{shown(value.value, kind)}{spread}"
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if kind == "percent":
        return f"{100 * value:.1f}"
    if kind == "times":
        return f"{value:.2f}x"
    if kind == "count":
        return f"{value:g}"
    if kind == "rate":
        return f"{value:,.0f}"
    return f"{value:.2f}"


def markdown(table: Table) -> str:
    """A Markdown table with its title as a heading."""
    heads = [column.head.replace("\n", " ") for column in table.columns]
    rules = ["---" if column.kind == "text" else "---:" for column in table.columns]
    lines = [f"### {table.title}", "", _pipes(heads), _pipes(rules)]
    for row in table.rows:
        lines.append(_pipes([shown(row.get(c.key), c.kind).replace("|", "\\|") for c in table.columns]))
    return "\n".join([*lines, *(["", table.caption] if table.caption else []), ""])


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def comma_separated(table: Table) -> str:
    """CSV: fractions and plain numbers, the spread in a column of its own where there is any."""
    spread = {c.key for c in table.columns for row in table.rows if _has_spread(row.get(c.key))}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    head: list[str] = []
    for column in table.columns:
        head += [column.key, *([f"{column.key} spread"] if column.key in spread else [])]
    writer.writerow(head)
    for row in table.rows:
        cells: list[object] = []
        for column in table.columns:
            value = row.get(column.key)
            cells.append(value_of(value))
            if column.key in spread:
                cells.append(value.spread if isinstance(value, Figure) else None)
        writer.writerow(cells)
    return out.getvalue()


def _has_spread(value: Value) -> bool:
    return isinstance(value, Figure) and value.spread is not None


_LATEX = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"},  # other signs in LaTeX's usual font encoding
    **{"±": r"$\pm$", "→": r"$\rightarrow$", "–": "--"},
}


def latex(table: Table) -> str:
    """A `table` environment with booktabs rules."""
    columns = "".join("l" if column.kind == "text" else "r" for column in table.columns)
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{_escaped(table.title)}}}", rf"\label{{tab:{table.name}}}"]
    lines += [rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    lines.append(" & ".join(_escaped(column.head.replace("\n", " ")) for column in table.columns) + r" \\")
    lines.append(r"\midrule")
    for row in table.rows:
        lines.append(" & ".join(_escaped(shown(row.get(c.key), c.kind)) for c in table.columns) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


_TEXT_WIDTHS = (34, 26, 20)
_ALWAYS_WORTH_A_SPREAD = 2  # columns above this importance go before the spreads do


def terminal(table: Table, width: int) -> RichTable:
    """For a terminal of `width` columns.

    Texts are wrapped more tightly, then the least important columns go, then the spreads, then further columns; the
    title says how many columns are missing. Those of importance 0 always stay.
    """
    from rich.console import Console

    console = Console(width=10_000)
    columns = list(table.columns)
    spread = True
    while True:
        for text_width in _TEXT_WIDTHS:
            made = _rich(table, columns, text_width, spread)
            if console.measure(made).maximum <= width:
                return made
        worst = max((column.importance for column in columns), default=0)
        if spread and worst < _ALWAYS_WORTH_A_SPREAD:
            spread = False
        elif worst == 0:
            return made
        else:
            columns.remove([column for column in columns if column.importance == worst][-1])


def _rich(table: Table, columns: Sequence[Column], text_width: int, spread: bool) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable

    dropped = len(table.columns) - len(columns)
    more = f" ({dropped} more column{'s' if dropped > 1 else ''} in the files)" if dropped else ""
    made = RichTable(
        title=table.title + more,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    for column in columns:
        text = column.kind == "text"
        made.add_column(
            column.head,
            justify="left" if text else "right",
            no_wrap=not text,
            max_width=text_width if text else None,
            overflow="fold",
        )
    for row in table.rows:
        cells = [row.get(column.key) for column in columns]
        bare = cells if spread else [value_of(cell) for cell in cells]
        made.add_row(*(shown(cell, column.kind) for cell, column in zip(bare, columns, strict=True)))
    return made

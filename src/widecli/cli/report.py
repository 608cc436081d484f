"""`wide report`: what all runs measured, as tables, plots and one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from widecli.cli import options
from widecli.cli.console import console, emit_json, note, stdout_for_document, warn
from widecli.errors import UsageError

if TYPE_CHECKING:
    from widecli.report.report import Report

Folders = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[RUNS]...",
        help="Run directories, measurements (*.json), or folders that hold some (default: runs/).",
        show_default=False,
    ),
]
Formats = Annotated[
    str | None,
    typer.Option("--format", help="html, md, csv, tex, png, svg, comma-separated (default: all).", show_default=False),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="Folder of the report (default: runs/report); an earlier report there is replaced."),
]


def report(runs: Folders = None, formats: Formats = None, out: Out = None, json: options.Json = False) -> None:
    """Render what runs recorded: summary, Pareto fronts, sweeps, training speed, the runs behind every figure.

    Runs of different models are kept apart, seeds are averaged, and the paper's own figures stand beside, labelled.
    """
    from widecli.report.report import FORMATS, build, finish, write
    from widecli.track.run import RUNS

    with stdout_for_document(json):
        wanted = chosen_formats(formats, FORMATS)
        if not runs and not RUNS.is_dir():
            raise UsageError("there is no runs/ here: name run directories, or make one with wide calibrate")
        made = build(runs or [RUNS])
        wanted = drawable(wanted, asked=formats is not None)
        target = out or RUNS / "report"
        document = finish(made, target, write(made, target, wanted))
        show(made)
        for name in ("report.html", "report.md"):
            if name in document["files"]:
                note(f"{name.rsplit('.', 1)[-1]}: {target / name}")
        count = len(document["files"])
        note(f"{count} file{'s' * (count != 1)} in {target}")
        if json:
            emit_json(document)


def chosen_formats(text: str | None, possible: Sequence[str]) -> list[str]:
    """The formats asked for, all when none is named; raises UsageError for one that is not possible."""
    names = list(possible) if text is None else [name.strip().lower() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in possible]:
        raise UsageError(f"--format {unknown[0]} does not exist: choose among {', '.join(possible)}")
    if not names:
        raise UsageError(f"--format names nothing: choose among {', '.join(possible)}")
    return list(dict.fromkeys(names))


def drawable(wanted: list[str], *, asked: bool) -> list[str]:
    """Without matplotlib: the other formats, and one sentence; an error when there are no others."""
    from widecli.report.plots import INSTALL, available

    pictures = [name for name in wanted if name in ("png", "svg")]
    if not pictures or available():
        return wanted
    others = [name for name in wanted if name not in pictures]
    sentence = f"{' and '.join(pictures)} need matplotlib, which is not installed: {INSTALL}"
    if asked and not others:
        raise UsageError(sentence)
    warn(sentence)
    return others


def show(report: Report) -> None:
    """The tables that a terminal has room for."""
    from widecli.report.scaling_view import scaling_table
    from widecli.report.summaries import (
        front_line,
        published_table,
        share_table,
        summary_table,
        sweep_table,
        tasks_table,
        throughput_table,
    )
    from widecli.report.tables import terminal

    width = console.width
    for model in report.models:
        tables = [summary_table(model.points), tasks_table(model.points)] if model.points else []
        tables += [sweep_table(sweep) for sweep in model.sweeps]
        if model.throughput:
            tables += [share_table(model.model, model.throughput), throughput_table(model.model, model.throughput)]
        for table in tables:
            if table.rows:
                console.print(terminal(table, width))
        for front in model.fronts:
            if not front.quality.startswith("average "):  # the retention says it
                note(front_line(front))
        note("")
    if report.scaling:
        console.print(terminal(scaling_table(report.scaling), width))
    console.print(terminal(published_table(), width))
    for line in report.notes:
        note(line)

"""The whole report: what `wide report` shows, writes and prints as JSON, from the folders with runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from widecli import __version__
from widecli.errors import UsageError
from widecli.report.charts import Chart, front_chart, sweep_chart, throughput_chart
from widecli.report.find import REPORT_DOCUMENT, Found, find_runs
from widecli.report.html import Lines, Section, page
from widecli.report.load import Results, load
from widecli.report.pareto import Front, fronts
from widecli.report.points import Figure, Point, by_model, points
from widecli.report.reference import PUBLISHED
from widecli.report.scaling import ScalingPoint, scaling_points
from widecli.report.scaling_view import scaling_charts, scaling_table
from widecli.report.summaries import (
    front_table,
    published_table,
    runs_table,
    share_table,
    summary_table,
    sweep_table,
    tasks_table,
    throughput_table,
)
from widecli.report.sweeps import Sweep, ThroughputPoint, sweeps, throughput
from widecli.report.tables import Table, comma_separated, latex, markdown
from widecli.storage import write_bytes, write_json, write_text

SCHEMA = "wide.report/1"
FORMATS = ("html", "md", "csv", "tex", "png", "svg")
TITLE = "wide: what was measured"


@dataclass(frozen=True)
class ModelReport:
    """Everything about one model; figures of different models never share a table or a plot."""

    model: str
    points: tuple[Point, ...]
    fronts: tuple[Front, ...]
    sweeps: tuple[Sweep, ...]
    throughput: tuple[ThroughputPoint, ...]

    def tables(self) -> list[Table]:
        """Summary, tasks, sweeps, speed, comparisons; without the empty ones."""
        made = [summary_table(self.points), tasks_table(self.points)] if self.points else []
        made += [sweep_table(sweep) for sweep in self.sweeps]
        if self.throughput:
            made += [share_table(self.model, self.throughput), throughput_table(self.model, self.throughput)]
        made += [front_table(front) for front in self.fronts]
        return [table for table in made if table.rows]

    def charts(self) -> list[Chart]:
        """Fronts, sweeps, speed. An average has no plot of its own where the retention draws the same picture."""
        kept = {(front.quality, front.gain): len(front.candidates) for front in self.fronts}
        drawn = [
            front
            for front in self.fronts
            if not front.quality.startswith("average ")
            or kept.get((front.quality.replace("average", "retention", 1), front.gain)) != len(front.candidates)
        ]
        charts = [front_chart(front) for front in drawn]
        charts += [chart for sweep in self.sweeps for chart in sweep_chart(sweep)]
        return charts + throughput_chart(self.model, self.throughput)


@dataclass(frozen=True)
class Report:
    """What was found and made of it."""

    found: Found
    results: Results
    models: tuple[ModelReport, ...]
    scaling: tuple[ScalingPoint, ...] = ()

    def tables(self) -> list[Table]:
        """Those of every model, then training speed."""
        made = [table for model in self.models for table in model.tables()]
        return made + ([scaling_table(self.scaling)] if self.scaling else [])

    def charts(self) -> list[Chart]:
        """Those of every model, then training speed."""
        return [chart for model in self.models for chart in model.charts()] + scaling_charts(self.scaling)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know, one line each."""
        several = [f"{len(self.models)} models, each with tables and plots of its own"] if len(self.models) > 1 else []
        left_out = [f"left out {skipped.path}: {skipped.reason}" for skipped in self.found.skipped]
        return (*several, *self.results.notes, *left_out)


def build(folders: Iterable[str | Path]) -> Report:
    """Read the runs and measurements among and below `folders`. Raises UsageError when there is none."""
    found = find_runs(folders)
    results = load(found.runs)
    grouped = by_model(points(results.frame))
    speeds = throughput(found.runs, dict(zip(results.frame["run"], results.frame["model"], strict=True)))
    names = list(dict.fromkeys([*grouped, *(point.model for point in speeds)]))
    scaling = tuple(scaling_points(found.documents))
    if not names and not scaling:
        count = len(found.runs) + len(found.documents)
        kinds = "calibration, evaluation, profile or training speed"
        raise UsageError(f"the {count} records found hold no {kinds} to report")
    models = []
    for name in names:
        made = grouped.get(name, [])
        here = tuple(point for point in speeds if point.model == name)
        models.append(ModelReport(name, tuple(made), tuple(fronts(made)), tuple(sweeps(made)), here))
    return Report(found, results, tuple(models), scaling)


def write(report: Report, out: Path, formats: Sequence[str]) -> list[Path]:
    """Write the report's files below `out`, replacing an earlier report there; returns their paths.

    `png` and `svg` need matplotlib. Raises UsageError for a folder that holds something else.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; name a folder with --out")
    if out.is_dir() and any(out.iterdir()) and not (out / REPORT_DOCUMENT).is_file():
        raise UsageError(f"{out} is not empty and holds no earlier report; name another folder with --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out} cannot be made ({error.strerror}): name another folder with --out") from error
    tables = report.tables()
    texts: dict[str, str] = {}
    if "html" in formats:
        texts["report.html"] = html_page(report)
    if "md" in formats:
        texts["report.md"] = markdown_page(report)
    if "tex" in formats:
        texts["report.tex"] = "% needs booktabs\n" + "\n".join(latex(table) for table in [*tables, published_table()])
    if "csv" in formats:
        texts["runs.csv"] = report.results.frame.drop(columns=["fullness"]).to_csv(index=False, lineterminator="\n")
        texts |= {f"tables/{table.name}.csv": comma_separated(table) for table in [*tables, published_table()]}
    pictures: dict[str, bytes] = {}
    drawn = [kind for kind in ("png", "svg") if kind in formats]
    if drawn:
        from widecli.report.plots import draw

        pictures = {f"plots/{chart.name}.{kind}": draw(chart, kind) for chart in report.charts() for kind in drawn}
    _drop_earlier(out)
    write_json(out / REPORT_DOCUMENT, {"schema": SCHEMA, "files": []})  # a kill from here on leaves a known folder
    for name, text in texts.items():
        write_text(out / name, text)
    for name, picture in pictures.items():
        write_bytes(out / name, picture)
    return [out / name for name in (*texts, *pictures)]


def _drop_earlier(out: Path) -> None:
    """Remove the files that the earlier report in `out` lists: tables and plots of runs that are gone."""
    import json

    try:
        listed = json.loads((out / REPORT_DOCUMENT).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    for name in listed if isinstance(listed, list) else ():
        path = out / str(name)
        if path.resolve().is_relative_to(out.resolve()) and path.is_file():
            path.unlink()


def finish(report: Report, out: Path, files: Sequence[Path]) -> dict[str, Any]:
    """Write `report.json`, which marks the folder as a report, and return it."""
    document = document_of(report)
    document |= {"out": str(out), "files": [path.relative_to(out).as_posix() for path in files]}
    write_json(out / REPORT_DOCUMENT, document)
    return document


def html_page(report: Report) -> str:
    """The page, as text."""
    sections = []
    for model in report.models:
        tables = {table.name: table for table in model.tables()}
        comparisons = [tables.pop(table.name) for table in map(front_table, model.fronts)]
        first, *rest = tables.values()
        sections.append(Section(model.model, (first, *model.charts(), *rest)))
        if comparisons:
            sections.append(Section(f"{model.model}: comparisons behind the plots", tuple(comparisons)))
    if report.scaling:
        table = scaling_table(report.scaling)
        sections.append(Section(table.title, (table, *scaling_charts(report.scaling))))
    sections.append(Section("The paper's figures", (published_table(),)))
    if report.notes:
        sections.append(Section("Notes", (Lines(report.notes),)))
    sections.append(Section("Runs", (runs_table(report.found.runs, report.found.documents),)))
    return page(TITLE, _lead(report), sections)


def markdown_page(report: Report) -> str:
    """All tables, one below the other."""
    head = f"# {TITLE}\n\n{_lead(report)}\n" + "".join(f"\n- {note}" for note in report.notes) + "\n"
    tables = [*report.tables(), published_table(), runs_table(report.found.runs, report.found.documents)]
    return "\n".join([head, *map(markdown, tables)])


def _lead(report: Report) -> str:
    runs, files = len(report.found.runs), len(report.found.documents)
    models = dict.fromkeys([*(model.model for model in report.models), *(point.model for point in report.scaling)])
    counted = [f"{n} {word}{'s' if n > 1 else ''}" for n, word in ((runs, "run"), (files, "file")) if n]
    return (
        f"{' and '.join(counted)} on {', '.join(models)}; wide {__version__}. Every figure names its runs; "
        "± is the sample standard deviation over trainings that differ in their seed alone."
    )


def document_of(report: Report) -> dict[str, Any]:
    """The report as plain data: fractions, every figure with its runs."""
    return {
        "schema": SCHEMA,
        "command": "report",
        "models": [_model_document(model) for model in report.models],
        "training_speed": [asdict(point) for point in report.scaling],
        "published": [asdict(entry) for entry in PUBLISHED],
        "runs": [{"run": run.label, "path": str(run.path), "command": run.command} for run in report.found.runs],
        "measurements": [
            {"file": document.label, "path": str(document.path), "command": document.command}
            for document in report.found.documents
        ],
        "skipped": [{"path": str(skipped.path), "reason": skipped.reason} for skipped in report.found.skipped],
        "notes": list(report.results.notes),
    }


def _model_document(model: ModelReport) -> dict[str, Any]:
    labels = {point.configuration: point.label for point in model.points}
    return {
        "model": model.model,
        "points": [
            _point_document(point) | {"began_with": labels.get(point.began_with or "")} for point in model.points
        ],
        "pareto": [_front_document(front) for front in model.fronts],
        "sweeps": [
            {"axis": sweep.axis, "lines": {name: [point.label for point in made] for name, made in sweep.lines}}
            for sweep in model.sweeps
        ],
        "throughput": [asdict(point) for point in model.throughput],
    }


def _point_document(point: Point) -> dict[str, Any]:
    keys = (
        "label",
        "stage",
        "mode",
        "sparsity",
        "group_size",
        "steps",
        "seeds",
        "grouping",
        "compensation",
        "extra",
        "runs",
    )
    return {
        **{key: getattr(point, key) for key in keys},
        "figures": {name: _figure_document(figure) for name, figure in point.figures.items()},
    }


def _figure_document(figure: Figure) -> dict[str, Any]:
    return {"value": figure.value, "spread": figure.spread, "runs": list(figure.runs)}


def _front_document(front: Front) -> dict[str, Any]:
    return {
        "quality": front.quality,
        "gain": front.gain,
        "better": front.better,
        "points": [
            {
                "point": candidate.point.label,
                "gain": _figure_document(candidate.gain),
                "quality": _figure_document(candidate.quality),
                "dominated_by": candidate.dominated_by.label if candidate.dominated_by else None,
            }
            for candidate in front.candidates
        ],
    }

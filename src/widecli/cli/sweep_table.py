"""A sweep as people see it: a table that lives while it runs, lines where nobody watches, the grid of a dry run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from widecli.cli.console import console, note, warn
from widecli.cli.cost_card import duration, time_here
from widecli.sweep.grid import heads, show
from widecli.sweep.jobs import Job, Plan, State, counted, time_left

if TYPE_CHECKING:
    from rich.console import RenderableType

    from widecli.report.tables import Table as ReportTable
    from widecli.report.tables import Value
    from widecli.sweep.grid import Point

_COLOURS = {State.DONE: "green", State.REUSED: "green", State.FAILED: "red", State.STOPPED: "yellow"}
_AROUND_ROWS = 8  # title, heading, borders, a line for what does not fit


class SweepTable:
    """Shows the plan while it runs: a live table on a terminal, one line for every change elsewhere."""

    def __init__(self, plan: Plan, slots: int) -> None:
        self._plan = plan
        self._slots = slots
        self._live = Live(get_renderable=self._table, console=console, refresh_per_second=1, transient=True)

    def __enter__(self) -> SweepTable:
        if console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if console.is_terminal:
            self._live.stop()

    def changed(self, job: Job) -> None:
        """A job's state has changed."""
        if job.state is State.FAILED:
            warn(f"{job.name} failed: {job.error}")
        elif job.state is State.WAITING and job.error:
            warn(f"{job.name} waits again: {job.error}")
        elif not console.is_terminal:
            news = _words(job) + self._left() if job.state.is_over else f"started on {job.where}"
            note(f"{job.name}: {news}")

    def _table(self) -> RenderableType:
        room = max(4, console.height - _AROUND_ROWS)
        return points_table(self._plan, f"sweep: {counted(self._plan.jobs)}{self._left()}", room)

    def _left(self) -> str:
        seconds, known = time_left(self._plan.jobs, self._slots)
        return f"; {'about' if known else 'more than'} {duration(seconds)} left" if seconds else ""


def points_table(plan: Plan, title: str, room: int | None = None) -> Group:
    """One row a point below a line: values, states of the stages. `room`: rows that fit; the busiest are kept."""
    table = Table()
    axes = varying(plan)
    for head in heads(axes):
        table.add_column(head)
    columns = plan.columns()
    for column in columns:
        table.add_column(column)
    rows = list(zip(plan.points, plan.of_point, strict=True))
    if hidden := len(rows) - room if room is not None and len(rows) > room else 0:
        order = sorted(range(len(rows)), key=lambda i: _calm(rows[i][1]))[: len(rows) - hidden]
        rows = [rows[i] for i in sorted(order)]
    for point, jobs in rows:
        table.add_row(*_shown(point, axes), *(_cell(jobs[column]) if column in jobs else "" for column in columns))
    for job in plan.common():
        if job.state is not State.REUSED and axes:
            cells = [_cell(job) if column == "eval" else "" for column in columns]
            table.add_row("dense", *[""] * (len(axes) - 1), *cells)
    return Group(Text(title), table, *([Text(f"and {hidden} more points")] if hidden else []))


def varying(plan: Plan) -> list[str]:
    """The axes that tell points apart; all of them when none does."""
    keys = list(dict.fromkeys(key for point in plan.points for key in point.values))
    return [k for k in keys if len({show(p.values.get(k, "")) for p in plan.points}) > 1] or keys


def _shown(point: Point, axes: list[str]) -> list[Text]:
    return [Text(show(point.values[key]) if key in point.values else "") for key in axes]


def _calm(jobs: dict[str, Job]) -> int:
    """0 for a row where something happens or went wrong, 1 for one that waits, 2 for one that is done."""
    states = {job.state for job in jobs.values()}
    if states & {State.RUNNING, State.FAILED, State.STOPPED}:
        return 0
    return 1 if State.WAITING in states else 2


def _cell(job: Job) -> Text:
    return Text(_words(job), style=_COLOURS.get(job.state, ""))


def _words(job: Job) -> str:
    if job.state is State.RUNNING:
        step = job.step()
        done = f", step {step}/{job.steps}" if step else ""
        time = f", {duration(job.elapsed)}" if job.elapsed >= 1 else ""  # in a queue it does not run
        return f"{job.where}{time}{done}"
    if job.state is State.DONE and job.seconds is not None:
        return f"done in {duration(job.seconds)}"
    return str(job.state)


def print_outcome(plan: Plan) -> None:
    """The table at the end, and what went wrong with its log."""
    from widecli.report.tables import terminal

    console.print(points_table(plan, f"sweep: {counted(plan.jobs)}"))
    if (results := results_table(plan)) is not None:
        console.print(terminal(results, console.width))
    took, apart, count = time_to_start(plan)
    if count > 1 and apart > took / 2:
        note(
            f"{duration(apart)} of {duration(took)} went into starting {count} processes and loading models: with more "
            "steps a run that share falls, and --jobs-per-gpu runs several at once"
        )
    for job in plan.jobs:
        if job.state is State.FAILED:
            note(f"{job.name}: {job.error}{f' (log: {job.log})' if job.log else ''}")


def results_table(plan: Plan) -> ReportTable | None:
    """What the finished runs of each point skip and keep, from their own records; None where nothing was measured."""
    from widecli.report.load import speedups
    from widecli.report.tables import Column, Table

    axes = varying(plan)
    evaluates = any(column.startswith("eval") for column in plan.columns())
    rows: list[dict[str, Value]] = []
    texts: dict[str, None] = {}
    times: dict[str, None] = {}
    for point, jobs in zip(plan.points, plan.of_point, strict=True):
        for stage in ("calibrate", "lora"):
            behind = "" if stage == "calibrate" else f" {stage}"
            trained, measured = _record(jobs.get(stage)), _record(jobs.get(f"eval{behind}"))
            if trained is None or (evaluates and f"eval{behind}" not in jobs):
                continue
            found = _kept(measured) if measured else _held_out(trained)
            texts |= dict.fromkeys(name for name in found if name.startswith("perplexity "))
            timed = speedups(_record(jobs.get(f"profile{behind}")) or {})
            times |= dict.fromkeys(timed)
            if measured and isinstance(dense := measured.get("dense"), dict) and not rows:
                rows.append({axes[0] if axes else "model": "dense", **_kept({**measured, **dense, "retention": 1.0})})
            values: dict[str, Value] = {axis: show(point.values[axis]) if axis in point.values else "" for axis in axes}
            rows.append(values | {"model": "routed", "stage": stage} | _skips(measured or trained) | found | timed)
    if not rows:
        return None
    columns = (
        *(Column(axis, head) for axis, head in zip(axes, heads(axes), strict=True)),
        *([] if axes else [Column("model", "model")]),
        *([Column("stage", "stage")] if "lora" in plan.columns() else []),
        Column("attention", "attention\nskipped, %", "percent", 3),
        Column("ffn", "FFN\nskipped, %", "percent", 3),
        Column("flops", "FLOPs\nskipped, %", "percent", 1),
        *(Column(text, text.replace(" ", "\n", 1), "figure", i + 1 if i else 0) for i, text in enumerate(texts)),
        Column("kept", "accuracy\nkept, %", "percent"),
        *(Column(name, name.replace(" ", "\n", 1), "times", 2) for name in times),
    )
    return Table("results", "what the points skip and keep", columns, tuple(rows)).filled()


def _record(job: Job | None) -> Mapping[str, Any] | None:
    """The summary of a job's finished run."""
    from widecli.track.run import Run

    done = job is not None and job.state.is_good and job.path is not None
    return Run(job.path, job.stage).summary() if done and job is not None and job.path is not None else None


def _skips(summary: Mapping[str, Any]) -> dict[str, Value]:
    from widecli.report.flops import gross_and_net

    rate = summary.get("skip_rate") or {}
    gross, net = gross_and_net(summary.get("flops_skipped") or {})
    return {"attention": rate.get("attention"), "ffn": rate.get("ffn"), "flops": gross if net is None else net}


def _kept(summary: Mapping[str, Any]) -> dict[str, Value]:
    from widecli.report.load import perplexity_name

    texts = (summary.get("perplexity") or {}).items()
    protocol = summary.get("protocol") or {}
    kept = summary.get("retention") if summary.get("tasks") else None
    return {f"perplexity {perplexity_name(key, protocol)}": value for key, value in texts} | {"kept": kept}


def _held_out(summary: Mapping[str, Any]) -> dict[str, Value]:
    """Of a training that nothing evaluated: its own held-out text."""
    validation = summary.get("validation") or {}
    final = validation.get("final")
    return {} if final is None else {f"perplexity {Path(str(validation.get('text'))).name}": final}


def time_to_start(plan: Plan) -> tuple[float, float, int]:
    """Seconds that the processes of this sweep took, those of them before and after what they were for, and how many
    processes.
    """
    took = apart = 0.0
    count = 0
    for job in plan.jobs:
        worked = (_record(job) or {}).get("seconds")
        if job.state is State.DONE and job.seconds is not None and isinstance(worked, (int, float)):
            took, apart, count = took + job.seconds, apart + max(0.0, job.seconds - worked), count + 1
    return took, apart, count


def print_grid(plan: Plan, document: dict[str, Any]) -> None:
    """The grid of a dry run with time and memory."""
    table = Table(title="dry run: nothing was loaded or written", title_justify="left")
    axes = varying(plan)
    for head in heads(axes):
        table.add_column(head)
    for heading in ("time, about", "memory, about", *plan.columns()):
        table.add_column(heading)
    for point, jobs, row in zip(plan.points, plan.of_point, document["points"], strict=True):
        seconds, memory = row["seconds_on_reference"], row["memory_bytes"]
        table.add_row(
            *_shown(point, axes),
            duration(seconds) if seconds else "",
            f"{memory / 2**30:.1f} GiB" if memory else "",
            *(_planned(jobs[column]) if column in jobs else "" for column in plan.columns()),
        )
    console.print(table)
    for job in plan.jobs:
        if job.state is State.FAILED:
            warn(f"{job.name} cannot run: {job.error}")
    note(f"{len(plan.points)} point{'s' * (len(plan.points) != 1)}, {counted(plan.jobs)}")
    if seconds := document["seconds_on_reference"]:
        time = f"{duration(seconds)} on {document['reference']}{time_here(document['flops'])}"
        note(f"training still to do takes about {time}; evaluations are not estimated")
    note(f"it would run in {document['run_dir']}")
    if "sbatch" in document:
        note(f"each run as a job of Slurm: sbatch {' '.join(document['sbatch'])}")


def _planned(job: Job) -> Text:
    words = {State.WAITING: "to do", State.REUSED: "there", State.FAILED: "cannot run"}
    return Text(words.get(job.state, str(job.state)), style=_COLOURS.get(job.state, ""))

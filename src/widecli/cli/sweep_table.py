"""A sweep as people see it: a table that lives while it runs, lines where nobody watches, the grid of a dry run."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from widecli.cli.console import console, note, warn
from widecli.cli.cost_card import duration
from widecli.sweep.grid import heads, show
from widecli.sweep.jobs import Job, Plan, State, counted, time_left

if TYPE_CHECKING:
    from rich.console import RenderableType

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
    console.print(points_table(plan, f"sweep: {counted(plan.jobs)}"))
    for job in plan.jobs:
        if job.state is State.FAILED:
            note(f"{job.name}: {job.error}{f' (log: {job.log})' if job.log else ''}")


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
        time = f"{duration(seconds)} on {document['reference']}"
        note(f"training still to do takes about {time}; evaluations are not estimated")
    note(f"it would run in {document['run_dir']}")
    if "sbatch" in document:
        note(f"each run as a job of Slurm: sbatch {' '.join(document['sbatch'])}")


def _planned(job: Job) -> Text:
    words = {State.WAITING: "to do", State.REUSED: "there", State.FAILED: "cannot run"}
    return Text(words.get(job.state, str(job.state)), style=_COLOURS.get(job.state, ""))

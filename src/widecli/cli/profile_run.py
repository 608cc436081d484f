"""Running a profile into its directory, or what is missing in one, and how the command ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from widecli.cli import options
from widecli.cli.console import note, warn
from widecli.errors import Preempted, UsageError
from widecli.signals import NOTICES, handled

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import FrameType

    from widecli.profiling.request import Request


def run_profile(
    request: Request,
    words: str,
    *,
    wandb: str | None = None,
    run_dir: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Measure into a run directory of its own, or what is missing in one; returns the summary.

    Raises WideError when another process measures into it.
    """
    from widecli.storage import held
    from widecli.track.run import directory

    if request.checkpoint and run_dir:
        options.refuse_own_directory(run_dir, request.checkpoint)
    path = directory("profile", request.run_name, run_dir)
    with held(path, warn=warn):
        kept: frozenset[tuple[int, int]] = frozenset()
        if resume and not overwrite:  # of both the run says that they do not go together
            found = standing(path, request)
            if found.finished is not None:
                note(f"{path} is finished already")
                _show(found.finished)
                return found.finished
            kept = found.kept
        return _run(request, words, kept, wandb=wandb, run_dir=run_dir, resume=resume, overwrite=overwrite)


def _run(
    request: Request,
    words: str,
    kept: frozenset[tuple[int, int]],
    *,
    wandb: str | None,
    run_dir: str | None,
    resume: bool,
    overwrite: bool,
) -> dict[str, Any]:
    """Measure what is not kept, into the run's directory."""
    from widecli.cli.cost_card import duration
    from widecli.profiling.cells import MeasuredCells
    from widecli.profiling.grid import expected_seconds
    from widecli.profiling.measurement import POINTS_SCHEMA, measure, saturation
    from widecli.track.run import Run
    from widecli.track.wandb import start_wandb

    identity = request.identity()
    recipe = request.recipe(wandb)
    remarks: list[str] = []

    def remark(message: str) -> None:
        note(message)
        if message not in remarks:
            remarks.append(message)

    if request.outline.device.type == "cpu":
        remark("no GPU: the operators compute everything and mask, so what is skipped here saves no time")
    seconds = expected_seconds(request.outline, request.settings, kept)
    note(f"about {duration(seconds)} on {request.where}, plus loading")
    subject = request.load(words)
    run = Run.create(
        "profile", request.run_name, recipe_yaml=recipe.text, run_dir=run_dir, overwrite=overwrite, resume=resume
    )
    cells = MeasuredCells(run.path, identity)
    remarks[:0] = [message for message in cells.notes if message not in remarks]
    request.bounded_by(cells)
    if not cells.points:
        run.write_environment()
    run.rewind_metrics(cells.logged)
    tracker = start_wandb(recipe.track, run, request.settings.as_dict(), warn=warn)
    note(tracker.description)
    exit_code = 1

    def done(points: list[dict[str, Any]], lacks: list[str]) -> None:
        first = cells.logged
        for point in points:
            point["run"] = str(run.path)
        cells.add(points, remarks, lacks)  # before it is told: what is told twice W&B takes once
        for logged, point in enumerate(points, first):
            figures = _figures(point)
            run.log(logged, **figures)
            tracker.log(logged, figures)

    def told_to_stop(number: int, frame: FrameType | None) -> None:
        raise Preempted(f"stopped by a signal; --resume continues {run.path}")

    try:
        with handled(NOTICES, told_to_stop):
            points = measure(subject, request.settings, note, remark, done, cells)
        most = saturation(points) if request.settings.throughput else None
        notes = [*remarks, *(words for lacks in cells.missing.values() for words in lacks)]
        measured = {"points_schema": POINTS_SCHEMA, "points": points, "throughput": most, "notes": notes}
        summary = run.write_summary({**request.facts(subject), "identity": identity, **measured})
        cells.finish()
        tracker.summarise({"points": len(points)})
        exit_code = 0
    except KeyboardInterrupt:
        note(f"{run.path} holds what was measured until now: --resume continues it")
        raise
    finally:
        run.close()
        tracker.finish(exit_code)
    _show(summary)
    note(f"run: {run.path}")
    return summary


def recorded_at(path: Path) -> Mapping[str, Any] | None:
    """The identity of the profile at `path`, finished or not, as it recorded it; None where there is none."""
    from widecli.profiling.cells import recorded
    from widecli.track.run import Run

    identity = (Run(path, "profile").summary() or {}).get("identity") or recorded(path)
    return identity if isinstance(identity, dict) else None


@dataclass(frozen=True)
class Standing:
    """What a run's directory holds of a request already: the cells to keep, and its summary when nothing is missing."""

    kept: frozenset[tuple[int, int]]
    finished: dict[str, Any] | None = None


def standing(path: Path, request: Request) -> Standing:
    """How far the run at `path` is, one that is not there too.

    Raises UsageError where something else was measured or another command ran, or where what is left does not fit in
    the memory.
    """
    from widecli.profiling import grid
    from widecli.profiling.cells import MeasuredCells, all_there, refuse_other
    from widecli.track.run import Run

    identity = request.identity()
    run = Run(path, "profile")
    summary = run.summary()
    if summary is not None and "identity" in summary:
        refuse_other(path, summary["identity"], identity)
        if not all_there(summary.get("points")) or not {"settings", "throughput"} <= set(summary):
            raise UsageError(f"{path}/summary.json is damaged; --overwrite measures everything anew.")
    cells = MeasuredCells(path, identity)
    if summary is not None and "identity" in summary and not cells.missing:
        return Standing(frozenset(grid.cells(request.settings)), summary)
    if path.is_dir() and any(path.iterdir()) and not cells.points and not run.holds_nothing:
        raise UsageError(
            f"{path} holds nothing that wide profile could continue; name another directory with --run-dir, or replace "
            "it with --overwrite if it is a profile's."
        )
    request.check(cells.kept)
    return Standing(cells.kept)


def _figures(point: dict[str, Any]) -> dict[str, Any]:
    """What a metrics line says of a point."""
    phase = point["phase"]
    figures = {f"{phase} {key}": point[key] for key in ("batch", "prompt", "sparsity", "group_size")}
    compensation = point["compensation"]
    figures[f"{phase} compensation_rank"] = None if compensation is None else compensation["rank"]
    figures |= {f"{phase} {side}": point[side]["p50_ms"] for side in ("dense", "routed")}
    return figures | {f"{phase} speedup": point["speedup"]}


def _show(summary: dict[str, Any]) -> None:
    from widecli.cli.profile_tables import print_breakdown, print_points, print_saturation

    points, settings = summary["points"], summary["settings"]
    print_points(points, summary["model"], settings["masks"])
    if settings["breakdown"]:
        print_breakdown(points)
    if summary["throughput"]:
        print_saturation(summary["throughput"])

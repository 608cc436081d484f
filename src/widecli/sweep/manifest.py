"""A sweep's directory: its recipe, the recipes of its points, logs, and `summary.json`, which lists its runs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from widecli.errors import UsageError, WideError
from widecli.recipe.load import ResolvedRecipe, dump
from widecli.recipe.schema import Recipe
from widecli.storage import given_path, plain, try_lock, unwritable, write_json, write_text
from widecli.sweep.jobs import Job, Plan
from widecli.track.run import RUNS, run_name
from widecli.track.summary import completed

_WAIT_FOR_LOCK_S = 60.0


def sweep_directory(recipe: Recipe) -> Path:
    """`track.run_dir`, else `runs/sweep-<model>-<hash>`, whose hash covers recipe and axes, not where it runs."""
    if recipe.track.run_dir is not None:
        return given_path(recipe.track.run_dir)
    content = recipe.model_dump_json(exclude={"track": True, "sweep": {"executor", "retries", "slurm"}})
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    model = run_name(ResolvedRecipe(recipe, "", digest)).split(f"-{recipe.routing.mode}-s")[0]
    return RUNS / f"sweep-{model}-{digest}"


def refuse_foreign(folder: Path) -> None:
    """Refuses a directory that holds something else than a sweep."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name another directory with --run-dir.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "points").is_dir():
        raise UsageError(f"{folder} is not empty and holds no sweep; name another directory with --run-dir.")


def write_recipes(folder: Path, recipe: Recipe, plan: Plan) -> None:
    """The sweep's own recipe and those that its jobs name."""
    try:
        (folder / "points").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    write_text(folder / "recipe.yaml", dump(recipe))
    for file, resolved in plan.recipes.items():
        write_text(file, dump(resolved.recipe))


def manifest(folder: Path, recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """The sweep's summary: every point with its stages, and the run directories relative to the sweep's."""
    points = [
        {
            "values": dict(point.values),
            "recipe_hash": point.calibration.hash8,
            "stages": {stage: _entry(job, folder) for stage, job in jobs.items()},
        }
        for point, jobs in zip(plan.points, plan.of_point, strict=True)
    ]
    runs = [_relative(job.path, folder) for job in plan.jobs if job.path is not None and job.path.is_dir()]
    return {
        "model": recipe.model.name,
        "axes": recipe.sweep.axes,
        "stages": list(recipe.sweep.stages),
        "finished": all(job.state.is_good for job in plan.jobs),
        "points": points,
        "common": [_entry(job, folder) for job in plan.common()],
        "runs": list(dict.fromkeys(runs)),
        "run_dir": str(folder),
    }


def write_manifest(folder: Path, recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """Write `summary.json` as things stand; returns it."""
    document: dict[str, Any] = plain(completed("sweep", manifest(folder, recipe, plan)))
    write_json(folder / "summary.json", document)
    return document


def _entry(job: Job, folder: Path) -> dict[str, Any]:
    return {
        "stage": job.stage,
        "state": job.state.value,
        "run": _relative(job.path, folder) if job.path is not None else None,
        "seconds": job.seconds,
        "error": job.error,
        "log": _relative(job.log, folder) if job.log is not None else None,
    }


def _relative(path: Path, folder: Path) -> str:
    return os.path.relpath(path.resolve(), folder.resolve())


@contextlib.contextmanager
def locked(folder: Path, note: Callable[[str], None], wait_s: float = _WAIT_FOR_LOCK_S) -> Iterator[int]:
    """Hold the sweep's lock; yields its descriptor, which children inherit: it stays held while one of them lives.

    After a sweep was killed its children save and end; this waits for them.

    Raises:
        WideError: another process runs this sweep.
    """
    deadline = time.monotonic() + wait_s
    said = False
    while (handle := try_lock(folder / ".lock", note)) is None:
        if time.monotonic() > deadline:
            raise WideError(f"another process runs the sweep {folder}: wait for it, or stop it first")
        if not said:
            note(f"waiting for processes of an earlier start of {folder} to end")
            said = True
        time.sleep(0.2)
    try:
        yield handle
    finally:
        os.close(handle)

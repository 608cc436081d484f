"""Which run made the checkpoint that another run measured, or began with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from widecli.report.find import StoredRun

MEASURING = frozenset({"eval", "profile", "inspect", "generate", "report", "sweep", "export"})
"""Commands that start from a checkpoint and make none."""


def producers(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """The runs that trained something."""
    return [run for run in runs if run.command not in MEASURING and run.summary.get("checkpoint")]


def producer_of(run: StoredRun, candidates: Sequence[StoredRun]) -> StoredRun | None:
    """The run that made `run`'s checkpoint, or None when it is not among `candidates`.

    Recipe hash and plan must agree, where both runs record them. Then the checkpoint's own folder decides, then the
    folder's name (run directories get moved and archived), then the path the candidate recorded, then the hash alone;
    a candidate beside `run` goes before one elsewhere. What stays ambiguous is not guessed. No run makes a converted
    checkpoint.
    """
    checkpoint = run.summary.get("checkpoint")
    if not isinstance(checkpoint, str) or converted(run):
        return None
    fitting = [other for other in candidates if _agree(run, other)]
    folder = _run_folder(checkpoint)
    tests = (
        [c for c in fitting if Path(folder).is_dir() and Path(folder).resolve() == c.path.resolve()],
        [c for c in fitting if c.path.name == folder.name],
        [c for c in fitting if _recorded(c) == folder],
        [c for c in fitting if _hash(run) is not None and _hash(c) == _hash(run) and _steps(c) == _steps(run)],
    )
    for matches in tests:
        beside = [match for match in matches if match.path.resolve().parent == run.path.resolve().parent]
        for choice in (beside, matches):
            if len(choice) == 1:
                return choice[0]
    return None


def began_with(run: StoredRun, candidates: Sequence[StoredRun]) -> tuple[StoredRun, StoredRun] | None:
    """The run that made the checkpoint a second stage began with, and `run` as if it had measured that checkpoint.

    None for a first stage, and where the checkpoint's run is not among `candidates`.
    """
    origin = run.summary.get("origin")
    if not isinstance(origin, dict) or run.command in MEASURING:
        return None
    plan = run.summary.get("plan")
    start = {"command": "eval", "checkpoint": origin.get("checkpoint"), "recipe_hash": origin.get("recipe_hash")}
    there = replace(run, summary={**start, "plan": plan, "steps": origin.get("step")})
    producer = producer_of(there, [candidate for candidate in candidates if candidate is not run])
    return (producer, there) if producer is not None else None


def converted(run: StoredRun) -> bool:
    """Whether a run measured what `wide patterns` made of a checkpoint, without training; versions until 0.1 had that.

    Older evaluations do not record it; what they measured then lay in a folder that is no run's.
    """
    summary = run.summary
    if "origin" in summary:
        return bool((summary["origin"] or {}).get("command") == "patterns")
    by_patterns = (summary.get("plan") or {}).get("mode") == "patterns"
    return by_patterns and PurePath(str(summary.get("checkpoint"))).parent.name != "checkpoints"


def _agree(run: StoredRun, other: StoredRun) -> bool:
    pairs = ((_hash(run), _hash(other)), (run.summary.get("plan"), other.summary.get("plan")))
    return all(a is None or b is None or a == b for a, b in pairs)


def _run_folder(checkpoint: str) -> PurePath:
    """`runs/calibrate-x/checkpoints/step-000300` -> `runs/calibrate-x`."""
    path = PurePath(checkpoint)
    return path.parent.parent if path.parent.name == "checkpoints" else path


def _recorded(run: StoredRun) -> PurePath:
    return _run_folder(str(run.summary["checkpoint"]))


def _hash(run: StoredRun) -> object:
    return run.summary.get("recipe_hash")


def _steps(run: StoredRun) -> object:
    return run.summary.get("steps")

"""What a run has measured so far, kept beside it until it is finished: a killed `wide profile` loses one cell at most.

Dense and routed of a cell took turns in one process, so cells are kept or measured anew as wholes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from widecli.errors import UsageError
from widecli.storage import write_json

SCHEMA = "wide.profile_cells/1"
_NAME = "cells.json"


class MeasuredCells:
    """The points of whole cells of a run, in the order in which they were measured, and what was remarked.

    `what` says what is measured, and on what: cells of anything else are not this run's.
    """

    def __init__(self, path: Path, what: Mapping[str, Any]) -> None:
        """Raises UsageError when the run at `path` has cells of something else."""
        self._path = path
        self._what = dict(what)
        self.points: list[dict[str, Any]] = []
        self.notes: list[str] = []
        stored = _read(path / _NAME)
        if stored is not None:
            refuse_other(path, stored["what"], self._what)
            self.points, self.notes = stored["points"], stored["notes"]

    def of(self, batch: int, prompt: int) -> list[dict[str, Any]]:
        """The points of a cell, none if it was not measured."""
        return [point for point in self.points if (point["batch"], point["prompt"]) == (batch, prompt)]

    @property
    def kept(self) -> frozenset[tuple[int, int]]:
        """Batch and prompt of the cells that need not be measured."""
        return frozenset((point["batch"], point["prompt"]) for point in self.points)

    def add(self, points: Sequence[dict[str, Any]], notes: Sequence[str]) -> None:
        """Keep a cell's points, and all remarks up to them."""
        self.points += points
        self.notes = list(notes)
        document = {"schema": SCHEMA, "what": self._what, "points": self.points, "notes": self.notes}
        write_json(self._path / _NAME, document)

    def finish(self) -> None:
        """The run's summary holds everything now."""
        (self._path / _NAME).unlink(missing_ok=True)


def recorded(path: Path) -> dict[str, Any] | None:
    """What the unfinished run at `path` measures; None when it has no cells yet."""
    stored = _read(path / _NAME)
    return None if stored is None else dict(stored["what"])


def refuse_other(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UsageError, naming it, when a run measured something else or on something else."""
    key = next((key for key in now if before.get(key) != now[key]), None)
    if key is None:
        return
    was, is_now = before.get(key), now[key]
    if isinstance(was, Mapping) and isinstance(is_now, Mapping):
        refuse_other(path, was, is_now)
    raise UsageError(
        f"{path} cannot be resumed: {key} was {was} and is now {is_now}; --overwrite measures everything anew, "
        "--run-dir names another directory."
    )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
        return None
    points = stored.get("points")
    sound = isinstance(points, list) and all(isinstance(p, dict) and {"batch", "prompt"} <= set(p) for p in points)
    return stored if sound and isinstance(stored.get("what"), dict) else None

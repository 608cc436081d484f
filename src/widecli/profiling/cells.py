"""What a run has measured so far, kept beside it until nothing is missing: a kill loses one cell at most.

All sides of a cell took turns in one process, so cells are kept or measured anew as wholes. So is, by the run's next
start, a cell for which there was no time to set up transformers; until then its other figures stand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from widecli.errors import UsageError
from widecli.storage import write_json

SCHEMA = "wide.profile_cells/4"
"""1 had no `missing` and no `logged`, 2 no `peaks`, 3 no `compensation` in its points."""
_NAME = "cells.json"
_SIDES = ("dense", "routed")


Cell = tuple[int, int]
"""Batch and prompt."""


class MeasuredCells:
    """The points of a run's cells, in the order in which they were measured, and what was remarked.

    `missing` says in words what a cell still lacks; `logged` counts all points that there ever were, with those that
    newer ones replaced; `peaks` is what the device was taken to do at most. `what` says what is measured, and on what:
    cells of anything else are not this run's.
    """

    def __init__(self, path: Path, what: Mapping[str, Any]) -> None:
        """Raises UsageError when the run at `path` has cells of something else."""
        self._path = path
        self._what = dict(what)
        self.points: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.missing: dict[Cell, list[str]] = {}
        self.logged = 0
        self.peaks: dict[str, Any] | None = None
        stored = _read(path / _NAME)
        if stored is not None:
            refuse_other(path, stored["what"], self._what)
            self.points, self.notes, self.logged = stored["points"], stored["notes"], stored["logged"]
            self.missing = {(cell["batch"], cell["prompt"]): cell["lacks"] for cell in stored["missing"]}
            self.peaks = stored["peaks"]

    def of(self, batch: int, prompt: int) -> list[dict[str, Any]]:
        """The points of a cell, none if it was not measured."""
        return [point for point in self.points if (point["batch"], point["prompt"]) == (batch, prompt)]

    @property
    def kept(self) -> frozenset[Cell]:
        """The cells that need not be measured."""
        return frozenset(map(_cell_of, self.points)) - self.missing.keys()

    def add(self, points: Sequence[dict[str, Any]], notes: Sequence[str], lacks: Sequence[str] = ()) -> None:
        """Keep a cell's points in place of older ones, what it still lacks, and all remarks up to them."""
        cells = set(map(_cell_of, points))
        self.points = [point for point in self.points if _cell_of(point) not in cells] + list(points)
        self.notes = list(notes)
        self.logged += len(points)
        self.missing = {cell: words for cell, words in self.missing.items() if cell not in cells}
        self.missing |= {cell: list(lacks) for cell in cells if lacks}
        missing = [{"batch": batch, "prompt": prompt, "lacks": w} for (batch, prompt), w in self.missing.items()]
        stored = {"points": self.points, "notes": self.notes, "missing": missing, "logged": self.logged}
        write_json(self._path / _NAME, {"schema": SCHEMA, "what": self._what, "peaks": self.peaks, **stored})

    def finish(self) -> None:
        """The run's summary holds everything now; the cells stay where some of them lack something."""
        if not self.missing:
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
    sound = all_there(stored.get("points")) and _are_of_cells(stored.get("missing"), {"lacks"})
    sound = sound and isinstance(stored.get("what"), dict) and isinstance(stored.get("logged"), int)
    sound = sound and isinstance(stored.get("peaks"), dict) and set(stored["peaks"]) == {"flops", "bytes", "source"}
    return stored if sound else None


def all_there(points: object) -> bool:
    """Whether these are points of a profile, none of which lacks what is shown of it."""
    keys = {"phase", "sparsity", "group_size", "compensation", "masks", "mode", "skip_rate", "speedup", *_SIDES}
    return _are_of_cells(points, keys) and all("p50_ms" in point[side] for point in points for side in _SIDES)  # type: ignore[attr-defined]


def _are_of_cells(found: object, keys: set[str]) -> bool:
    keys = {"batch", "prompt"} | keys
    return isinstance(found, list) and all(isinstance(each, dict) and keys <= set(each) for each in found)


def _cell_of(point: Mapping[str, Any]) -> Cell:
    return point["batch"], point["prompt"]

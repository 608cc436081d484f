"""Which folders are finished runs, which files are measurements, and what they recorded.

Whatever cannot be read is named with its reason.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from widecli.errors import UsageError
from widecli.report.documents import Document, UnreadableError, document_schema, read_document
from widecli.storage import printable
from widecli.track.summary import REQUIRED_KEYS, SUMMARY_SCHEMA

REPORT_DOCUMENT = "report.json"
"""Marks a folder that `wide report` wrote: replaced by the next one, never read as a run."""

_DEEPEST = 3  # runs/<sweep>/<stage>/<run>
_RUN_FILES = ("recipe.yaml", "summary.json", "metrics.jsonl")


@dataclass(frozen=True)
class StoredRun:
    """A finished run as its directory records it. `label` is the shortest name that no other run here has."""

    path: Path
    label: str
    summary: Mapping[str, Any]
    recipe: Mapping[str, Any]  # as written, not validated: recipes of other versions are fine
    environment: Mapping[str, Any]

    @property
    def command(self) -> str:
        """The command that made it."""
        return str(self.summary["command"])


@dataclass(frozen=True)
class Skipped:
    """A folder that is left out, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Found:
    """What lies below the folders named."""

    runs: tuple[StoredRun, ...]
    skipped: tuple[Skipped, ...]
    documents: tuple[Document, ...] = ()


def find_runs(folders: Iterable[str | Path]) -> Found:
    """Read every finished run and every document of measurements among `folders` and below them.

    Raises:
        UsageError: one named does not exist, a file named is no document, or there is nothing finished at all.
    """
    read: dict[Path, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {}
    documents: dict[Path, dict[str, Any]] = {}
    skipped: dict[Path, str] = {}
    told: set[Path] = set()  # what is skipped, wherever links lead to it
    named = [Path(folder) for folder in folders]
    for folder in named:
        if folder.is_file() and document_schema(folder) is None:
            raise UsageError(
                f"{folder} holds no measurements: name what --out of a benchmark wrote, or run directories."
            )
        if not folder.exists():
            raise UsageError(f"{folder} is not a folder: name run directories, or a folder that holds some.")
        for path, reason in [(folder, None)] if folder.is_file() else _candidates(folder, _DEEPEST):
            if path.resolve() in read or path.resolve() in documents or path.resolve() in told:
                continue  # named twice, below another folder named, or reached by a link
            if reason is None:
                try:
                    if path.is_file():
                        documents[path.resolve()] = read_document(path)
                    else:
                        read[path.resolve()] = _read(path)
                    continue
                except UnreadableError as error:
                    reason = str(error)
            skipped[path] = reason
            told.add(path.resolve())
    if not read and not documents:
        why = "".join(f"; {path}: {reason}" for path, reason in list(skipped.items())[:3])
        more = f" (and {len(skipped) - 3} more)" if len(skipped) > 3 else ""
        raise UsageError(f"there is no finished run in {', '.join(map(str, named))}{why}{more}")
    labels = _labels([*read, *documents])
    runs = tuple(
        StoredRun(_shown(path), labels[path], summary, recipe, environment)
        for path, (summary, recipe, environment) in sorted(read.items())
    )
    measured = tuple(Document(_shown(path), labels[path], values) for path, values in sorted(documents.items()))
    return Found(runs, tuple(Skipped(path, reason) for path, reason in skipped.items()), measured)


def _candidates(folder: Path, depth: int) -> Iterator[tuple[Path, str | None]]:
    """(path, None) for what looks like a run or a document, (folder, reason) for what does not and holds none.

    A sweep's directory stands for the runs that its manifest lists.
    """
    if not os.access(folder, os.R_OK | os.X_OK):
        yield folder, "it may not be read (permission denied)"
        return
    if (listed := _runs_of_sweep(folder)) is not None:
        yield from ((path, None) for path in listed)
        return
    if any((folder / name).is_file() for name in _RUN_FILES):
        yield folder, None
        return
    if (folder / REPORT_DOCUMENT).is_file():
        return
    here = folder.resolve()
    inner = sorted(
        path
        for path in folder.iterdir()
        if path.is_dir() and not path.name.startswith(".") and not here.is_relative_to(path.resolve())  # a link back
    )
    below: list[tuple[Path, str | None]] = [
        (path, None) for path in sorted(folder.glob("*.json")) if path.is_file() and document_schema(path)
    ]
    below += [found for path in inner if depth for found in _candidates(path, depth - 1)]
    if any(reason is None for _, reason in below):
        yield from below
    elif depth < _DEEPEST:
        yield folder, "not a run directory"  # one line for it, none for what it holds


def _runs_of_sweep(folder: Path) -> list[Path] | None:
    """The run directories that a sweep's manifest lists and that are there; None when `folder` is no sweep's."""
    if not (folder / "points").is_dir():  # before reading every summary twice
        return None
    manifest = _json(folder / "summary.json") or {}
    if manifest.get("command") != "sweep" or not isinstance(manifest.get("runs"), list):
        return None
    listed = [Path(os.path.normpath(folder / str(run))) for run in manifest["runs"]]  # listed relative to the sweep
    return [path for path in listed if path.is_dir()]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    if not (path / "summary.json").is_file():
        checkpoint = (path / "wide_config.json").is_file()
        raise UnreadableError("a checkpoint, not a run" if checkpoint else "not finished (no summary.json)")
    summary = _json(path / "summary.json")
    if summary is None:
        raise UnreadableError("its summary.json cannot be read")
    if complaint := _complaint(summary):
        raise UnreadableError(complaint)
    return summary, _yaml(path / "recipe.yaml"), _json(path / "environment.json") or {}


def _complaint(summary: Mapping[str, Any]) -> str | None:
    """Why a summary is not one that this version understands."""
    schema = summary.get("schema")
    if schema != SUMMARY_SCHEMA:
        return f"its summary has schema {schema!r}; this version reads {SUMMARY_SCHEMA!r}"
    command = summary.get("command")
    if not isinstance(command, str):
        return "its summary names no command"
    required = REQUIRED_KEYS.get(command, ())
    if missing := [key for key in required if key not in summary]:
        return f"its summary lacks {', '.join(missing)}"
    mappings = ("plan", "skip_rate", "flops_skipped", "dense", "perplexity", "tasks", "backbone", "protocol", "budget")
    for key in mappings:
        if not isinstance(summary.get(key), (dict, type(None))):
            return f"its summary's {key} is a {type(summary[key]).__name__}, not a table of values"
    points = summary.get("points", [])
    if not isinstance(points, list) or not all(isinstance(point, dict) for point in points):
        return "its summary's points are not a list of tables"
    if not isinstance(summary.get("model"), (str, type(None))):
        return "its summary's model is not a name"
    return None


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return printable(found) if isinstance(found, dict) else None


def _yaml(path: Path) -> dict[str, Any]:
    import yaml

    from widecli.recipe.dialect import parse_yaml

    try:
        found = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError):
        raise UnreadableError("its recipe.yaml cannot be read") from None
    return printable(found) if isinstance(found, dict) else {}


def _shown(path: Path) -> Path:
    """As seen from here, where that is shorter."""
    try:
        return path.relative_to(Path.cwd())
    except ValueError:
        return path


def _labels(paths: list[Path]) -> dict[Path, str]:
    """The last components of each path, as many as it takes to tell it from the others."""
    labels = {}
    for path in paths:
        others = [other for other in paths if other != path]
        length = 1
        while length < len(path.parts) and any(other.parts[-length:] == path.parts[-length:] for other in others):
            length += 1
        labels[path] = printable("/".join(path.parts[-length:]))
    return labels

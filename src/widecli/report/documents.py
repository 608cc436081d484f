"""Measurements that are no run: one JSON file each, as a benchmark's `--out` wrote it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRAIN_SPEED = "wide.train_speed/1"
_HEAD_BYTES = 256  # the schema stands first
_SCHEMA = re.compile(rb'^\s*\{\s*"schema":\s*"(wide\.train_speed/[^"]+)"')


class UnreadableError(Exception):
    """A run or a document that cannot be used; its text is the reason."""


@dataclass(frozen=True)
class Document:
    """One file. `label` is the shortest name that no other run or document here has."""

    path: Path
    label: str
    values: Mapping[str, Any]

    @property
    def results(self) -> list[Mapping[str, Any]]:
        """What it measured."""
        return list(self.values["results"])

    @property
    def environment(self) -> Mapping[str, Any]:
        """Date, device, versions, as far as recorded."""
        found = self.values.get("environment")
        return found if isinstance(found, dict) else {}

    @property
    def device(self) -> str:
        """What it ran on: a GPU's name, else the CPU's."""
        gpus = self.environment.get("gpus")
        if isinstance(gpus, list) and gpus and isinstance(gpus[0], dict):
            return str(gpus[0].get("name") or "")
        return str(self.environment.get("cpu") or "")

    @property
    def command(self) -> str:
        """The command that wrote it; older documents recorded its arguments alone."""
        if recorded := self.values.get("command"):
            return str(recorded)
        words = (self.environment.get("command_line") or [])[1:]
        return " ".join(["python -m widecli.train.speed", *map(str, words)])


def document_schema(path: Path) -> str | None:
    """The schema of a file with measurements, of whatever version; None for any other file."""
    try:
        with path.open("rb") as file:
            found = _SCHEMA.match(file.read(_HEAD_BYTES))
    except OSError:
        return None
    return found.group(1).decode() if found else None


def read_document(path: Path) -> dict[str, Any]:
    """The whole file. Raises UnreadableError when it is torn, of another version or not what its schema says."""
    schema = document_schema(path)
    if schema != TRAIN_SPEED:
        raise UnreadableError(f"its schema is {schema!r}; this version reads {TRAIN_SPEED!r}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise UnreadableError("it cannot be read") from None
    results = found.get("results")
    if not isinstance(results, list) or not all(isinstance(entry, dict) for entry in results):
        raise UnreadableError("its results are not a list of tables")
    return dict(found)

"""Atomic file writes and JSON that any parser reads."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from widecli.errors import WideError


def write_text(path: Path, text: str) -> None:
    """Writes `path` so that a reader, or a kill at any moment, sees the old content or the new one, never a part.

    Raises:
        WideError: no space left, or the folder cannot be written.
    """
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """As `write_text`, for bytes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> WideError:
    """The sentence for a failed write: what could not be written, why, what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return WideError(f"No space left to write {path}: free some, or name another folder with --run-dir.")
    return WideError(f"{path} cannot be written ({error.strerror or error}): name another folder with --run-dir.")


def write_json(path: Path, value: object) -> None:
    """Writes plain data as indented JSON, atomically; see `plain` for what becomes of numbers."""
    write_text(path, json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """Plain data for JSON: 0-d arrays and tensors become numbers, paths text, tuples lists, NaN and infinity null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # NumPy and torch, without importing either
        return plain(value.tolist())
    raise TypeError(f"a {type(value).__name__} cannot be recorded as JSON")

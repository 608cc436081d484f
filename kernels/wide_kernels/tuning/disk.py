"""The tuner's results on this machine: one JSON file for each kind of GPU and Triton release, under the XDG cache."""

from __future__ import annotations

import json
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from wide_kernels.tuning.table import Entries, Key

SCHEMA = "wide_kernels.tuning/2"
"""1 knew a STAGES of one row's products, which they no longer take."""


def tuning_file(gpu: str) -> Path:
    """Where the results for a GPU of this name stand."""
    import triton

    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home, as in some containers
        root = Path(tempfile.gettempdir(), f"wide-cache-{os.getuid()}")
    name = re.sub(r"[^A-Za-z0-9.]+", "-", gpu).strip("-")
    return root / "wide_kernels" / "tuning" / f"{name}-triton{triton.__version__}.json"


@cache
def read_tuned(gpu: str) -> Mapping[Key, Entries]:
    """What the tuner found on such a GPU, read once a process; a file that makes no sense is ignored with a warning."""
    path = tuning_file(gpu)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        return _ignored(path, error)
    try:
        document = json.loads(text)
        if document["schema"] != SCHEMA:
            raise ValueError(f"its schema is {document['schema']!r}, not {SCHEMA!r}")
        return {_parsed(entry): _integers(entry["config"]) for entry in document["entries"]}
    except (ValueError, KeyError, TypeError) as error:
        return _ignored(path, error)


def write_tuned(gpu: str, found: Mapping[Key, Entries]) -> Path:
    """Add the results to the file, replacing those under the same keys; readers see the old file or the new one."""
    read_tuned.cache_clear()
    entries = {**read_tuned(gpu), **found}
    document = {
        "schema": SCHEMA,
        "gpu": gpu,
        "entries": [{**key._asdict(), "config": dict(config)} for key, config in sorted(entries.items())],
    }
    path = tuning_file(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".partial", delete=False, encoding="utf-8") as file:
        json.dump(document, file, indent=1)
    Path(file.name).replace(path)
    read_tuned.cache_clear()
    return path


def _parsed(entry: Mapping[str, object]) -> Key:
    kernel, rows, width, dtype = (entry[name] for name in Key._fields)
    if not (isinstance(kernel, str) and isinstance(rows, int) and isinstance(width, int) and isinstance(dtype, str)):
        raise ValueError(f"an entry has the key {kernel!r}, {rows!r}, {width!r}, {dtype!r}")
    return Key(kernel, rows, width, dtype)


def _integers(config: Mapping[str, object]) -> dict[str, int]:
    found = {name: value for name, value in config.items() if isinstance(value, int)}
    if len(found) < len(config):
        raise ValueError(f"a configuration is {dict(config)}, not all of it integers")
    return found


def _ignored(path: Path, error: Exception) -> Mapping[Key, Entries]:
    warnings.warn(f"{path} is ignored: {error}; delete it or tune again", RuntimeWarning, stacklevel=3)
    return {}

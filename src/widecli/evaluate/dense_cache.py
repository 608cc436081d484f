"""Dense results, kept so that a checkpoint can be compared without measuring its backbone again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from widecli.errors import WideError
from widecli.evaluate.protocol import EvalProtocol
from widecli.storage import user_cache

SCHEMA = "wide.dense/1"


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/wide/dense`, else `~/.cache/wide/dense`."""
    return user_cache() / "dense"


class DenseCache:
    """JSON results by backbone, dtype and protocol, one file each. Anything that does not load counts as absent."""

    def __init__(self, cache_dir: str | Path | None = None) -> None:
        self.folder = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()

    def path(self, backbone: str | Mapping[str, Any], dtype: str, protocol: EvalProtocol) -> Path:
        """The file that holds (or would hold) this result."""
        text = json.dumps(_key(backbone, dtype, protocol), sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def load(self, backbone: str | Mapping[str, Any], dtype: str, protocol: EvalProtocol) -> dict[str, Any] | None:
        """The stored result, or None if there is none, it is damaged, or it belongs to another key."""
        try:
            stored = json.loads(self.path(backbone, dtype, protocol).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
            return None
        result = stored.get("result")
        return result if isinstance(result, dict) and stored.get("key") == _key(backbone, dtype, protocol) else None

    def store(
        self, backbone: str | Mapping[str, Any], dtype: str, protocol: EvalProtocol, result: Mapping[str, Any]
    ) -> Path:
        """Write a result (JSON values only) in one step: readers see the old file or the whole new one."""
        path = self.path(backbone, dtype, protocol)
        text = json.dumps({"schema": SCHEMA, "key": _key(backbone, dtype, protocol), "result": dict(result)}, indent=2)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=".dense-", suffix=".tmp")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(text + "\n")
                Path(temporary).replace(path)
            except BaseException:
                with contextlib.suppress(OSError):
                    Path(temporary).unlink()
                raise
        except OSError as error:
            reason = error.strerror or error
            raise WideError(f"The dense result cannot be stored in {self.folder}: {reason}.") from error
        return path


def _key(backbone: str | Mapping[str, Any], dtype: str, protocol: EvalProtocol) -> dict[str, Any]:
    named = backbone if isinstance(backbone, str) else dict(backbone)
    # Through JSON and back, so that what is compared on loading equals what was stored (tuples become lists).
    key = {"backbone": named, "dtype": dtype, "protocol": protocol.as_dict()}
    plain: dict[str, Any] = json.loads(json.dumps(key, sort_keys=True))
    return plain

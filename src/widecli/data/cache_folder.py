"""Folders of the user's cache, and folders that appear there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from widecli.errors import WideError

_BUILDING = ".building-"
_STALE_AFTER_S = 24 * 3600


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/wide`, or `~/.cache/wide`."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "wide"


@contextlib.contextmanager
def disk_errors_named(folder: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Turn a full or unwritable disk into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            needed = f" (about {max(needed_bytes // 2**20, 1)} MiB needed)" if needed_bytes else ""
            raise WideError(
                f"No space left for the cache in {folder}{needed}: free some, or point XDG_CACHE_HOME elsewhere"
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise WideError(
                f"The cache folder {folder} is not writable: point XDG_CACHE_HOME at one that is"
            ) from error
        raise


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            json.dump(value, stream, ensure_ascii=False, indent=1, sort_keys=True)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def folder_in_one_piece(final: Path, is_valid: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield a folder to fill; when the block ends well it becomes `final` by one rename.

    A block that fails leaves nothing. If another process finished `final` first and it `is_valid`, that one stays;
    an invalid one is replaced.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    _sweep(final.parent)
    building = final.parent / f"{_BUILDING}{uuid.uuid4().hex}"
    building.mkdir()
    try:
        yield building
        for _ in range(3):  # another process may replace a broken folder at the same moment
            try:
                building.rename(final)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                if is_valid(final):
                    return
                # Renamed before it is deleted, so that no reader meets a half-deleted folder under the final name.
                with contextlib.suppress(FileNotFoundError):
                    final.rename(final.parent / f"{_BUILDING}{uuid.uuid4().hex}")
        raise WideError(f"{final} is being replaced by other processes again and again: run one at a time")
    finally:
        if building.exists():
            shutil.rmtree(building, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Delete what killed builds left behind, once it is surely nobody's work in progress."""
    for left in parent.glob(f"{_BUILDING}*"):
        with contextlib.suppress(OSError):
            newest = max((item.stat().st_mtime for item in left.iterdir()), default=left.stat().st_mtime)
            if time.time() - newest > _STALE_AFTER_S:
                shutil.rmtree(left, ignore_errors=True)

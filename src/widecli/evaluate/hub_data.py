"""Data sets by Hub id, read from a local data root when one is named."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from widecli.errors import UsageError, WideError
from widecli.storage import given_path, user_cache

_REACH_S = 5.0


def local_folder(dataset: str, data_root: str | None) -> Path | None:
    """Where `<owner>/<name>` lies below the data root (or its `hub` folder); None if it does not.

    Raises `UsageError` when a data root is named that is no folder.
    """
    if data_root is None:
        return None
    root = given_path(data_root).resolve()
    if not root.is_dir():
        raise UsageError(f"eval.data_root={data_root} is no folder; it should hold data sets under their Hub ids.")
    for base in (root, root / "hub"):
        folder = base / dataset
        # An id such as "../x" would leave the root; links inside it are the user's own business.
        if ".." not in folder.parts and folder.is_dir() and any(folder.iterdir()):
            return folder
    return None


def is_cached(dataset: str) -> bool:
    """Whether a data set of the Hub has been loaded on this machine before, as far as its cache folders show."""
    from datasets import config
    from huggingface_hub import constants

    prepared = Path(config.HF_DATASETS_CACHE) / dataset.replace("/", "___")
    downloaded = Path(constants.HF_HUB_CACHE) / f"datasets--{dataset.replace('/', '--')}"
    return prepared.is_dir() or downloaded.is_dir()


def require_present(datasets: Iterable[str], *, data_root: str | None) -> None:
    """Offline runs call this first: one `UsageError` names every data set that is neither local nor cached."""
    missing = [
        name for name in dict.fromkeys(datasets) if local_folder(name, data_root) is None and not is_cached(name)
    ]
    if missing:
        where = f"below {data_root}" if data_root is not None else "in the Hub's cache, and no eval.data_root is named"
        raise UsageError(f"Offline, but these data sets are not {where}: {', '.join(missing)}.")


def require_reachable(datasets: Iterable[str], *, data_root: str | None) -> None:
    """Runs that may ask the Hub call this first: a WideError at once where they would have to and it is out of reach.

    Left to itself, `datasets` tries again for half a minute. Behind a proxy nothing is tried.
    """
    missing = [
        name for name in dict.fromkeys(datasets) if local_folder(name, data_root) is None and not is_cached(name)
    ]
    if missing and not _hub_answers():
        raise WideError(
            f"These data sets are not on this machine and the Hub cannot be reached: {', '.join(missing)}; connect, or "
            "name a folder that has them with eval.data_root (--data-root)."
        )


def _hub_answers() -> bool:
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants

    place = urlsplit(constants.ENDPOINT)
    if getproxies() or not place.hostname:
        return True
    try:
        socket.create_connection((place.hostname, place.port or 443), timeout=_REACH_S).close()
    except OSError:
        return False
    return True


def load_rows(
    dataset: str, config: str | None, split: str, *, data_root: str | None, offline: bool
) -> list[dict[str, Any]]:
    """All rows of one split, from the data root if it has the set, else from the Hub."""
    (require_present if offline else require_reachable)([dataset], data_root=data_root)
    folder = local_folder(dataset, data_root)
    with reading(dataset), quiet_datasets():
        from datasets import load_dataset

        options = {"cache_dir": prepared_folder(folder)} if folder is not None else {}
        return list(load_dataset(str(folder or dataset), config, split=split, **options))


def prepared_folder(folder: Path) -> str:
    """Where `datasets` keeps its prepared copy of a local folder: a place of its own for each state of the files.

    Left to itself, `datasets` finds a prepared copy by the folder's last name alone: after an edit, or for another data
    root, it would silently hand out the old rows.
    """
    state = hashlib.sha256(os.fsencode(folder))
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        found = path.stat()
        state.update(os.fsencode(f"{path.relative_to(folder).as_posix()} {found.st_size} {found.st_mtime_ns}\n"))
    return str(user_cache() / "datasets" / state.hexdigest()[:16])


@contextlib.contextmanager
def reading(dataset: str, purpose: str = "") -> Iterator[None]:
    """Turn whatever goes wrong while a data set is loaded into one sentence."""
    try:
        yield
    except WideError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WideError(
            f"The data set {dataset}{purpose} could not be loaded ({reason[:300]}); "
            "connect to the Hub, or name a folder that has it with eval.data_root (--data-root)."
        ) from error


@contextlib.contextmanager
def quiet_datasets() -> Iterator[None]:
    """No progress bars of `datasets` while it prepares files: they are cheap here and would fill a log."""
    from datasets.utils import disable_progress_bars, enable_progress_bars
    from datasets.utils.tqdm import are_progress_bars_disabled

    was_quiet = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not was_quiet:
            enable_progress_bars()

"""Local text files: which ones a name means, and a mix in which every file has its share from the start."""

from __future__ import annotations

import glob
import hashlib
import heapq
import json
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from widecli.data.file_formats import FORMATS, Document, format_of, open_documents, text_bytes
from widecli.errors import UsageError
from widecli.storage import given_path

# Documents held for shuffling, over all files together. A corpus below this size is shuffled completely.
SHUFFLE_BYTES = 128 * 2**20
# Files read side by side; far below the usual limit of 1024 open files.
MAX_LANES = 256
_GLOB = frozenset("*?[")


def is_local(name: str) -> bool:
    """Whether a name can only mean local files: it exists, is a glob, is written as a path or ends as one."""
    path = given_path(name)
    return (
        path.exists()
        or bool(_GLOB & set(name))
        or name.startswith(("/", "./", "../", "~"))
        or name.count("/") > 1
        or format_of(path) is not None
        or path.suffix in (".json", ".csv", ".zst", ".gz")  # not read, but surely no Hub id: the message can say so
    )


def find_files(names: Sequence[str]) -> list[Path]:
    """The files that names, folders (searched recursively) and globs stand for: absolute, sorted, each once.

    Links are followed, to files and to folders; what a link's own name ends in says how it is read. What exists under
    a glob's very name is that. Raises UsageError when a name matches nothing that can be read, and for a link to
    nothing or a folder that cannot be looked into.
    """
    found: dict[str, Path] = {}  # by where links lead
    for name in names:
        path = given_path(name)
        if path.is_dir():
            files = list(_below(path, set()))
        elif path.exists():
            if format_of(path) is None:
                raise UsageError(f"{name} is not a kind of file that is read here: use {', '.join(FORMATS)}")
            files = [path]
        elif path.is_symlink():
            _refuse_dangling(path)
            files = []
        elif _GLOB & set(name):
            seen: set[str] = set()
            files = [file for match in _matches(path) for file in (_below(match, seen) if match.is_dir() else [match])]
        else:
            raise UsageError(
                f"data.source={name!r} does not exist: name a file, a folder, a glob or a Hub id (owner/name)"
            )
        readable = [file for file in files if format_of(file) is not None and file.is_file()]
        if not readable:
            raise UsageError(f"data.source={name!r} holds no text file: use {', '.join(FORMATS)}")
        for file in sorted(readable):
            found.setdefault(os.path.realpath(file), Path(os.path.abspath(file)))  # noqa: PTH100 - links stay
    return sorted(found.values())


def _below(folder: Path, seen: set[str]) -> Iterator[Path]:
    """Every file below a folder, also by way of links, but for hidden ones and folders `seen` already."""

    def refuse(error: OSError) -> NoReturn:
        raise UsageError(f"cannot look into {error.filename}: {error.strerror}") from error

    for parent, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        folders[:] = [name for name in sorted(folders) if not name.startswith(".")]
        if (real := os.path.realpath(parent)) in seen:
            folders.clear()
            continue
        seen.add(real)
        for name in files:
            file = Path(parent) / name
            if name.startswith("."):
                continue
            _refuse_dangling(file)
            yield file


def _refuse_dangling(path: Path) -> None:
    """Refuses a link to nothing, which would be left out without a word."""
    link = Path(os.path.realpath(path.parent)) / path.name  # the way there may be longer than the system follows links
    if link.is_symlink() and not link.exists():
        raise UsageError(f"{path} is a link to {link.readlink()}, which is not there: mend it or take it away")


def _matches(pattern: Path) -> list[Path]:
    """What a glob stands for; of its folders those that exist by name are taken at their word, brackets or not."""
    parts = pattern.parts
    there = 0
    while there + 1 < len(parts) and Path(*parts[: there + 1]).exists():
        there += 1
    known = [glob.escape(part) for part in parts[:there]]
    matches = glob.glob(str(Path(*known, *parts[there:])), recursive=True)  # noqa: PTH207 (absolute patterns)
    for match in matches:
        _refuse_dangling(Path(match))
    return [Path(match) for match in sorted(matches, key=len)]  # the shortest way first, where links make circles


class LocalFiles:
    """`.jsonl`, `.txt` (each also `.gz`) and `.parquet` files as one corpus.

    Files are shuffled within (completely when the corpus is small, through a buffer otherwise) and read side by side
    in proportion to their bytes, so that every prefix of `documents()` holds each file's share. Beyond `MAX_LANES`
    files are dealt into lanes and each lane has its share. The order depends on names and contents alone.
    """

    def __init__(self, names: Sequence[str], *, text_field: str, shuffle_bytes: int = SHUFFLE_BYTES) -> None:
        self.name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        self.files = find_files(names)
        self.text_field = text_field
        self.shuffle_bytes = shuffle_bytes

    def identity(self) -> dict[str, str | int]:
        """Paths, sizes and modification times of the files (hashed), and how they are read."""
        try:
            states = [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in self.files]
        except OSError as error:
            raise UsageError(f"cannot read {error.filename}: {error.strerror}") from error
        return {
            "kind": "files",
            "files": hashlib.sha256(json.dumps(states).encode()).hexdigest(),
            "num_files": len(states),
            "text_field": self.text_field,
            "shuffle_bytes": self.shuffle_bytes,
        }

    def documents(self) -> Iterator[str]:
        """The documents, mixed; raises UsageError naming the file (and line) that cannot be read."""
        num_lanes = min(len(self.files), MAX_LANES)
        dealt = list(self.files)
        if len(dealt) > num_lanes:
            # Neighbours in a listing are alike; without this a lane, and a short prefix, would be one-sided.
            random.Random(0).shuffle(dealt)
        sizes = [max(text_bytes(file, self.text_field), 1) for file in dealt]
        lanes = [dealt[lane::num_lanes] for lane in range(num_lanes)]
        totals = [sum(sizes[lane::num_lanes]) for lane in range(num_lanes)]
        capacity = self.shuffle_bytes if sum(totals) <= self.shuffle_bytes else self.shuffle_bytes // num_lanes
        streams = [_shuffled(self._lane(files), capacity, seed=index) for index, files in enumerate(lanes)]
        yield from _mixed(streams, totals)

    def _lane(self, files: Sequence[Path]) -> Iterator[Document]:
        for file in files:
            yield from open_documents(file, (self.text_field,))


def _mixed(streams: Sequence[Iterator[Document]], totals: Sequence[int]) -> Iterator[str]:
    """Always continue with the stream of which the smallest fraction was read."""
    queue = [(0.0, index) for index in range(len(streams))]
    read = [0] * len(streams)
    while queue:
        _, index = queue[0]
        document = next(streams[index], None)
        if document is None:
            heapq.heappop(queue)
            continue
        read[index] += document.size_bytes
        heapq.heapreplace(queue, (read[index] / totals[index], index))
        yield document.text


def _shuffled(documents: Iterator[Document], capacity_bytes: int, seed: int) -> Iterator[Document]:
    """Shuffle through a buffer of about `capacity_bytes`; complete when everything fits."""
    rng = random.Random(seed)
    buffer: list[Document] = []
    held = 0
    for document in documents:
        buffer.append(document)
        held += document.size_bytes
        while held > capacity_bytes and len(buffer) > 1:
            place = rng.randrange(len(buffer))
            buffer[place], buffer[-1] = buffer[-1], buffer[place]
            drawn = buffer.pop()
            held -= drawn.size_bytes
            yield drawn
    rng.shuffle(buffer)
    yield from buffer

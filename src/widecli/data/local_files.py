"""Local text files: which ones a name means, and a mix in which every file has its share from the start."""

from __future__ import annotations

import glob
import hashlib
import heapq
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from widecli.data.file_formats import FORMATS, Document, open_documents, text_bytes
from widecli.errors import UsageError

# Documents held for shuffling, over all files together. A corpus below this size is shuffled completely.
SHUFFLE_BYTES = 128 * 2**20
# Files read side by side; far below the usual limit of 1024 open files.
MAX_LANES = 256
_GLOB = frozenset("*?[")


def is_local(name: str) -> bool:
    """Whether a name can only mean local files: it exists, is a glob, is written as a path or ends as one."""
    path = Path(name).expanduser()
    return (
        path.exists()
        or bool(_GLOB & set(name))
        or name.startswith(("/", "./", "../", "~"))
        or name.count("/") > 1
        or _format(path) is not None
        or path.suffix in (".json", ".csv", ".zst", ".gz")  # not read, but surely no Hub id: the message can say so
    )


def find_files(names: Sequence[str]) -> list[Path]:
    """The files that names, folders (searched recursively) and globs stand for: absolute, sorted, each once.

    Raises UsageError when a name matches nothing that can be read.
    """
    found: set[Path] = set()
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            files = [file for file in path.rglob("*") if not _is_hidden(file.relative_to(path))]
        elif path.exists():
            if _format(path) is None:
                raise UsageError(f"{name} is not a kind of file that is read here: use {', '.join(FORMATS)}")
            files = [path]
        elif _GLOB & set(name):
            files = [Path(match) for match in glob.glob(str(path), recursive=True)]  # noqa: PTH207 (absolute patterns)
        else:
            raise UsageError(
                f"data.source={name!r} does not exist: name a file, a folder, a glob or a Hub id (owner/name)"
            )
        readable = {file.resolve() for file in files if _format(file) is not None and file.is_file()}
        if not readable:
            raise UsageError(f"data.source={name!r} holds no text file: use {', '.join(FORMATS)}")
        found |= readable
    return sorted(found)


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
            yield from open_documents(file, self.text_field)


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


def _format(path: Path) -> str | None:
    return next((suffix for suffix in FORMATS if path.name.lower().endswith(suffix)), None)


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)

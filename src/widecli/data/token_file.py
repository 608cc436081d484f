"""Token sequences on disk: one flat array of ids, memory-mapped, beside a description that vouches for it."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from widecli.storage import write_json

Tokens = npt.NDArray[np.int64]

FORMAT = "wide.tokens/1"
_TOKENS, _OFFSETS, _DESCRIPTION = "tokens.npy", "offsets.npy", "meta.json"
# Above this size a check of every byte would delay each start by seconds: sizes must do.
_CHECKED_BYTES = 2**30


@dataclass(frozen=True)
class TokenSet:
    """Sequences of token ids, memory-mapped; `len()` is their number.

    `identity` is the cache key (hex), `source` what the documents came from. `exhausted` says that the source had no
    more text: training beyond `total_tokens` sees it again.
    """

    sequence_length: int
    total_tokens: int
    pad_token_id: int
    identity: str
    source: dict[str, str | int]
    exhausted: bool
    folder: Path
    _tokens: npt.NDArray[Any]
    _offsets: npt.NDArray[np.int64] | None

    def __len__(self) -> int:
        if self._offsets is not None:
            return len(self._offsets) - 1
        return self._tokens.size // self.sequence_length

    def largest_token(self) -> int:
        """The largest id of any sequence; padding is none."""
        return int(self._tokens.max())

    def sequence(self, index: int) -> tuple[Tokens, int]:
        """Ids of one sequence (int64 [sequence_length], padded on the right) and how many of them are text."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        if self._offsets is None:
            start = index * self.sequence_length
            return self._tokens[start : start + self.sequence_length].astype(np.int64), self.sequence_length
        start, end = int(self._offsets[index]), int(self._offsets[index + 1])
        padded = np.full(self.sequence_length, self.pad_token_id, dtype=np.int64)
        padded[: end - start] = self._tokens[start:end]
        return padded, end - start


def write_token_set(
    folder: Path,
    sequences: Iterable[Tokens],
    *,
    padded: bool,
    max_sequences: int,
    max_token_id: int,
    description: dict[str, Any],
    on_tokens: Callable[[int], None],
) -> int:
    """Write sequences into an empty folder and return the number of tokens.

    `padded`: each array is one sequence of its own length; otherwise they are whole windows joined. `description` is
    kept with them, and whether there were fewer than `max_sequences`. `on_tokens` is told each array's size. The
    description is written last: without it nothing loads.
    """
    dtype = np.dtype(np.uint16 if max_token_id < 2**16 else np.uint32)
    lengths: list[int] = []
    total, checksum = 0, 0
    with (folder / _TOKENS).open("wb") as stream:
        _write_header(stream, dtype, 0)
        start = stream.tell()
        for tokens in sequences:
            if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) <= max_token_id:
                raise ValueError(f"token ids {tokens.min()}..{tokens.max()} outside 0..{max_token_id}")
            content = tokens.astype(dtype).tobytes()
            stream.write(content)
            checksum = zlib.crc32(content, checksum)
            total += tokens.size
            lengths.append(tokens.size)
            on_tokens(tokens.size)
        stream.seek(0)
        _write_header(stream, dtype, total)
        if stream.tell() != start:
            raise ValueError("the .npy header grew over the tokens")
        stream.flush()
        os.fsync(stream.fileno())
    if padded:
        with (folder / _OFFSETS).open("wb") as stream:
            np.save(stream, np.cumsum([0, *lengths], dtype=np.int64), allow_pickle=False)
            stream.flush()
            os.fsync(stream.fileno())
    num_sequences = len(lengths) if padded else total // int(description["sequence_length"])
    record = {
        **description,
        "format": FORMAT,
        "padded": padded,
        "total_tokens": total,
        "exhausted": num_sequences < max_sequences,
        "crc32": checksum,
    }
    write_json(folder / _DESCRIPTION, record)
    return total


def _write_header(stream: Any, dtype: np.dtype[Any], count: int) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(stream, header)


def load_token_set(folder: Path) -> TokenSet | None:
    """The token set in a folder, or None if there is none or it is not what its description says."""
    try:
        record = json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            return None
        tokens = np.load(folder / _TOKENS, mmap_mode="r", allow_pickle=False)
        offsets = np.load(folder / _OFFSETS, allow_pickle=False) if record["padded"] else None
        length = int(record["sequence_length"])
        total = int(record["total_tokens"])
        sound = tokens.ndim == 1 and tokens.size == total > 0 and tokens.dtype.kind == "u" and length > 0
        if sound and offsets is not None:
            steps = np.diff(offsets)
            sound = bool(offsets[0] == 0 and offsets[-1] == total and (steps > 0).all() and (steps <= length).all())
        elif sound:
            sound = total % length == 0
        if sound and tokens.nbytes <= _CHECKED_BYTES:
            sound = zlib.crc32(tokens.data) == record["crc32"]
        if not sound:
            return None
        return TokenSet(
            sequence_length=length,
            total_tokens=total,
            pad_token_id=int(record["pad_token_id"]),
            identity=str(record["identity"]),
            source=dict(record["source"]),
            exhausted=bool(record["exhausted"]),
            folder=folder,
            _tokens=tokens,
            _offsets=offsets,
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError):
        return None

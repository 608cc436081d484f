"""Reading one text file, of any supported kind, document by document."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from widecli.data.sources import encodable
from widecli.errors import UsageError

# A .txt longer than this becomes several documents, cut at the next blank line: a book is not one document to shuffle.
TXT_DOCUMENT_CHARS = 32_768


@dataclass(frozen=True)
class Document:
    """One text and the bytes of its file that it stands for."""

    text: str
    size_bytes: int


def text_bytes(file: Path, text_field: str) -> int:
    """About how many bytes of text a file holds, without reading it: the weight of its share in a mix."""
    try:
        if file.name.lower().endswith(".parquet"):
            return _parquet_text_bytes(file, text_field)
        stored = file.stat().st_size
        if not file.name.lower().endswith(".gz"):
            return stored
        with file.open("rb") as stream:
            stream.seek(max(stored - 4, 0))
            unpacked = int.from_bytes(stream.read(4), "little")
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror or error}") from error
    # The trailer counts modulo 4 GiB and knows only the last of several joined members; then text packs about 1:3.
    return unpacked if stored <= unpacked and stored < 2**29 else 3 * stored


def open_documents(file: Path, text_field: str) -> Iterator[Document]:
    """The non-empty documents of a file, in its order.

    Raises UsageError naming the file (and the line where there is one) if it is damaged, not UTF-8 or lacks the field.
    """
    name = file.name.lower()
    reader: Callable[[Path, str], Iterator[Document]] = next(
        read for suffix, read in FORMATS.items() if name.endswith(suffix)
    )
    try:
        yield from reader(file, text_field)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UsageError(f"{file} is damaged ({error}): fetch or pack it again") from error
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror or error}") from error


def _binary(file: Path) -> BinaryIO:
    if file.name.lower().endswith(".gz"):
        return cast(BinaryIO, gzip.open(file, "rb"))
    return file.open("rb")


def _jsonl(file: Path, text_field: str) -> Iterator[Document]:
    with _binary(file) as stream:
        number = 0
        try:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                text = _text_of(json.loads(line), text_field, f"{file} line {number}")
                if text:
                    yield Document(text, len(line))
        except (ValueError, RecursionError) as error:  # bad JSON, and bytes that are not UTF-8
            raise UsageError(f"{file} line {number} is not valid JSON ({error}): mend or remove that line") from error
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UsageError(f"{file} is damaged after line {number} ({error}): fetch or pack it again") from error


def _text_of(row: object, text_field: str, where: str) -> str | None:
    if not isinstance(row, dict):
        raise UsageError(f"{where} holds no JSON object: write one {{{json.dumps(text_field)}: ...}} a line")
    if text_field not in row:
        raise UsageError(f"{where} has no field {text_field!r} (data.text_field); {fields_named(list(row))}")
    text = row[text_field]
    if text is None:
        return None
    if not isinstance(text, str):
        raise UsageError(
            f"{where}: field {text_field!r} (data.text_field) holds {type(text).__name__}, not text; "
            f"{fields_named([key for key, value in row.items() if isinstance(value, str)])}"
        )
    return encodable(text) if text.strip() else None


def fields_named(fields: list[str]) -> str:
    """The part of a message that lists what could have been meant."""
    if not fields:
        return "it has no text field at all"
    return "its fields: " + ", ".join(map(str, fields[:20])) + (", ..." if len(fields) > 20 else "")


def _txt(file: Path, text_field: str) -> Iterator[Document]:
    with _binary(file) as raw:
        stream = io.TextIOWrapper(cast(Any, raw), encoding="utf-8-sig", newline=None)
        number = 0
        held: list[str] = []
        held_chars = 0
        try:
            for line in stream:
                number += 1
                held.append(line)
                held_chars += len(line)
                # Past four times the size any line end will do: a file without blank lines is not held whole.
                if held_chars >= TXT_DOCUMENT_CHARS and (not line.strip() or held_chars >= 4 * TXT_DOCUMENT_CHARS):
                    yield from _joined(held)
                    held, held_chars = [], 0
        except UnicodeDecodeError as error:
            raise UsageError(f"{file} is not UTF-8 text (after line {number}: {error.reason}): convert it") from error
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UsageError(f"{file} is damaged after line {number} ({error}): fetch or pack it again") from error
        yield from _joined(held)


def _joined(lines: list[str]) -> Iterator[Document]:
    text = "".join(lines).strip()
    if text:
        yield Document(encodable(text), len(text.encode("utf-8", "replace")))


def _parquet_text_bytes(file: Path, text_field: str) -> int:
    with _opened_parquet(file, text_field) as table:
        metadata = table.metadata
        total = 0
        for group in range(metadata.num_row_groups):
            columns = metadata.row_group(group)
            for column in range(columns.num_columns):
                if columns.column(column).path_in_schema == text_field:
                    total += columns.column(column).total_uncompressed_size
        return total


def _parquet(file: Path, text_field: str) -> Iterator[Document]:
    import pyarrow

    with _opened_parquet(file, text_field) as table:
        row = 0
        try:
            for batch in table.iter_batches(batch_size=256, columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    kept = _text_of({text_field: text}, text_field, f"{file} row {row}")
                    if kept:
                        yield Document(kept, len(kept.encode()))
        except (pyarrow.ArrowException, OSError) as error:
            raise UsageError(f"{file} is damaged after row {row} ({_first_line(error)}): fetch it again") from error


def _opened_parquet(file: Path, text_field: str) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except PermissionError:
        raise
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{file} is no readable parquet file ({_first_line(error)}): fetch it again") from error
    names = table.schema_arrow.names
    if text_field not in names:
        table.close()
        raise UsageError(f"{file} has no column {text_field!r} (data.text_field); {fields_named(names)}")
    return table


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


# By the end of a file's name.
FORMATS: dict[str, Callable[[Path, str], Iterator[Document]]] = {
    ".jsonl": _jsonl,
    ".jsonl.gz": _jsonl,
    ".txt": _txt,
    ".txt.gz": _txt,
    ".parquet": _parquet,
}

"""The one reader of text files: of any supported kind, document by document or as one running text."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from widecli.data.sources import encodable
from widecli.errors import UsageError

# A .txt longer than this becomes several documents, cut at the next blank line: a book is not one document to shuffle.
TXT_DOCUMENT_CHARS = 32_768
# Past four times the size any line end will do, and a space where no line ends: no file is one document, or one line.
_LONGEST_CHARS = 4 * TXT_DOCUMENT_CHARS


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


def format_of(file: Path) -> str | None:
    """The entry of FORMATS that a file's name ends in, whatever its case."""
    name = file.name.lower()
    return next((suffix for suffix in FORMATS if name.endswith(suffix)), None)


def open_documents(file: Path, fields: Sequence[str]) -> Iterator[Document]:
    """The non-empty documents of a file, in its order; a row's text is in the first of `fields` that it has.

    Raises UsageError naming the file (and the line where there is one) if it is damaged, not UTF-8 or lacks the field.
    """
    reader = FORMATS[_format(file)]
    with _errors_named(file):
        yield from reader(file, fields)


def running_text(file: Path, fields: Sequence[str]) -> Iterator[str]:
    """The text of a file in pieces that follow each other: a .txt as it stands, rows with a blank line between them.

    Raises UsageError as `open_documents`.
    """
    if FORMATS[_format(file)] is _txt:
        with _errors_named(file):
            yield from _lines(file)
        return
    for number, document in enumerate(open_documents(file, fields)):
        yield document.text if number == 0 else f"\n\n{document.text}"


def _format(file: Path) -> str:
    found = format_of(file)
    if found is None:
        raise UsageError(f"{file} is not a kind of file that is read here: use {', '.join(FORMATS)}")
    return found


@contextlib.contextmanager
def _errors_named(file: Path) -> Iterator[None]:
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UsageError(f"{file} is damaged ({error}): fetch or pack it again") from error
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror or error}") from error


def _binary(file: Path) -> BinaryIO:
    if file.name.lower().endswith(".gz"):
        return cast(BinaryIO, gzip.open(file, "rb"))
    return file.open("rb")


def _jsonl(file: Path, fields: Sequence[str]) -> Iterator[Document]:
    with _binary(file) as stream:
        number = 0
        try:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                text = _text_of(json.loads(line), fields, f"{file} line {number}")
                if text:
                    yield Document(text, len(line))
        except (ValueError, RecursionError) as error:  # bad JSON, and bytes that are not UTF-8
            raise UsageError(f"{file} line {number} is not valid JSON ({error}): mend or remove that line") from error
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UsageError(f"{file} is damaged after line {number} ({error}): fetch or pack it again") from error


def _text_of(row: object, fields: Sequence[str], where: str) -> str | None:
    if not isinstance(row, dict):
        raise UsageError(f"{where} holds no JSON object: write one {{{json.dumps(fields[0])}: ...}} a line")
    field = next((name for name in fields if name in row), None)
    if field is None:
        raise UsageError(f"{where} has no field {_either(fields)}; {fields_named(list(row))}")
    text = row[field]
    if text is None:
        return None
    if not isinstance(text, str):
        raise UsageError(
            f"{where}: field {field!r} (data.text_field) holds {type(text).__name__}, not text; "
            f"{fields_named([key for key, value in row.items() if isinstance(value, str)])}"
        )
    return encodable(text) if text.strip() else None


def _either(fields: Sequence[str]) -> str:
    return f"{' or '.join(map(repr, dict.fromkeys(fields)))} (data.text_field)"


def fields_named(fields: list[str]) -> str:
    """The part of a message that lists what could have been meant."""
    if not fields:
        return "it has no text field at all"
    return "its fields: " + ", ".join(map(str, fields[:20])) + (", ..." if len(fields) > 20 else "")


def _lines(file: Path) -> Iterator[str]:
    """The lines of a .txt file with their ends, a very long one in pieces, without a byte order mark."""
    with _binary(file) as raw:
        stream = io.TextIOWrapper(cast(Any, raw), encoding="utf-8-sig", newline=None)
        number = 0
        try:
            while line := stream.readline(_LONGEST_CHARS):
                number += line.endswith("\n")
                yield line
        except UnicodeDecodeError as error:
            raise UsageError(f"{file} is not UTF-8 text (after line {number}: {error.reason}): convert it") from error
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UsageError(f"{file} is damaged after line {number} ({error}): fetch or pack it again") from error


def _txt(file: Path, fields: Sequence[str]) -> Iterator[Document]:
    held: list[str] = []
    held_chars = 0
    for line in _lines(file):
        held.append(line)
        held_chars += len(line)
        if held_chars < TXT_DOCUMENT_CHARS or (line.strip() and held_chars < _LONGEST_CHARS):
            continue
        rest = ""
        if len(line) == _LONGEST_CHARS and not line.endswith("\n"):  # in the middle of a long line
            words, space, last = line.rpartition(" ")
            if words:
                held[-1], rest = words, space + last
        yield from _joined(held)
        held, held_chars = [rest], len(rest)
    yield from _joined(held)


def _joined(lines: list[str]) -> Iterator[Document]:
    text = "".join(lines).strip()
    if text:
        yield Document(encodable(text), len(text.encode("utf-8", "replace")))


def _parquet_text_bytes(file: Path, text_field: str) -> int:
    with _opened_parquet(file, (text_field,)) as table:
        metadata = table.metadata
        total = 0
        for group in range(metadata.num_row_groups):
            columns = metadata.row_group(group)
            for column in range(columns.num_columns):
                if columns.column(column).path_in_schema == text_field:
                    total += columns.column(column).total_uncompressed_size
        return total


def _parquet(file: Path, fields: Sequence[str]) -> Iterator[Document]:
    import pyarrow

    with _opened_parquet(file, fields) as table:
        text_field = next(name for name in fields if name in table.schema_arrow.names)
        row = 0
        try:
            for batch in table.iter_batches(batch_size=256, columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    kept = _text_of({text_field: text}, fields, f"{file} row {row}")
                    if kept:
                        yield Document(kept, len(kept.encode()))
        except (pyarrow.ArrowException, OSError) as error:
            raise UsageError(f"{file} is damaged after row {row} ({_first_line(error)}): fetch it again") from error


def _opened_parquet(file: Path, fields: Sequence[str]) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except PermissionError:
        raise
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{file} is no readable parquet file ({_first_line(error)}): fetch it again") from error
    names = table.schema_arrow.names
    if not set(fields) & set(names):
        table.close()
        raise UsageError(f"{file} has no column {_either(fields)}; {fields_named(names)}")
    return table


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


# By the end of a file's name.
FORMATS: dict[str, Callable[[Path, Sequence[str]], Iterator[Document]]] = {
    ".jsonl": _jsonl,
    ".jsonl.gz": _jsonl,
    ".txt": _txt,
    ".txt.gz": _txt,
    ".parquet": _parquet,
}

"""What people see (stderr) and what programs read (stdout): kept apart in one place."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console

from widecli.ranks import current
from widecli.storage import printable

if TYPE_CHECKING:
    from rich.progress import Progress

_NO_EDGE = 10_000


def _width() -> int | None:
    """None = the terminal's. A file or a pipe has no edge at which tables would have to lose columns."""
    return None if sys.stderr.isatty() or os.environ.get("COLUMNS") else _NO_EDGE


# soft_wrap would lose tables; highlight off: figures in sentences stay uncoloured.
console = Console(stderr=True, highlight=False, width=_width())
"""Everything for people: text, warnings, tables, bars. Writes to stderr."""

_document_stream: list[IO[str]] = []


def note(message: str) -> None:
    """One line for people."""
    console.print(message, markup=False, soft_wrap=True)


def warn(message: str) -> None:
    """One warning line for people; the run goes on."""
    console.print(f"warning: {message}", style="yellow", markup=False, soft_wrap=True)


def complain(message: str) -> None:
    """The sentence with which a command ends badly."""
    console.print(f"error: {message}", style="red", markup=False, soft_wrap=True)


@contextlib.contextmanager
def stdout_for_document(reserved: bool) -> Iterator[None]:
    """While open (and `reserved`), whatever libraries print goes to stderr and only `emit_json` reaches stdout.

    Both Python's `sys.stdout` and, in a real process, file descriptor 1 are redirected: native code prints too.
    """
    if not reserved:
        yield
        return
    with contextlib.ExitStack() as stack:
        stream: IO[str] = sys.stdout
        if _is_descriptor_one(stream):
            stream.flush()
            kept = os.dup(1)
            stack.callback(os.dup2, kept, 1)
            os.dup2(2, 1)
            # A second duplicate: the stream closes its own, `kept` restores descriptor 1 afterwards.
            stream = stack.enter_context(os.fdopen(os.dup(kept), "w", encoding="utf-8"))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        _document_stream.append(stream)
        stack.callback(_document_stream.pop)
        yield


def _is_descriptor_one(stream: IO[str]) -> bool:
    try:
        return stream.fileno() == 1
    except (OSError, ValueError, AttributeError):
        return False  # a test's capture


def emit_json(document: dict[str, Any]) -> None:
    """Writes the command's one JSON document to stdout; call it once, last. Of several ranks the first one does."""
    if not current().is_first:
        return
    stream = _document_stream[-1] if _document_stream else sys.stdout
    stream.write(printable(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)) + "\n")
    stream.flush()


def progress(*, transient: bool = False) -> Progress:
    """A progress display on stderr; shows nothing when stderr is not a terminal.

    Use as a context manager; commands add their own tasks and columns (`progress.columns`).
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=transient,
        disable=not console.is_terminal,
    )

"""A job's log: what its command prints, one start after another, and the sentence with which it ended."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def opened_log(log: Path, arguments: Sequence[str]) -> Iterator[IO[bytes]]:
    """The log, open behind a line that names the command which starts now."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        output.write(f"$ wide {' '.join(arguments)}\n".encode())
        output.flush()
        yield output


def last_error(log: Path, start: int, code: int) -> str:
    """The sentence with which a command ended, from its log after byte `start`; else its last line."""
    lines: list[str] = []
    if log.exists():
        with log.open("rb") as handle:
            handle.seek(start)
            lines = [line.strip() for line in handle.read().decode("utf-8", "replace").splitlines() if line.strip()]
    sentences = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if sentences:
        return sentences[-1]
    if code < 0:
        return f"killed by {signal.Signals(-code).name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")
    return lines[-1] if lines else f"exit code {code}, and nothing in its log"

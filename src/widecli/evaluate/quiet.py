"""Keeping lm-eval's chatter off the terminal: its warnings, and progress bars where nobody watches them."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def quiet_harness() -> Iterator[None]:
    """Only errors of lm-eval's log, nothing on stdout, and no progress bar where stderr is no terminal.

    WIDE_DEBUG=1 shows everything, on stderr: stdout belongs to `--json`.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if not os.environ.get("WIDE_DEBUG"):
            log = logging.getLogger("lm_eval")
            stack.callback(log.setLevel, log.level)
            log.setLevel(logging.ERROR)
            if not sys.stderr.isatty():
                stack.enter_context(contextlib.redirect_stderr(WithoutBars(sys.stderr)))
        yield


class WithoutBars(io.TextIOBase):
    """Passes text on, except for progress bars: those begin with a carriage return and end with a bare line feed."""

    def __init__(self, target: TextIO) -> None:
        self._target = target
        self._dropped = False

    def write(self, text: str) -> int:
        """Forward `text` unless it belongs to a bar."""
        is_bar = text.startswith("\r") or (self._dropped and text in ("", "\n"))
        self._dropped = is_bar and text != "\n"
        if not is_bar:
            self._target.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what was forwarded."""
        self._target.flush()

    def isatty(self) -> bool:
        """Never: colours and bars are not wanted."""
        return False

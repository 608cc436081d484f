"""Signals while a command works: what ends it or is noted inside a block, and is as it was before afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

NOTICES = (signal.SIGTERM, signal.SIGUSR1)
"""How a scheduler says that the machine is wanted back, or that the time limit comes."""


@contextmanager
def handled(numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `handler` for these signals inside the block.

    Outside the main thread nothing changes: whoever runs us there handles signals. Nor does a signal whose handler was
    not installed from Python, which Python could not put back.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: found for number in numbers if (found := signal.getsignal(number)) is not None}
    try:  # around the installing, too: the handler may raise as soon as it stands
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, found in before.items():
            signal.signal(number, found)


@contextmanager
def collected(numbers: Sequence[signal.Signals], into: list[int]) -> Iterator[list[int]]:
    """Append these signals to `into`, which is yielded, inside the block instead of dying from them; as `handled`."""

    def note(number: int, _: FrameType | None) -> None:
        into.append(number)

    with handled(numbers, note):
        yield into

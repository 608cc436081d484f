"""Signals handled inside a block, and what they do after it."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

import pytest

from widecli.signals import NOTICES, collected, handled


def test_signals_are_collected_inside_the_block_and_handled_as_before_after_it() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(-number))
    try:
        with collected(NOTICES, []) as received:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR1)
        assert received == list(NOTICES) and seen == []
        os.kill(os.getpid(), signal.SIGUSR1)
        assert received == list(NOTICES) and seen == [-signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_ignored_signal_is_taken_inside_the_block_and_ignored_after_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # what a shell starts in the background has it so
    try:
        with collected([signal.SIGINT], []) as received:
            os.kill(os.getpid(), signal.SIGINT)
        assert received == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_may_raise_and_all_handlers_are_back() -> None:
    def end(number: int, frame: FrameType | None) -> None:
        raise InterruptedError(number)

    before = [signal.getsignal(number) for number in NOTICES]
    with pytest.raises(InterruptedError), handled(NOTICES, end):
        os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(number) for number in NOTICES] == before


def test_outside_the_main_thread_nothing_changes() -> None:
    before, inside = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with collected(NOTICES, []):
            inside.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [before]


def test_a_handler_from_outside_python_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGUSR1 else real(number))
    before = real(signal.SIGUSR1)
    with collected(NOTICES, []):
        assert real(signal.SIGUSR1) is before and real(signal.SIGTERM) is not before

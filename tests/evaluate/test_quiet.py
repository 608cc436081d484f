from __future__ import annotations

import io
import logging
import sys

import pytest

from widecli.evaluate.quiet import WithoutBars, quiet_harness


def test_bars_are_dropped_and_lines_kept() -> None:
    target = io.StringIO()
    stream = WithoutBars(target)
    print("before", file=stream)
    for text in ("\r 50%|##  |", "", "\r100%|####|", "\n"):
        stream.write(text)
    print("after", file=stream)
    print(file=stream)
    assert target.getvalue() == "before\nafter\n\n"


def test_stdout_is_spared_and_the_log_level_restored(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("lm_eval")
    before = log.level
    with quiet_harness():
        print("chatter")
        assert log.level == logging.ERROR
        assert sys.stderr.isatty() is False
    assert log.level == before
    out, err = capsys.readouterr()
    assert out == "" and "chatter" in err

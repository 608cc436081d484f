"""A sweep's lock."""

from __future__ import annotations

from pathlib import Path

import pytest

from widecli.errors import WideError
from widecli.sweep.manifest import locked


def test_a_sweep_waits_for_an_earlier_start_and_is_refused_while_it_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    with locked(tmp_path, said.append):
        with pytest.raises(WideError, match="another process runs the sweep"), locked(tmp_path, said.append, 0.3):
            pass
        assert len(said) == 1 and "waiting for processes of an earlier start" in said[0]
    with locked(tmp_path, said.append, 0.0) as handle:
        assert handle > 2 and len(said) == 1

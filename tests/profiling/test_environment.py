from __future__ import annotations

import getpass
import json
import socket
import sys
from pathlib import Path

import pytest

from widecli.profiling.environment import environment, git_revision, without_home


def test_it_names_no_host_user_or_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "home" / "somebody"
    (home / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "work")
    monkeypatch.setattr(
        sys, "argv", [f"{home}/venv/bin/wide", "calibrate", f"--data={home}/text", f"{home}/work/r.yaml"]
    )
    record = environment()
    assert record["command_line"] == ["wide", "calibrate", "--data=~/text", "r.yaml"]
    text = json.dumps(record)
    assert str(home) not in text
    assert socket.gethostname() not in text
    if len(getpass.getuser()) > 4:
        assert getpass.getuser() not in text


def test_it_says_what_a_reader_needs() -> None:
    record = environment()
    for key in ("date", "python", "os", "cpu", "cpu_cores", "ram_bytes", "gpus", "cuda", "git", "versions"):
        assert key in record
    assert record["versions"]["torch"]
    assert record["versions"]["wide"]
    assert record["cpu_cores"] >= 1


def test_a_clone_records_its_revision(repository: Path) -> None:
    revision = git_revision()
    if not (repository / ".git").exists():
        pytest.skip("not a clone")
    assert revision is not None
    assert len(revision["revision"]) == 40
    assert revision["dirty"] in (True, False)


def test_paths_elsewhere_stay_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert without_home("/data/text.jsonl") == "/data/text.jsonl"
    assert without_home(str(tmp_path)) == "."
    assert without_home(f"{tmp_path}/a") == "a"

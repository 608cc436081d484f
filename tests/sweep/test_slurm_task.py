"""What a Slurm job runs, with a small program in the place of `wide` and small ones where Slurm's commands would be."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from widecli.sweep.slurm_task import read_record, run

# Arguments: what to do, a run directory. `asked` is asked to stop by whoever runs it, as Slurm would ask them both.
PROGRAM = """
import os, pathlib, signal, sys, time
what, folder = sys.argv[1], pathlib.Path(sys.argv[2])
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
def save(*_):
    if what == "gets on":
        number = len(list((folder / "checkpoints").iterdir())) + 1
        (folder / "checkpoints" / f"step-{number:06d}").mkdir()
    print("error: stopped by a signal", file=sys.stderr)
    sys.exit(75)
if what == "fails":
    print("error: the moon is wrong", file=sys.stderr)
    sys.exit(1)
if what in ("gets on", "saves nothing new"):
    signal.signal(signal.SIGTERM, save)
if what != "works":
    os.kill(os.getppid(), signal.SIGUSR1 if what == "has no handler" else signal.SIGTERM)
    time.sleep(60)
print(os.environ["COLOUR"])
"""
COMMAND = """#!/bin/sh
echo "$(basename "$0") $*" >> "$FAKE_SLURM/calls"
[ "$(basename "$0")" = squeue ] && cat "$FAKE_SLURM/state"
exit 0
"""


class Task:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = folder / "slurm" / "0.json"
        self.log = folder / "logs" / "x.log"

    def run(self, what: str) -> int:
        """The exit code that Slurm sees."""
        program = (sys.executable, "-S", "-c", PROGRAM)
        run_dir = str(self.folder / "run")
        try:
            run([what, run_dir], str(self.log), run_dir, str(self.record), {"COLOUR": "blue"}, program)
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    def facts(self) -> dict[str, Any]:
        return read_record(self.record)

    def state(self, word: str) -> None:
        (self.folder / "state").write_text(f"{word}\n")

    def requeued(self) -> list[str]:
        lines = (self.folder / "calls").read_text().splitlines() if (self.folder / "calls").exists() else []
        return [line for line in lines if line.startswith("scontrol")]


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    (tmp_path / "bin").mkdir()
    for name in ("squeue", "scontrol"):
        (tmp_path / "bin" / name).write_text(COMMAND)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("FAKE_SLURM", str(tmp_path))
    for key, value in {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}.items():
        monkeypatch.setenv(key, value)
    found = Task(tmp_path)
    found.state("RUNNING")
    return found


def test_a_command_that_ends_well_or_badly_leaves_a_record_of_it(task: Task) -> None:
    assert task.run("works") == 0
    assert task.facts()["exit_code"] == 0 and task.facts()["machine"] == os.uname().nodename
    assert "blue" in task.log.read_text()
    assert task.run("fails") == 1
    assert (task.facts()["exit_code"], task.facts()["error"]) == (1, "the moon is wrong")
    assert task.log.read_text().count("$ wide") == 2 and task.requeued() == []


@pytest.mark.parametrize("what", ["gets on", "has no handler"])
def test_a_job_that_is_asked_to_stop_while_it_counts_as_running_puts_itself_back(task: Task, what: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert task.run(what) == 75
    assert task.requeued() == ["scontrol requeue 12_3"]  # 12 alone would be the whole array
    assert task.facts()["state"] == "stopped" and "exit_code" not in task.facts()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_job_that_slurm_requeues_itself_or_that_was_cancelled_is_left_to_it(task: Task) -> None:
    task.state("COMPLETING")
    assert task.run("gets on") == 75 and task.requeued() == []
    assert "exit_code" not in task.facts()


def test_a_run_that_is_stopped_again_and_again_and_gets_nowhere_fails(task: Task) -> None:
    for _ in range(6):
        assert task.run("gets on") == 75
    assert [task.run("saves nothing new") for _ in range(3)] == [75, 75, 1]
    assert "give it more time (--time)" in task.facts()["error"] and task.facts()["exit_code"] == 1
    assert len(task.requeued()) == 8


def test_without_slurms_commands_on_the_machine_the_job_just_ends(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert task.run("gets on") == 75 and task.facts()["state"] == "stopped"

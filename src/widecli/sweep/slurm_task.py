"""What a Slurm job of a sweep runs on its machine: one `wide` command, and the way back into the queue."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from widecli.signals import NOTICES, collected
from widecli.storage import write_json
from widecli.sweep.local import PROGRAM
from widecli.sweep.logs import last_error, opened_log

_PREEMPTED = 75
_IDLE_STOPS = 3  # a run that is stopped again and again before it saves anything would be so for ever
_CARRIED = ("idle_stops", "saved")  # what one turn of a run leaves to the next
_ASK_S = 30.0


def run(
    arguments: Sequence[str],
    log: str,
    run_dir: str,
    record: str,
    environment: Mapping[str, str],
    program: Sequence[str] = PROGRAM,
) -> None:
    """Run `wide ARGUMENTS`; when it was asked to stop, put the job back into the queue for its next turn.

    `record` is kept up to date for the sweep, which may be on another machine or not be there at all: it holds an
    `exit_code` as soon as nothing more will happen.

    Args:
        arguments: what stands after `wide`.
        log: file to which its output is appended.
        run_dir: the run's directory, whose checkpoints tell whether it gets on.
        record: JSON file for the sweep.
        environment: variables set besides this process's own.
        program: `wide` itself.

    Raises:
        SystemExit: with the command's exit code, when it did not end well; Slurm's accounts hold it then.
    """
    file = Path(record)
    before = read_record(file)
    facts: dict[str, Any] = {"job": job_id(), "machine": os.uname().nodename, "started": time.time()}
    facts |= {"idle_stops": 0, "saved": None, **{key: before[key] for key in _CARRIED if key in before}}
    write_json(file, {**facts, "state": "running"})
    with collected(NOTICES, []) as stop, opened_log(Path(log), arguments) as output:
        begins = output.tell()
        process = subprocess.Popen(
            [*program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )
        code = _wait(process, stop)
    if code == 0:
        write_json(file, {**facts, "state": "ended", "exit_code": 0})
        return
    if code == _PREEMPTED or (stop and code < 0):
        saved = max((path.name for path in Path(run_dir, "checkpoints").glob("*")), default="")
        facts |= {"saved": saved, "idle_stops": facts["idle_stops"] + 1 if saved == facts["saved"] else 0}
        if facts["idle_stops"] < _IDLE_STOPS:
            # first the record: once the job is back in the queue, this process may be killed at any moment
            write_json(file, {**facts, "state": "stopped"})
            put_back()
            raise SystemExit(_PREEMPTED)
        code = 1
        error = f"stopped {_IDLE_STOPS} times in a row without getting on: give it more time (--time)"
    else:
        error = last_error(Path(log), begins, code)
    write_json(file, {**facts, "state": "ended", "exit_code": code, "error": error})
    raise SystemExit(code if code > 0 else 128 - code)


def job_id() -> str | None:
    """This job's name in the queue. An array's own number would mean all of its jobs."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def put_back() -> None:
    """Ask Slurm to run this job again, unless it does so anyway or somebody cancelled it.

    In both cases the job is no longer `RUNNING` by now. A job that a preemption with a grace time has asked to stop
    still is, and Slurm takes its end for good. Where this does not work the sweep sees a job that stopped and submits
    it again.
    """
    job = job_id()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        state = _ask("squeue", "--noheader", f"--jobs={job}", "--format=%T")
        if state == "RUNNING":
            _ask("scontrol", "requeue", str(job))


def read_record(file: Path) -> dict[str, Any]:
    """What a job wrote last; empty when that is nothing."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(file.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def carried(file: Path | None) -> dict[str, Any]:
    """What a run's next job has to know of its last one, as a record."""
    before = read_record(file) if file is not None else {}
    return {key: before[key] for key in _CARRIED if key in before and before.get("state") == "stopped"}


def _ask(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_ASK_S)
    return done.stdout.strip()


def _wait(process: subprocess.Popen[bytes], stop: list[int]) -> int:
    """The exit code. Slurm mostly signals the command itself too; being asked twice does it no harm."""
    asked = False
    while True:
        try:
            return process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            if stop and not asked:
                asked = True
                process.send_signal(signal.SIGTERM)

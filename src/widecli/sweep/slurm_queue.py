"""What Slurm says of jobs: where they stand in its queue, and how those ended that are no longer there.

`squeue` answers on every cluster; `sacct`, which submitit follows jobs by, only where accounting is switched on.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from widecli.errors import WideError
from widecli.sweep.runner import INTERRUPTED, PREEMPTED

_ASK_S = 60.0
# How a job ended -> the exit code that this stands for, and the sentence.
_ENDS: Mapping[str, tuple[int, str]] = {
    "CANCELLED": (INTERRUPTED, "cancelled in Slurm's queue; the same command submits it again"),
    "TIMEOUT": (1, "Slurm ended it at its time limit before it had saved: give it more with --time, or more notice"),
    "OUT_OF_MEMORY": (1, "Slurm ended it, out of memory: ask for more with --mem"),
    "DEADLINE": (1, "Slurm ended it at its deadline"),
    "PREEMPTED": (PREEMPTED, "Slurm gave its machine to another job"),
    "NODE_FAIL": (PREEMPTED, "its machine failed"),
    "BOOT_FAIL": (PREEMPTED, "its machine did not start"),
    "REVOKED": (PREEMPTED, "Slurm took it back"),
}
_ON_A_MACHINE = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")


@dataclass(frozen=True)
class Place:
    """A job's line in the queue."""

    name: str
    state: str
    reason: str
    machine: str

    @property
    def runs(self) -> bool:
        """Whether it is on a machine, not waiting for one."""
        return self.state in _ON_A_MACHINE

    def __str__(self) -> str:
        if self.runs:
            return self.machine or "Slurm"
        return f"queued ({self.reason})" if self.reason and self.reason != "None" else "queued"


def queue() -> dict[str, Place]:
    """This user's jobs that wait or run, by id (`12`, or `12_3` in an array). Raises WideError when Slurm is silent."""
    # a list of ids would fail as a whole when Slurm has forgotten one
    text = ask("squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i|%T|%N|%j|%r")
    places = {}
    for line in text.splitlines():
        fields = line.strip().split("|", 4)
        if len(fields) == 5:
            job, state, machine, name, reason = fields
            places[job] = Place(name, state, reason, machine)
    return places


def ended(job: str) -> str | None:
    """The state in which a job left the queue (`FAILED`, `OUT_OF_MEMORY`), None when Slurm has no memory of it."""
    with contextlib.suppress(WideError):
        words = ask("sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={job}", "--format=State").split()
        if words:
            return words[0].rstrip("+")  # CANCELLED by 1000
    with contextlib.suppress(WideError):
        if found := re.search(r"JobState=(\w+)", ask("scontrol", "--oneliner", "show", "job", job)):
            return found.group(1)
    return None


def meaning(state: str | None) -> tuple[int, str] | None:
    """An exit code and a sentence for how a job ended, where its state alone says it."""
    return _ENDS.get(state or "")


def largest_array() -> int:
    """Most tasks in an array that this cluster takes; 1 = no arrays."""
    text = ask("scontrol", "show", "config")
    limits = [int(n) for n in re.findall(r"(?:MaxArraySize\s*=\s*|max_array_tasks=)(\d+)", text)]
    return max(1, min(limits, default=1))


def ask(*command: str) -> str:
    """What a command of Slurm prints. Raises WideError with its complaint."""
    try:
        # in a session of its own: Ctrl-C is for the sweep
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, start_new_session=True)
    except FileNotFoundError as error:
        raise WideError(f"there is no {command[0]} here: --executor slurm runs on a machine of the cluster") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WideError(f"{command[0]} does not answer ({error}): is Slurm's controller up?") from error
    if done.returncode:
        raise WideError(f"{command[0]} refuses: {_one_line(done.stderr or done.stdout)}")
    return done.stdout


def _one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip()) or "it says nothing"

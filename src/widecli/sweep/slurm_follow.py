"""Following jobs in a Slurm queue: by looks at the queue, by the record that each keeps, and by Slurm's memory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from widecli.errors import WideError
from widecli.sweep import slurm_queue, slurm_task
from widecli.sweep.runner import PREEMPTED

BATCH = "batch.json"
_LOOKS_GONE = 3  # in so many looks at the queue: a shared disk shows a job's last words late


class View:
    """The queue as it was at the last look; looked at now and then, for all jobs at once."""

    def __init__(self, every_s: float, note: Callable[[str], None]) -> None:
        self.number = 0
        self.places: Mapping[str, slurm_queue.Place] = {}
        self._every_s = every_s
        self._note = note
        self._next = 0.0
        self._silent = False

    def look(self) -> int:
        """The number of the newest look; looks again when it is time."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every_s
            try:
                self.places = slurm_queue.queue()
                self.number += 1
                self._silent = False
            except WideError as error:
                if not self._silent:
                    self._note(f"{error}; jobs run on, waiting for it")
                self._silent = True
        return self.number


class SlurmHandle:
    """One job in the queue, from its submission until it has left."""

    def __init__(self, name: str, view: View) -> None:
        self.name = name
        self.number = ""
        """Its number in the queue: `12`, in an array `12_3`."""
        self.task: tuple[list[str], str, str] = ([], "", "")
        self.where = "Slurm"
        self.since: float | None = None
        self.is_over = False
        self._view = view
        self._record = Path()
        self._seen = 0
        self._gone = 0
        self._code: int | None = None
        self._error = ""

    def submitted(self, number: str, record: Path) -> None:
        """The job is in the queue under `number`."""
        self.number, self._record = number, record
        self.where = f"Slurm as job {number}"
        self._seen = self._view.number  # an older look does not know it

    def refused(self) -> None:
        """There was no room for it: it ends as a job does that goes on later."""
        self._end(PREEMPTED, "Slurm had no room for it")

    def poll(self) -> int | None:
        """The exit code once the job is over, by its record, else by what Slurm says of it."""
        if self._code is None and (look := self._view.look()) != self._seen:
            self._seen = look
            self._update(self._view.places.get(self.number), slurm_task.read_record(self._record))
        return self._code

    def error(self) -> str:
        """Why it ended badly."""
        return self._error

    def stop(self) -> None:
        """Nothing: the job outlives the sweep. `scancel` ends it."""

    kill = stop

    def _update(self, place: slurm_queue.Place | None, record: Mapping[str, Any]) -> None:
        if "exit_code" in record:
            self._end(int(record["exit_code"]), str(record.get("error", "")))
        elif place is not None:
            self._gone = 0
            self.where = str(place)
            age = max(0.0, time.time() - float(record.get("started", time.time())))
            self.since = time.monotonic() - age if place.runs else None
        elif self._gone < _LOOKS_GONE:
            self._gone += 1
        else:
            self._end(*self._last_words(record))

    def _last_words(self, record: Mapping[str, Any]) -> tuple[int, str]:
        """For a job that left the queue without saying how it ended."""
        state = slurm_queue.ended(self.number)
        if (known := slurm_queue.meaning(state)) is not None:
            return known
        if record.get("state") == "stopped":
            return PREEMPTED, "it saved and ended, and could not go back into the queue by itself"
        files = sorted(self._record.parent.glob(f"{self.number}_*log.err"))
        lines = [line for file in files for line in file.read_text(errors="replace").splitlines() if line.strip()]
        if lines:
            return 1, f"Slurm job {self.number} ended as {state or 'unknown'}: {lines[-1].strip()}"
        return 1, (
            f"Slurm job {self.number} ended as {state or 'unknown'} and left neither output nor a record: do the "
            f"cluster's machines see {self._record.parent}?"
        )

    def _end(self, code: int, error: str) -> None:
        self._code, self._error, self.is_over = code, error, True


def submitted_jobs(folder: Path, places: Mapping[str, slurm_queue.Place]) -> Iterator[tuple[str, str, Path]]:
    """What earlier starts of a sweep submitted, the newest first: the job's name, its number, its record."""
    for file in sorted(folder.glob(f"slurm/*/{BATCH}"), reverse=True):
        try:
            batch = json.loads(file.read_text(encoding="utf-8"))
            tasks, base = list(batch["tasks"]), batch["job_id"]
        except (OSError, ValueError, TypeError, KeyError):
            continue
        if base is None:
            base = next((n.split("_")[0] for n, place in places.items() if place.name == batch.get("name")), None)
        for index, name in enumerate(tasks if base else ()):
            yield name, f"{base}_{index}" if len(tasks) > 1 else str(base), file.parent / f"{index}.json"


def numbers_in_queue(folder: Path) -> list[str]:
    """The numbers of a sweep's jobs that wait or run; empty as well where there is no Slurm to ask."""
    if not (folder / "slurm").is_dir():
        return []
    try:
        places = slurm_queue.queue()
    except WideError:
        return []
    return sorted(number for _, number, _ in submitted_jobs(folder, places) if number in places)

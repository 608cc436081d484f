"""A Slurm cluster as an executor: arrays of jobs through submitit, followed by the queue and by what they write.

Below the sweep's directory `slurm/` has a folder for every submission: `batch.json` (what was submitted), submitit's
files, and a record that each job keeps (`slurm_task`), by which it is followed (`slurm_follow`). So nothing is lost
when the sweep ends before its jobs: the next start reads the batches and finds in the queue what is still on its way.
submitit hands a job its function and arguments, texts all of them, in a pickle of its own; nothing here reads one, and
results come from the runs themselves.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from widecli.errors import UsageError, WideError
from widecli.storage import write_json
from widecli.sweep import slurm_queue, slurm_task
from widecli.sweep.jobs import Job, State
from widecli.sweep.local import PROGRAM
from widecli.sweep.slurm_follow import BATCH, SlurmHandle, View, submitted_jobs

if TYPE_CHECKING:
    from widecli.recipe.schema import SlurmSection

_SCHEMA = "wide.slurm_batch/1"
_WAIT_AFTER_REFUSAL_S = 60.0
# What sbatch says when there is no room for more jobs now, or its controller is busy: time heals it.
_NO_ROOM = (
    "MaxSubmit",
    "MaxJobCount",
    "maximum number of jobs",
    "temporarily unable",
    "temporarily unavailable",
    "timed out",
)


class SlurmExecutor:
    """Collects the jobs that are started together and submits them as arrays, as large as the cluster takes."""

    outlives = True

    def __init__(
        self,
        section: SlurmSection,
        folder: Path,
        environment: Mapping[str, str],
        note: Callable[[str], None],
        program: Sequence[str] = PROGRAM,
    ) -> None:
        """Args.

        section: what to ask of the cluster.
        folder: the sweep's directory, on a disk that the cluster's machines see.
        environment: variables set for the jobs besides those of this process.
        note: takes lines for people.
        program: `wide` itself.

        Raises:
            UsageError: submitit is not installed, or this is no machine of a Slurm cluster.
        """
        refuse_without_slurm()
        self.section = section
        self.slots = section.max_jobs
        self.view = View(section.poll, note)
        self._folder = folder.resolve()
        self._environment = dict(environment)
        self._note = note
        self._program = list(program)
        self._largest = self._limit = slurm_queue.largest_array()
        self._collected: list[SlurmHandle] = []
        self._live: list[SlurmHandle] = []
        self._not_before = 0.0
        self._records: dict[str, Path] = {}

    def has_room(self) -> bool:
        """Whether one more job may go into the queue."""
        self._live = [handle for handle in self._live if not handle.is_over]
        room = len(self._live) + len(self._collected) < self.slots
        return room and time.monotonic() >= self._not_before

    def start(self, job: Job, arguments: Sequence[str]) -> SlurmHandle:
        """Take a job into the next submission."""
        assert job.log is not None and job.path is not None
        handle = SlurmHandle(job.name, self.view)
        handle.task = (list(arguments), str(job.log.resolve()), str(job.path.resolve()))
        self._collected.append(handle)
        return handle

    def submit(self) -> None:
        """Submit what was collected, as arrays. Raises UsageError with sbatch's words when it takes none of it."""
        waiting, self._collected = self._collected, []
        while waiting:
            batch, waiting = waiting[: self._largest], waiting[self._largest :]
            try:
                with _uninterrupted():
                    self._submit(batch)
                self._live += batch
            except WideError as error:
                if not any(words.lower() in str(error).lower() for words in _NO_ROOM):
                    raise
                if len(batch) > 1:  # a smaller array may find room
                    self._largest = len(batch) // 2
                    waiting = batch + waiting
                    continue
                self._note(f"Slurm takes no more jobs now ({error}); {len(waiting) + 1} wait here")
                self._not_before = time.monotonic() + _WAIT_AFTER_REFUSAL_S
                for handle in [*batch, *waiting]:
                    handle.refused()
                self._largest = self._limit
                return

    def _submit(self, batch: list[SlurmHandle]) -> None:
        import submitit

        name = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        folder = self._folder / "slurm" / name
        # written before and after: a batch whose number was lost in between is found by its name in the queue
        document = {"schema": _SCHEMA, "name": f"{self._folder.name}.{name}", "tasks": [h.name for h in batch]}
        write_json(folder / BATCH, {**document, "job_id": None})
        executor = submitit.SlurmExecutor(folder=folder)
        executor.update_parameters(**parameters(self.section, str(document["name"])))
        records = [folder / f"{index}.json" for index in range(len(batch))]
        for handle, record in zip(batch, records, strict=True):
            if before := slurm_task.carried(self._records.get(handle.name)):
                write_json(record, before)
        try:
            # submitit prints what sbatch complains of, and raises it
            with _submission_environment(self.section), contextlib.redirect_stderr(io.StringIO()):
                jobs = executor.map_array(
                    slurm_task.run,
                    *zip(*(handle.task for handle in batch), strict=True),
                    map(str, records),
                    [self._environment] * len(batch),
                    [self._program] * len(batch),
                )
        except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError, OSError) as error:
            words = [line.strip() for line in str(error).splitlines() if line.strip()]
            said = "; ".join(line.removeprefix("sbatch: error: ") for line in words)
            raise UsageError(f"sbatch refuses the jobs: {said or 'it says nothing'}") from error
        for handle, job, record in zip(batch, jobs, records, strict=True):
            handle.submitted(str(job.job_id), record)
            self._records[handle.name] = record
        write_json(folder / BATCH, {**document, "job_id": str(jobs[0].job_id).split("_")[0]})

    def find(self, jobs: Iterable[Job]) -> dict[Job, SlurmHandle]:
        """Those of the waiting jobs that an earlier start of this sweep submitted and that are on their way.

        Raises:
            WideError: Slurm does not answer, so that nobody knows.
        """
        places = slurm_queue.queue()
        waiting = {job.name: job for job in jobs if job.state is State.WAITING}
        found: dict[Job, SlurmHandle] = {}
        for name, number, record in submitted_jobs(self._folder, places):
            job = waiting.get(name)
            if number in places and job is not None and job not in found:
                handle = SlurmHandle(name, self.view)
                handle.submitted(number, record)
                self._records[name] = record
                job.log = self._folder / "logs" / f"{name}.log"
                found[job] = handle
        self._live += found.values()
        return found


def parameters(section: SlurmSection, name: str) -> dict[str, Any]:
    """What submitit is told for every job of a submission."""
    # --requeue and a notice: what is preempted, or at its time limit, saves itself and comes again
    more = {"time": section.time, "requeue": True, "signal": f"USR1@{section.notice}"}
    more |= {key.lstrip("-").replace("_", "-"): value for key, value in section.extra.items()}
    given = {
        "job_name": name,
        "partition": section.partition,
        "account": section.account,
        "mem": section.mem,
        "gpus_per_node": section.gpus or None,
        "cpus_per_task": section.cpus,
        "ntasks_per_node": 1,
        "nodes": 1,
        "array_parallelism": section.max_jobs,
        "setup": list(section.setup) or None,
        "srun_args": [f"--cpus-per-task={section.cpus}"],  # a step does not inherit them since Slurm 22.05
        "additional_parameters": more,
    }
    return {key: value for key, value in given.items() if value is not None}


def sbatch_options(section: SlurmSection) -> list[str]:
    """The options that every job is submitted with, as people write them."""
    given = parameters(section, "")
    options = {key.replace("_", "-"): value for key, value in given.items() if isinstance(value, (str, int))}
    options = {key: value for key, value in options.items() if key not in ("job-name", "array-parallelism")}
    options |= given["additional_parameters"]
    return [f"--{key}" if value is True else f"--{key}={value}" for key, value in options.items()]


def refuse_without_slurm() -> None:
    """Raises UsageError where jobs cannot be submitted, with what to do."""
    import importlib.util
    import shutil

    if importlib.util.find_spec("submitit") is None:
        raise UsageError("--executor slurm needs submitit: pip install 'widecli[cluster]'")
    for command in ("sbatch", "squeue", "srun"):
        if shutil.which(command) is None:
            raise UsageError(f"there is no {command} here: --executor slurm runs on a machine of a Slurm cluster")


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Keeps Ctrl-C from sbatch, which would have submitted without telling the number."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _submission_environment(section: SlurmSection) -> Iterator[None]:
    """Hides what would win over the recipe (sbatch takes SBATCH_... before the script's own lines) or comes from a job
    that this sweep itself runs in."""
    hidden = {"SBATCH_TIMELIMIT", "SBATCH_SIGNAL", "SBATCH_NO_REQUEUE", "SBATCH_ARRAY_INX", "SBATCH_JOB_NAME"}
    hidden |= {f"SBATCH_{key.upper()}" for key in ("partition", "account") if getattr(section, key) is not None}
    hidden |= {f"SBATCH_{key.lstrip('-').replace('-', '_').upper()}" for key in section.extra}
    if "SLURM_JOB_ID" in os.environ:
        hidden |= {key for key in os.environ if key.startswith(("SLURM_", "SRUN_")) and key != "SLURM_CONF"}
    kept = {key: os.environ.pop(key) for key in hidden if key in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)

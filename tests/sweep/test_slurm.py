"""The Slurm executor without Slurm: small programs stand where its commands would and say what they are told to."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from widecli.errors import UsageError, WideError
from widecli.recipe.schema import SlurmSection
from widecli.storage import write_json
from widecli.sweep import slurm, slurm_queue
from widecli.sweep.jobs import Job, State
from widecli.sweep.runner import Stop, run_jobs
from widecli.sweep.slurm import SlurmExecutor, sbatch_options
from widecli.sweep.slurm_follow import numbers_in_queue

# Every command writes down how it was called. sbatch takes arrays of at most `most`, else it says what `refusal` holds.
COMMAND = """#!/bin/sh
cd "$FAKE_SLURM"
name=$(basename "$0")
echo "$name $*" >> calls
case $name in
sbatch)
    tasks=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\)%.*/\\1/p' "$1"); tasks=$((${tasks:-0} + 1))
    if [ -e refusal ] && [ $tasks -gt $(cat most) ]; then cat refusal >&2; exit 1; fi
    number=$(($(cat number) + 1)); echo $number > number
    env | grep ^SBATCH_ > environment
    cp "$1" script-$number; echo "$tasks" > tasks-$number
    echo "Submitted batch job $number" ;;
squeue) cat queue; exit $(cat squeue-exit) ;;
sacct) [ -e state ] && cat state || { echo "Slurm accounting storage is disabled" >&2; exit 1; } ;;
scontrol) if [ "$1" = show ] && [ "$2" = config ]; then echo "MaxArraySize            = 4";
    elif [ -e shown ]; then cat shown; else echo "Invalid job id specified" >&2; exit 1; fi ;;
esac
"""


class FakeSlurm:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        for name in ("sbatch", "squeue", "scontrol", "sacct", "srun"):
            (folder / "bin" / name).write_text(COMMAND)
            (folder / "bin" / name).chmod(0o755)
        for file, content in {"number": "10", "queue": "", "squeue-exit": "0", "calls": "", "most": "0"}.items():
            (folder / file).write_text(content)

    def says(self, file: str, text: str) -> None:
        (self.folder / file).write_text(text)

    def queue(self, *lines: str) -> None:
        self.says("queue", "".join(f"{line}\n" for line in lines))

    def calls(self, command: str) -> list[str]:
        lines = (self.folder / "calls").read_text().splitlines()
        return [line for line in lines if line.split()[0] == command]

    def script(self, number: int = 11) -> dict[str, str]:
        """The options of a submitted script."""
        text = (self.folder / f"script-{number}").read_text()
        lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH --")]
        return {
            key: shlex.split(value)[0] if value else "" for key, _, value in (line.partition("=") for line in lines)
        }

    def arrays(self) -> list[int]:
        return [int(p.read_text()) for p in sorted(self.folder.glob("tasks-*"), key=lambda p: int(p.name[6:]))]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    pytest.importorskip("submitit", reason="submitit is not installed: pip install 'widecli[cluster]'")
    found = FakeSlurm(tmp_path / "fake")
    monkeypatch.setenv("FAKE_SLURM", str(found.folder))
    monkeypatch.setenv("PATH", f"{found.folder}/bin:/usr/bin:/bin")
    for key in [key for key in os.environ if key.startswith(("SLURM_", "SBATCH_"))]:
        monkeypatch.delenv(key)
    return found


class Bench:
    """Jobs of a sweep in a folder, and a stand-in for what runs on the cluster: it only writes records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self.stop = Stop()

    def jobs(self, names: str) -> list[Job]:
        return [self.job(name) for name in names]

    def job(self, name: str) -> Job:
        return Job(name, "calibrate", lambda: self.folder / name, lambda: ["calibrate", name])

    def executor(self, **settings: Any) -> SlurmExecutor:
        return SlurmExecutor(
            SlurmSection.model_validate({"poll": 0.01, **settings}), self.folder, {}, self.notes.append
        )

    def run(self, jobs: Sequence[Job], executor: SlurmExecutor, **settings: Any) -> None:
        settings = {"changed": lambda job: None, "stop": self.stop, **settings}
        run_jobs(jobs, executor, self.folder / "logs", **settings)

    def records(self) -> list[Path]:
        """Where the records of all submitted tasks go."""
        batches = sorted(self.folder.glob("slurm/*/batch.json"))
        return [b.parent / f"{i}.json" for b in batches for i in range(len(json.loads(b.read_text())["tasks"]))]

    def finish(self, name: str, record: Path) -> None:
        """As a job does that ends well."""
        write_json(self.folder / name / "summary.json", {"schema": "x", "seconds": 1.0})
        write_json(record, {"state": "ended", "exit_code": 0})

    def leave(self) -> None:
        """As Ctrl-C does."""
        self.stop.received.append(signal.SIGINT)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr("widecli.sweep.runner._POLL_S", 0.01)
    return Bench(tmp_path / "sweep-x")


def test_a_submission_asks_for_what_the_recipe_says_and_can_be_requeued(
    fake: FakeSlurm, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PARTITION", "QOS"):
        monkeypatch.setenv(f"SBATCH_{name}", "elsewhere")  # sbatch takes it before the script's own line
    settings = {"partition": "gpu", "account": "lab", "time": "1-00:00:00", "gpus": 2, "cpus": 8, "mem": "64G"}
    settings |= {"extra": {"constraint": "h100", "exclusive": True}, "setup": ["module load cuda"], "notice": 300}
    bench.run(bench.jobs("ab"), bench.executor(**settings), waiting=bench.leave)
    options = fake.script()
    expected = {"partition": "gpu", "account": "lab", "time": "1-00:00:00", "gpus-per-node": "2", "mem": "64G"}
    expected |= {"cpus-per-task": "8", "constraint": "h100", "exclusive": "", "requeue": "", "signal": "USR1@300"}
    expected |= {"array": "0-1%2", "open-mode": "append"}
    assert expected.items() <= options.items()
    assert options["job-name"].startswith("sweep-x.")
    script = (fake.folder / "script-11").read_text()
    assert script.index("module load cuda") < script.index("srun")
    assert "--cpus-per-task=8" in next(line for line in script.splitlines() if line.startswith("srun"))
    assert (fake.folder / "environment").read_text() == "SBATCH_QOS=elsewhere\n"  # a default of the user's own
    assert os.environ["SBATCH_PARTITION"] == "elsewhere"
    assert {"--partition=gpu", "--requeue", "--exclusive", "--gpus-per-node=2"} <= set(
        sbatch_options(SlurmSection.model_validate(settings))
    )


def test_without_a_partition_or_gpus_nothing_is_asked_and_one_job_is_no_array(fake: FakeSlurm, bench: Bench) -> None:
    bench.run(bench.jobs("a"), bench.executor(gpus=0), waiting=bench.leave)
    options = fake.script()
    assert not {"partition", "account", "mem", "gpus-per-node", "array"} & set(options)
    assert options["time"] == "4:00:00"


def test_arrays_are_no_larger_than_the_cluster_takes_and_no_more_jobs_wait_than_allowed(
    fake: FakeSlurm, bench: Bench
) -> None:
    jobs = bench.jobs("abcdefgh")
    bench.run(jobs, bench.executor(max_jobs=6), waiting=bench.leave)
    assert fake.arrays() == [4, 2]  # MaxArraySize = 4, six jobs at once
    assert [str(job.state) for job in jobs] == ["running"] * 6 + ["waiting"] * 2


def test_where_slurm_takes_fewer_jobs_the_rest_waits_for_room(
    fake: FakeSlurm, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "_WAIT_AFTER_REFUSAL_S", 0.05)
    fake.says(
        "refusal", "sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: Job violates"
    )
    fake.says("most", "2")
    jobs = bench.jobs("abcd")
    bench.run(jobs, bench.executor(), waiting=bench.leave)
    assert fake.arrays() == [2, 2]
    fake.says("most", "0")
    more = bench.jobs("xy")
    bench.stop = Stop()

    def room_comes() -> None:
        if len(fake.calls("sbatch")) > 7:
            (fake.folder / "refusal").unlink(missing_ok=True)
        if fake.arrays()[2:]:
            bench.leave()

    bench.run(more, bench.executor(), waiting=room_comes)
    assert fake.arrays() == [2, 2, 2] and "AssocMaxSubmitJobLimit" in bench.notes[0]


def test_other_refusals_of_sbatch_end_the_sweep_in_its_words_and_nothing_is_left_running(
    fake: FakeSlurm, bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    fake.says("refusal", "sbatch: error: invalid partition specified: nope\nsbatch: error: Invalid partition name\n")
    jobs = bench.jobs("ab")
    with pytest.raises(UsageError, match=r"sbatch refuses the jobs: invalid partition specified: nope; Invalid part"):
        bench.run(jobs, bench.executor())
    assert {job.state for job in jobs} == {State.WAITING} and len(fake.calls("sbatch")) == 1
    assert capfd.readouterr().err == ""  # said once, by the error


def test_a_sweep_that_ends_leaves_its_jobs_and_the_next_start_finds_them(fake: FakeSlurm, bench: Bench) -> None:
    bench.run(bench.jobs("abc"), bench.executor(), waiting=bench.leave)
    fake.queue("11_0|RUNNING|n1|sweep-x|None", "11_1|PENDING||sweep-x|Priority")  # the third one is gone
    assert fake.calls("scancel") == [] and numbers_in_queue(bench.folder) == ["11_0", "11_1"]
    bench.stop, again, executor = Stop(), bench.jobs("abc"), bench.executor()
    for job in again:
        job.look()
    found = executor.find(again)
    assert {job.name: handle.number for job, handle in found.items()} == {"a": "11_0", "b": "11_1"}
    seen: dict[str, str] = {}

    def follow() -> None:
        seen.update({job.name: job.where for job in again if job.state is State.RUNNING})
        if len(bench.records()) == 4 and seen.get("a") == "n1":
            for job, record in zip([*again, again[2]], bench.records(), strict=True):
                bench.finish(job.name, record)

    bench.run(again, executor, waiting=follow, found=found)
    assert {str(job.state) for job in again} == {"done"}
    assert seen["b"] == "queued (Priority)" and again[0].seconds is not None
    assert fake.arrays() == [3, 1]  # the one that was gone, alone


def test_a_submission_whose_number_was_lost_is_found_by_its_name(fake: FakeSlurm, bench: Bench) -> None:
    bench.run(bench.jobs("ab"), bench.executor(), waiting=bench.leave)
    (file,) = bench.folder.glob("slurm/*/batch.json")
    batch = json.loads(file.read_text())
    write_json(file, {**batch, "job_id": None})  # as written before sbatch was called
    fake.queue(f"11_1|RUNNING|n1|{batch['name']}|None")
    jobs = bench.jobs("ab")
    assert {job.name: handle.number for job, handle in bench.executor().find(jobs).items()} == {"b": "11_1"}


def test_nothing_is_submitted_while_slurm_does_not_say_what_runs_already(fake: FakeSlurm, bench: Bench) -> None:
    executor = bench.executor()
    fake.says("squeue-exit", "1")
    with pytest.raises(WideError, match="squeue refuses"):
        executor.find(bench.jobs("a"))


def test_a_silent_queue_ends_no_job(fake: FakeSlurm, bench: Bench) -> None:
    jobs = bench.jobs("a")
    looks: list[int] = []

    def controller_comes_back() -> None:
        looks.append(len(fake.calls("squeue")))
        fake.says("squeue-exit", "1")
        if looks[-1] > 8:
            bench.finish("a", bench.records()[0])
            fake.says("squeue-exit", "0")

    bench.run(jobs, bench.executor(), waiting=controller_comes_back)
    assert jobs[0].state is State.DONE
    assert len([text for text in bench.notes if "squeue" in text]) == 1


@pytest.mark.parametrize(
    ("state", "record", "ends", "words"),
    [
        ("OUT_OF_MEMORY", {"state": "running"}, "failed", "--mem"),
        ("TIMEOUT", {"state": "running"}, "failed", "--time"),
        ("CANCELLED by 1000", {"state": "stopped"}, "failed", "cancelled in Slurm's queue"),
        ("FAILED", {"state": "running"}, "failed", "ended as FAILED: the last words"),
        ("COMPLETED", {}, "failed", "left neither output nor a record"),
        ("", {}, "failed", "do the cluster's machines see"),
    ],
)
def test_a_job_that_leaves_the_queue_without_a_word_is_explained_by_its_state(
    fake: FakeSlurm, bench: Bench, state: str, record: dict[str, Any], ends: str, words: str
) -> None:
    if state:
        fake.says("state", f"{state}\n")
    jobs = bench.jobs("a")

    def leave_the_queue() -> None:
        if record:
            write_json(bench.records()[0], record)
        if "last words" in words:
            (bench.records()[0].parent / "11_0_log.err").write_text("submitit INFO\nthe last words\n\n")

    bench.run(jobs, bench.executor(), waiting=leave_the_queue)
    assert str(jobs[0].state) == ends and words in str(jobs[0].error)
    assert len(fake.arrays()) == 1


@pytest.mark.parametrize(
    ("state", "record"),
    [("NODE_FAIL", {"state": "running"}), ("PREEMPTED", {"state": "running"}), ("FAILED", {"state": "stopped"})],
    ids=["its node failed", "taken away", "saved, and no way back into the queue"],
)
def test_a_job_that_lost_its_machine_is_submitted_again_and_that_is_no_failure(
    fake: FakeSlurm, bench: Bench, state: str, record: dict[str, Any]
) -> None:
    fake.says("shown", f"JobId=11 JobState={state} Reason=None")  # without accounts, scontrol remembers for a while
    (job,) = jobs = bench.jobs("a")

    def second_time_it_works() -> None:
        first, *second = bench.records()
        write_json(first, record)
        if second:
            bench.finish("a", second[0])

    bench.run(jobs, bench.executor(), waiting=second_time_it_works, retries=0)
    assert job.state is State.DONE and job.failures == 0 and fake.arrays() == [1, 1]


def test_a_run_that_gets_nowhere_is_known_as_such_in_its_next_job(fake: FakeSlurm, bench: Bench) -> None:
    jobs = bench.jobs("a")

    def stop_twice() -> None:
        first, *second = bench.records()
        if not second:
            write_json(first, {"state": "stopped", "idle_stops": 2, "saved": "step-000004", "job": "11"})
        else:
            assert json.loads(second[0].read_text()) == {"idle_stops": 2, "saved": "step-000004"}
            bench.leave()

    bench.run(jobs, bench.executor(), waiting=stop_twice)
    assert fake.arrays() == [1, 1]


def test_the_largest_array_is_the_smaller_of_two_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    config = "MaxArraySize            = 1001\nSchedulerParameters     = defer,max_array_tasks=64\n"
    monkeypatch.setattr(slurm_queue, "ask", lambda *_: config)
    assert slurm_queue.largest_array() == 64
    monkeypatch.setattr(slurm_queue, "ask", lambda *_: "MaxArraySize            = 0\n")
    assert slurm_queue.largest_array() == 1


def test_a_machine_without_submitit_or_slurm_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "submitit" else find(name))
    with pytest.raises(UsageError, match=r"pip install 'widecli\[cluster\]'"):
        slurm.refuse_without_slurm()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: sys)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="there is no sbatch here"):
        slurm.refuse_without_slurm()


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"--time": "1:00"}, "set sweep.slurm.time"),
        ({"gpus_per_node": 1}, "set sweep.slurm.gpus"),
        ({"output": "x"}, "belongs to the sweep"),
    ],
)
def test_extra_options_that_have_a_key_or_belong_to_the_sweep_are_refused(extra: dict[str, Any], words: str) -> None:
    from pydantic import ValidationError

    with pytest.raises(ValidationError, match=words):
        SlurmSection.model_validate({"extra": extra})


def test_the_queue_shows_where_a_job_is_or_what_it_waits_for() -> None:
    assert str(slurm_queue.Place("x", "RUNNING", "None", "n1")) == "n1"
    assert str(slurm_queue.Place("x", "PENDING", "Priority", "")) == "queued (Priority)"
    assert str(slurm_queue.Place("x", "PENDING", "None", "")) == "queued"
    assert not slurm_queue.Place("x", "CONFIGURING", "None", "n1").runs

"""`wide sweep --executor slurm` on a real Slurm of one node, which the tests start; skipped where there is none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from whole_commands import Wide

from slurm_cluster import in_queue, running_cluster, said, why_not
from widecli.recipe.schema import SlurmSection
from widecli.sweep.jobs import Job, State
from widecli.sweep.runner import run_jobs
from widecli.sweep.slurm import SlurmExecutor
from widecli.sweep.slurm_follow import numbers_in_queue

pytest.importorskip("submitit", reason="submitit is not installed: pip install 'widecli[cluster]'")
pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

# Arguments: what to do, a run directory, whose name is the job's.
PROGRAM = """
import json, os, pathlib, sys, time
what, folder = sys.argv[1], pathlib.Path(sys.argv[2])
folder.mkdir(parents=True, exist_ok=True)
with open(folder / "starts", "a") as file:
    file.write(os.environ["COLOUR"] + chr(10))
if what == "fail-once" and len((folder / "starts").read_text().split()) == 1:
    print("error: the moon is wrong", file=sys.stderr)
    sys.exit(1)
if what == "refuse":
    print("error: group size 48 is impossible", file=sys.stderr)
    sys.exit(2)
if what == "long":
    time.sleep(60)
(folder / "summary.json").write_text(json.dumps({"schema": "x", "seconds": 2.0}))
"""


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with running_cluster(tmp_path_factory.mktemp("slurm")), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p))
        yield


class Bench:
    """Jobs that run PROGRAM below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []

    def job(self, name: str, what: str = "work", needs: tuple[Job, ...] = ()) -> Job:
        path = self.folder / name
        return Job(name, "calibrate", lambda: path, lambda: [what, str(path)], needs)

    def executor(self, **settings: object) -> SlurmExecutor:
        section = SlurmSection.model_validate({"gpus": 0, "cpus": 1, "poll": 0.2, **settings})
        program = (sys.executable, "-S", "-c", PROGRAM)
        return SlurmExecutor(section, self.folder, {"COLOUR": "blue"}, self.notes.append, program)

    def run(self, jobs: list[Job], executor: SlurmExecutor, **settings: object) -> None:
        settings = {"changed": lambda job: None, **settings}
        run_jobs(jobs, executor, self.folder / "logs", **settings)  # type: ignore[arg-type]

    def starts(self, name: str) -> list[str]:
        return (self.folder / name / "starts").read_text().split()

    def batches(self) -> list[list[str]]:
        return [json.loads(file.read_text())["tasks"] for file in sorted(self.folder.glob("slurm/*/batch.json"))]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_jobs_run_in_arrays_as_large_as_the_cluster_takes_and_failures_are_tried_again(bench: Bench) -> None:
    first = bench.job("a")
    jobs = [
        first,
        bench.job("b", "fail-once"),
        bench.job("c", "refuse"),
        bench.job("d"),
        bench.job("e", needs=(first,)),
    ]
    bench.run(jobs, bench.executor(), retries=1)
    assert [str(job.state) for job in jobs] == ["done", "done", "failed", "done", "done"]
    assert bench.batches()[:2] == [["a", "b", "c"], ["d"]]  # MaxArraySize=3
    assert bench.starts("b") == ["blue", "blue"] and len(bench.starts("c")) == 1  # as refused, it would be again
    assert jobs[2].error == "group size 48 is impossible"
    assert "error: the moon is wrong" in (bench.folder / "logs" / "b.log").read_text()
    wait_until(lambda: not in_queue())


def test_a_job_that_somebody_cancels_stays_away(bench: Bench) -> None:
    job = bench.job("x", "long")

    def cancel() -> None:
        if job.where and (bench.folder / "x" / "starts").exists():
            said("scancel", *numbers_in_queue(bench.folder))

    bench.run([job], bench.executor(), retries=3, waiting=cancel)
    assert job.state is State.FAILED and "cancelled in Slurm's queue" in str(job.error)
    assert len(bench.starts("x")) == 1 and in_queue() == []


def test_what_sbatch_complains_of_is_passed_on(wide: Wide, tiny_recipe: Path) -> None:
    options = ("--executor", "slurm", "--gpus", 0, "--stages", "calibrate", "--steps", 1)
    wide("sweep", tiny_recipe, *options, "--partition", "nowhere").refused_with(
        "sbatch refuses", "invalid partition specified: nowhere"
    )
    wide("sweep", tiny_recipe, *options, "--time", "soon").refused_with(
        "sbatch refuses", "Invalid --time specification"
    )
    assert in_queue() == []


@pytest.mark.slow
def test_three_points_one_of_them_preempted_and_a_sweep_interrupted_and_continued(
    wide: Wide, tiny_recipe: Path, workplace: Path
) -> None:
    # so many steps that no point comes to its end (120 a second) while it is looked for, interrupted and preempted
    what = ("sweep", tiny_recipe, "--sparsity", "0.2,0.3,0.4", "--steps", 2500, "train.save_every=10000")
    what += ("--stages", "calibrate", "--offline", "--json")
    arguments = (*what, "--executor", "slurm", "--gpus", 0, "--cpus", 2, "sweep.slurm.poll=0.5")

    interruption = threading.Thread(target=lambda: when(training, lambda: os.kill(os.getpid(), signal.SIGINT)))
    interruption.start()
    left = wide(*arguments)
    interruption.join()
    left.refused_with("interrupted", code=130)
    assert "3 jobs go on in Slurm without this command" in left.err and "scancel" in left.err
    assert len(in_queue()) == 3
    # room for a job of the partition that comes first: one of the two running points has to go
    subprocess.run(
        ["sbatch", "--partition=high", "--cpus-per-task=2", "--output=/dev/null", "--wrap=sleep 1"], check=True
    )
    wait_until(lambda: any("stopped by a signal" in log.read_text() for log in logs()))
    wide(*what).refused_with("are in Slurm's queue", "--executor slurm")

    done = wide(*arguments)
    assert done.code == 0, done.err
    assert "3 jobs of an earlier start" in done.err
    document = done.document
    assert [point["stages"]["calibrate"]["state"] for point in document["points"]] == ["done"] * 3
    (batch,) = Path(document["run_dir"]).glob("slurm/*/batch.json")  # nothing was submitted twice
    (preempted,) = [text for log in logs() if "stopped by a signal" in (text := log.read_text())]
    assert preempted.count("$ wide calibrate") == 2 and "resuming after step" in preempted
    assert [log.read_text().count("$ wide calibrate") for log in logs()].count(1) == 2
    assert json.loads(batch.read_text())["job_id"]
    wait_until(lambda: not in_queue())


def training() -> bool:
    """Two points have begun their steps."""
    return sum(file.read_text().count("\n") > 5 for file in Path("runs").glob("calibrate-*/metrics.jsonl")) == 2


def logs() -> list[Path]:
    return sorted(Path("runs").glob("sweep-*/logs/*.log"))


def when(condition: Callable[[], bool], action: Callable[[], None]) -> None:
    wait_until(condition)
    action()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)

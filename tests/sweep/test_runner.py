"""Scheduling, with small programs in the place of `wide`: what runs when and where, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from widecli.sweep.jobs import Job, State, counted, survey, time_left
from widecli.sweep.local import LocalExecutor, visible_gpus
from widecli.sweep.runner import Stop, run_jobs

# Arguments: what to do, a run directory, a file that collects one line a start.
PROGRAM = """
import json, os, pathlib, signal, sys, time
what, folder, starts = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
folder.mkdir(parents=True, exist_ok=True)
def line(event):
    with open(starts, "a") as file:
        file.write(json.dumps([event, folder.name, os.environ.get("CUDA_VISIBLE_DEVICES"), time.time()]) + chr(10))
line("start")
def save(*_):
    (folder / "saved").touch()
    print("error: stopped by a signal", file=sys.stderr)
    sys.exit(75)
if what == "fail":
    print("note\\nerror: group size 48 is impossible\\n", file=sys.stderr)
    sys.exit(2)
if what == "crash":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "long" and not (folder / "saved").exists():
    signal.signal(signal.SIGTERM, save)
    (folder / "ready").touch()
    time.sleep(60)
if what == "short":
    time.sleep(0.4)
if what != "lost":
    (folder / "summary.json").write_text(json.dumps({"schema": "x", "seconds": 2.0}))
line("end")
"""


class Bench:
    """Jobs that run PROGRAM below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.starts = folder / "starts"

    def job(self, name: str, what: str = "work", needs: Sequence[Job] = (), **settings: object) -> Job:
        path = self.folder / name
        arguments = [what, str(path), str(self.starts)]
        return Job(name, "calibrate", lambda: path, lambda: arguments, tuple(needs), **settings)  # type: ignore[arg-type]

    def run(self, jobs: Sequence[Job], gpus: Sequence[str] = (), jobs_per_gpu: int = 1, **settings: object) -> None:
        executor = LocalExecutor(gpus, jobs_per_gpu, program=(sys.executable, "-S", "-c", PROGRAM))
        settings = {"changed": lambda job: None, **settings}
        run_jobs(jobs, executor, self.folder / "logs", **settings)  # type: ignore[arg-type]

    def events(self, event: str = "start") -> list[tuple[str, str | None]]:
        lines = [json.loads(line) for line in self.starts.read_text().splitlines()] if self.starts.exists() else []
        return [(name, gpu) for kind, name, gpu, _ in lines if kind == event]

    def most_at_once(self) -> int:
        lines = sorted((json.loads(line) for line in self.starts.read_text().splitlines()), key=lambda line: line[3])
        running = most = 0
        for kind, *_ in lines:
            running += 1 if kind == "start" else -1
            most = max(most, running)
        return most


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_jobs_may_share_the_cpu_where_there_is_no_gpu(tmp_path: Path) -> None:
    for slots in (1, 2):
        executor = LocalExecutor((), slots, program=(sys.executable, "-S", "-c", "pass"))
        job = Job("a", "calibrate", Path, list, log=tmp_path / f"{slots}.log")
        handle = executor.start(job, [])
        assert executor.slots == slots and executor.has_room() is (slots == 2)
        while handle.poll() is None:
            time.sleep(0.02)


def test_two_gpus_run_two_jobs_at_once_each_on_one_of_its_own(bench: Bench) -> None:
    jobs = [bench.job(name, "short") for name in "abcd"]
    bench.run(jobs, gpus=("3", "GPU-5e"))
    assert {job.state for job in jobs} == {State.DONE}
    assert bench.most_at_once() == 2
    assert {gpu for _, gpu in bench.events()} == {"3", "GPU-5e"}
    assert {job.where for job in jobs} == {"GPU 3", "GPU GPU-5e"}


def test_jobs_can_share_a_gpu_and_go_one_by_one_on_a_cpu(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    bench.run([bench.job(name, "short") for name in "ab"], gpus=("0",), jobs_per_gpu=2)
    assert bench.most_at_once() == 2 and {gpu for _, gpu in bench.events()} == {"0"}
    bench.starts.unlink()
    bench.run([bench.job(name, "short") for name in "cd"])
    assert bench.most_at_once() == 1 and bench.events() == [("c", None), ("d", None)]


def test_what_a_job_needs_comes_first_and_the_order_given_decides_the_rest(bench: Bench) -> None:
    dense = bench.job("dense", "fail")
    first, second = bench.job("one"), bench.job("two")
    jobs = [dense, first, bench.job("eval-one", needs=[first], after=(dense,)), second]
    bench.run(jobs)
    assert [name for name, _ in bench.events()] == ["dense", "one", "eval-one", "two"]  # `after` need not end well
    assert [str(job.state) for job in jobs] == ["failed", "done", "done", "done"]


def test_a_job_that_fails_takes_along_only_what_needs_it_and_says_its_last_sentence(bench: Bench) -> None:
    bad, good, crash, lost = (
        bench.job("bad", "fail"),
        bench.job("good"),
        bench.job("crash", "crash"),
        bench.job("lost", "lost"),
    )
    after_bad = bench.job("after-bad", needs=[bad])
    further = bench.job("further", needs=[after_bad])
    jobs = [bad, after_bad, further, good, crash, lost]
    changes: list[tuple[str, State]] = []
    bench.run(jobs, changed=lambda job: changes.append((job.name, job.state)))
    assert bad.state is State.FAILED and bad.error == "group size 48 is impossible"
    assert after_bad.state is further.state is State.SKIPPED
    assert good.state is State.DONE
    assert crash.error is not None and "SIGKILL" in crash.error
    assert lost.error is not None and "no finished run" in lost.error
    assert counted(jobs) == "1 done, 3 failed, 2 skipped"
    assert ("bad", State.RUNNING) in changes and ("bad", State.FAILED) in changes
    assert "error: group size 48" in (bench.folder / "logs" / "bad.log").read_text()


def test_an_error_of_an_earlier_start_is_not_blamed_on_this_one(bench: Bench) -> None:
    bench.run([bench.job("x", "fail")])
    again = bench.job("x", "crash")
    bench.run([again])
    assert again.error is not None and "SIGKILL" in again.error
    assert (bench.folder / "logs" / "x.log").read_text().count("$ wide") == 2


def test_what_failed_is_tried_again_as_often_as_asked_but_not_what_was_refused(bench: Bench) -> None:
    jobs = [bench.job("crash", "crash"), bench.job("refused", "fail"), bench.job("good")]
    said: list[str] = []
    bench.run(jobs, retries=2, changed=lambda job: said.append(f"{job.name} {job.state} {job.error}"))
    assert [str(job.state) for job in jobs] == ["failed", "failed", "done"]
    assert [name for name, _ in bench.events()].count("crash") == 3
    assert [name for name, _ in bench.events()].count("refused") == 1
    assert "crash waiting killed by SIGKILL (out of memory?) (it is tried again, 2 of 2)" in said
    assert jobs[0].error == "killed by SIGKILL (out of memory?)"


def stop_when_ready(bench: Bench, name: str, stop: Stop) -> None:
    if (bench.folder / name / "ready").exists() and not stop.requested:
        stop.received.append(signal.SIGTERM)


def test_stopped_in_the_middle_and_run_again_no_finished_job_is_done_again(bench: Bench) -> None:
    def jobs() -> list[Job]:
        long = bench.job("long", "long")
        return [bench.job("first"), long, bench.job("after-long", needs=[long]), bench.job("last")]

    stop, before = Stop(), jobs()
    bench.run(before, stop=stop, waiting=lambda: stop_when_ready(bench, "long", stop))
    assert [str(job.state) for job in before] == ["done", "stopped", "waiting", "waiting"]
    assert (bench.folder / "long" / "saved").exists()  # it was asked, not killed
    again = jobs()
    survey(again)
    assert [str(job.state) for job in again] == ["reused", "waiting", "waiting", "waiting"]
    bench.run(again)
    assert [str(job.state) for job in again] == ["reused", "done", "done", "done"]
    assert [name for name, _ in bench.events()] == ["first", "long", "long", "after-long", "last"]


def test_signals_are_collected_while_listening_and_only_then() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Stop().listening() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 5
        while not stop.requested and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stop.interrupted
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_that_may_only_be_reused_does_not_start(bench: Bench) -> None:
    job = bench.job("x", only_reuse="there is no finished calibration x")
    bench.run([job])
    assert job.error == "there is no finished calibration x" and bench.events() == []


def test_the_time_left_comes_from_finished_jobs_of_the_same_stage(bench: Bench) -> None:
    done, waiting, other = bench.job("a"), bench.job("b"), bench.job("c")
    done.state, done.seconds = State.DONE, 100.0
    assert time_left([done, waiting], 1) == (100.0, True)
    assert time_left([done, waiting, bench.job("d")], 2) == (100.0, True)
    other.stage = "eval"
    assert time_left([done, waiting, other], 1) == (100.0, False)


def test_a_running_training_tells_its_step(bench: Bench) -> None:
    job = bench.job("x", steps=300)
    job.path = bench.folder / "x"
    assert job.step() is None
    job.path.mkdir()
    (job.path / "metrics.jsonl").write_text('{"step": 1, "lm_loss": 3}\n' * 300 + '{"step": 120, "x": 1}\n{"ste')
    assert job.step() == 120


def test_the_gpus_are_those_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert visible_gpus() == ["4", "6"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus() == ["0", "1"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert visible_gpus() == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
def test_children_save_and_end_when_the_sweep_itself_is_killed(bench: Bench) -> None:
    import subprocess

    code = (
        "import sys, time; from pathlib import Path\n"
        "from widecli.sweep.jobs import Job; from widecli.sweep.local import LocalExecutor\n"
        "job = Job('orphan', 'calibrate', Path, list, log=Path(sys.argv[4]))\n"
        "program = (sys.executable, '-S', '-c', sys.argv[1])\n"
        "LocalExecutor((), program=program).start(job, ['long', sys.argv[2], sys.argv[3]])\n"
        "time.sleep(60)"
    )
    folder = bench.folder / "orphan"
    parent = subprocess.Popen(
        [sys.executable, "-c", code, PROGRAM, str(folder), str(bench.starts), str(bench.folder / "log")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        wait_for(folder / "ready")
    finally:
        parent.kill()
        parent.wait()
    wait_for(folder / "saved")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)

"""`wide sweep` as a whole. All tests but the last run its commands in this process, which saves seconds a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from whole_commands import Wide, invoke

from widecli.recipe.files import shipped_recipes
from widecli.sweep import local
from widecli.sweep.jobs import Job
from widecli.sweep.logs import opened_log

TWO = ("--sparsity", "0.3,0.5", "--steps", 2)


class InThisProcess:
    """An executor whose jobs are over when they have started, one at a time."""

    slots = 1
    outlives = False

    def __init__(self, *_: object, **__: object) -> None:
        self.ran: list[list[str]] = []
        self.last: Ended | None = None

    def has_room(self) -> bool:
        return self.last is None or self.last.was_polled

    def start(self, job: Job, arguments: Sequence[str]) -> Any:
        self.ran.append(list(arguments))
        done = invoke(*arguments)
        with opened_log(job.log or Path("none"), arguments) as output:
            output.write(done.err.encode())
        self.last = Ended(done.code, done.err)
        return self.last

    def submit(self) -> None:
        pass


class Ended:
    where = "CPU"
    since = 0.0

    def __init__(self, code: int, said: str = "") -> None:
        self.code = code
        self.said = said
        self.was_polled = False

    def poll(self) -> int:
        self.was_polled = True
        return self.code

    def error(self) -> str:
        return self.said.rpartition("error: ")[2].strip()

    def stop(self) -> None:
        pass

    kill = stop


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """The commands that sweeps have run in this process."""
    executor = InThisProcess()
    monkeypatch.setattr(local, "LocalExecutor", lambda *_, **__: executor)
    monkeypatch.setattr(local, "visible_gpus", list)
    yield executor.ran


def commands(ran: list[list[str]]) -> list[str]:
    return [arguments[0] for arguments in ran]


def rows_of(table: str, firsts: Sequence[str]) -> list[str]:
    """The rows of a printed table that begin with these words."""
    return [line for line in table.splitlines() if line.split()[:1] and line.split()[0] in firsts]


def states(document: dict[str, Any]) -> list[dict[str, str]]:
    return [{stage: job["state"] for stage, job in point["stages"].items()} for point in document["points"]]


def test_every_point_is_calibrated_and_evaluated_and_the_dense_model_once(
    wide: Wide, tiny_recipe: Path, ran: list[list[str]], workplace: Path
) -> None:
    done = wide("sweep", tiny_recipe, *TWO, "--json")
    assert done.code == 0, done.err
    assert commands(ran) == ["eval", "calibrate", "eval", "calibrate", "eval"]
    assert "--model" in ran[0]
    document = done.document
    assert document["schema"] == "wide.summary/1" and document["command"] == "sweep" and document["finished"]
    points = document["points"]
    assert [point["values"] for point in points] == [{"budget.sparsity": 0.3}, {"budget.sparsity": 0.5}]
    assert states(document) == [{"calibrate": "done", "eval": "done"}] * 2
    folder = Path(document["run_dir"])
    assert folder.parent == Path("runs") and folder.name.startswith("sweep-")
    assert json.loads((folder / "summary.json").read_text()) == document
    assert all((folder / run / "summary.json").is_file() for run in document["runs"]) and len(document["runs"]) == 5
    for run in document["runs"][2:]:  # the dense model was not measured again beside the checkpoints
        summary = json.loads((folder / run / "summary.json").read_text())
        if summary["command"] == "eval" and summary["checkpoint"]:
            assert summary["dense"]["from_cache"]
    # the last table shows what was found
    evaluated = [json.loads((folder / p["stages"]["eval"]["run"] / "summary.json").read_text()) for p in points]
    shown = done.err[done.err.index("what the points skip and keep") :]
    for row, summary in zip(rows_of(shown, ("0.3", "0.5")), evaluated, strict=True):
        assert f"{100 * summary['skip_rate']['ffn']:.1f}" in row
        assert f"{summary['perplexity']['held-out/token_ppl']:.2f}" in row
    assert f"{evaluated[0]['dense']['perplexity']['held-out/token_ppl']:.2f}" in rows_of(shown, ("dense",))[0]
    # a point is the very run that the plain command would make
    by_hand = wide("calibrate", tiny_recipe, "--sparsity", 0.3, "--steps", 2)
    by_hand.refused_with("holds a finished run")

    again = wide("sweep", tiny_recipe, *TWO, "--json")
    assert again.code == 0 and len(ran) == 5  # nothing ran
    assert states(again.document) == [{"calibrate": "reused", "eval": "reused"}] * 2
    looked = wide("sweep", tiny_recipe, *TWO, "--dry-run")
    assert looked.code == 0 and "2 points, 5 reused" in looked.err and "still to do" not in looked.err
    from_its_directory = wide("sweep", folder, "--json")
    assert from_its_directory.code == 0 and from_its_directory.document["run_dir"] == str(folder) and len(ran) == 5

    report = wide("report", folder, "--format", "csv", "--json")
    assert report.code == 0, report.err
    (model,) = report.document["models"]
    assert [point["sparsity"] for point in model["points"]] == [None, 0.3, 0.5]
    assert report.document["skipped"] == []
    both = wide("report", "--format", "csv", "--json")  # the sweep and its runs, side by side below runs/
    assert both.document["models"] == report.document["models"] and both.document["skipped"] == []


@pytest.mark.slow
def test_points_that_differ_in_grouping_and_compensation_are_runs_of_their_own_and_the_table_shows_the_keys(
    wide: Wide, tiny_recipe: Path, ran: list[list[str]], workplace: Path
) -> None:
    axes = ("--set", "routing.grouping=clustered,contiguous", "--set", "compensation.rank=0,4", "--steps", 1)
    looked = wide("sweep", tiny_recipe, *axes, "--dry-run", "--json")
    assert looked.code == 0, looked.err
    heads = next(line for line in looked.err.splitlines() if "time, about" in line)
    assert "grouping" in heads and "rank" in heads and "compensation" in looked.err  # a head of two lines
    assert len({point["recipe_hash"] for point in looked.document["points"]}) == 4
    done = wide("sweep", tiny_recipe, *axes, "--json")
    assert done.code == 0, done.err
    assert len(list(Path("runs").glob("calibrate-*"))) == 4 and done.document["finished"]
    report = wide("report", done.document["run_dir"], "--format", "csv", "--json")
    (model,) = report.document["models"]
    routed = [point for point in model["points"] if point["mode"] == "wide"]
    assert {(point["grouping"], point["compensation"]) for point in routed} == {
        (grouping, left) for grouping in ("clustered", "contiguous") for left in ("means", "means and rank 4")
    }
    assert len({point["label"] for point in routed}) == 4


def test_a_point_with_an_impossible_group_size_fails_alone(
    wide: Wide, tiny_recipe: Path, ran: list[list[str]], workplace: Path
) -> None:
    done = wide("sweep", tiny_recipe, "--G", "16,48", "--steps", 1, "--stages", "calibrate", "--json")
    done.refused_with("1 of 2 jobs failed", "FFN group size 48", "valid sizes: 16, 32, 64", code=1)
    assert states(done.document) == [{"calibrate": "done"}, {"calibrate": "failed"}]
    assert commands(ran) == ["calibrate"] and not done.document["finished"]
    wide("sweep", tiny_recipe, "--G", "48,80", "--stages", "calibrate").refused_with("FFN group size 48")


def test_a_finished_run_is_reused_whatever_it_is_called_and_evaluated_as_the_sweep_asks(
    wide: Wide, tiny_recipe: Path, ran: list[list[str]], workplace: Path
) -> None:
    assert wide("calibrate", tiny_recipe, "--steps", 1, "--run-dir", "runs/mine", "eval.max_length=99").code == 0
    done = wide("sweep", tiny_recipe, "--sparsity", 0.4, "--steps", 1, "eval.max_length=64", "--json")
    assert done.code == 0, done.err
    assert states(done.document) == [{"calibrate": "reused", "eval": "done"}]
    assert commands(ran) == ["eval", "eval"] and "runs/mine" in ran[1]
    (run,) = Path("runs").glob("eval-mine-*")
    assert json.loads((run / "summary.json").read_text())["protocol"]["max_length"] == 64


def test_second_stages_share_their_calibration(
    wide: Wide, tiny_recipe: Path, ran: list[list[str]], workplace: Path
) -> None:
    options = ("--stages", "lora,calibrate", "--set", "lora.rank=2,4", "--steps", 1, "track.wandb=off")
    done = wide("sweep", tiny_recipe, *options, "--json")
    assert done.code == 0, done.err
    assert commands(ran) == ["calibrate", "lora", "lora"]
    found = [json.loads(p.read_text()) for p in sorted(Path("runs").glob("lora-*/summary.json"))]
    assert {summary["adapter"]["rank"] for summary in found} == {2, 4}
    only_measured = wide("sweep", tiny_recipe, "--sparsity", "0.1", "--stages", "eval", "--steps", 1)
    only_measured.refused_with("no finished calibration", "add calibrate to --stages", code=1)


def test_a_profile_of_every_calibration_and_every_adapter_joins(
    wide: Wide, tiny_recipe: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands_run: list[list[str]] = []

    def start(self: InThisProcess, job: Job, arguments: Sequence[str]) -> Ended:
        commands_run.append(list(arguments))
        quick = ("--batch", "1", "--prompt", "16", "--gen", "4", "--seconds", "0.1", "--text", "h.txt")
        self.last = Ended(invoke(*arguments, *(quick if arguments[0] == "profile" else ())).code)
        return self.last

    (workplace / "h.txt").write_text("A text of some words. " * 40)
    monkeypatch.setattr(InThisProcess, "start", start)
    monkeypatch.setattr(local, "LocalExecutor", InThisProcess)
    options = ("--steps", 1, "--stages", "calibrate,lora,profile", "--json")
    done = wide("sweep", tiny_recipe, *options)
    assert done.code == 0, done.err
    assert sorted(commands(commands_run)) == ["calibrate", "lora", "profile", "profile"]
    assert states(done.document) == [dict.fromkeys(("calibrate", "profile", "lora", "profile lora"), "done")]
    measured = {json.loads((run / "summary.json").read_text())["checkpoint"] for run in Path("runs").glob("profile-*")}
    assert sorted(name.split("-")[0] for name in measured) == ["runs/calibrate", "runs/lora"]
    report = wide("report", done.document["run_dir"], "--format", "csv", "--json")
    (model,) = report.document["models"]
    assert [point["stage"] for point in model["points"]] == ["calibrate", "lora"]
    assert [point["began_with"] for point in model["points"]] == [None, model["points"][0]["label"]]
    assert all("ttft b1 p16" in point["figures"] for point in model["points"])
    together = wide("sweep", tiny_recipe, "--stages", "profile", "--jobs-per-gpu", 2)
    together.refused_with("--jobs-per-gpu 2", "profile")


def test_a_calibration_that_was_made_anew_is_evaluated_anew(
    wide: Wide, tiny_recipe: Path, ran: list[list[str]], workplace: Path
) -> None:
    assert wide("sweep", tiny_recipe, "--steps", 1, "--json").code == 0
    (run,) = Path("runs").glob("calibrate-*")
    before = sorted(Path("runs").glob("eval-*"))
    # the same name, other routers
    assert wide("calibrate", tiny_recipe, "--steps", 2, "--run-dir", run, "--overwrite").code == 0
    (run / "recipe.yaml").write_text((run / "recipe.yaml").read_text().replace("steps: 2", "steps: 1"))
    ran.clear()
    assert wide("sweep", tiny_recipe, "--steps", 1, "--json").code == 0
    assert commands(ran) == ["eval"] and len(list(Path("runs").glob("eval-*"))) == len(before) + 1


def test_a_cluster_that_is_not_here_is_refused_and_where_a_sweep_runs_does_not_name_it(
    wide: Wide, tiny_recipe: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit")
    before = sorted(workplace.iterdir())
    monkeypatch.setenv("PATH", str(workplace))
    options = ("--executor", "slurm", "--partition", "gpu", "--time", "1:00:00", "--gpus", 2, "--sbatch", "qos=low")
    wide("sweep", tiny_recipe, *TWO, *options).refused_with("there is no sbatch here", "--executor slurm")
    wide("sweep", tiny_recipe, *TWO, *options, "--jobs-per-gpu", 2).refused_with("--jobs-per-gpu 2", "Slurm")
    wide("sweep", tiny_recipe, *TWO, "--executor", "pbs").refused_with("sweep.executor=pbs", "local, slurm")
    wide("sweep", tiny_recipe, *TWO, "--sbatch", "time=1").refused_with("set sweep.slurm.time")
    wide("sweep", tiny_recipe, *TWO, "--sbatch", "=1").refused_with("--sbatch =1", "qos=low")
    wide("sweep", tiny_recipe, *TWO, "--gpus", -1).refused_with("sweep.slurm.gpus=-1")
    plan = wide("sweep", tiny_recipe, *TWO, *options, "--dry-run", "--json")
    assert plan.code == 0, plan.err
    asked = {"--partition=gpu", "--time=1:00:00", "--gpus-per-node=2", "--qos=low", "--requeue", "--signal=USR1@120"}
    assert asked <= set(plan.document["sbatch"]) and "--partition=gpu" in plan.err
    here = wide("sweep", tiny_recipe, *TWO, "--dry-run", "--json")
    assert here.document["run_dir"] == plan.document["run_dir"] and "sbatch" not in here.document
    assert sorted(workplace.iterdir()) == before


def test_axes_that_name_unknown_keys_and_stages_that_are_not_there_are_refused(
    wide: Wide, tiny_recipe: Path, workplace: Path
) -> None:
    before = sorted(workplace.iterdir())
    wide("sweep", tiny_recipe, "--set", "trian.steps=1,2").refused_with("trian.steps", "did you mean train.steps")
    wide("sweep", tiny_recipe, "--set", "train.steps").refused_with("--set train.steps", "KEY=VALUES")
    wide("sweep", tiny_recipe, "--sparsity", "0.1:0.7").refused_with("0.1:0.7", "lacks its step")
    wide("sweep", tiny_recipe, "--sparsity", "0.5,2").refused_with("budget.sparsity=2")
    wide("sweep", tiny_recipe, "--stages", "calibrate,evaluate").refused_with("evaluate", "calibrate, lora, eval")
    wide("sweep", tiny_recipe, "--modes", "wide,depth").refused_with("routing.mode=depth")
    wide("sweep", tiny_recipe, "--tasks", "piqaa").refused_with("piqaa")
    (workplace / "unknown.yaml").write_text("base: tiny.yaml\nsweep: {axes: {budget.sparsty: [0.1]}}")
    wide("sweep", "unknown.yaml").refused_with("budget.sparsty", "budget.sparsity")
    (workplace / "unknown.yaml").unlink()
    wide("sweep", tiny_recipe, "--run-dir", ".").refused_with("holds no sweep")
    assert sorted(workplace.iterdir()) == before


def test_the_dry_run_prints_the_grid_with_time_and_memory_and_writes_nothing(
    wide: Wide, tiny_recipe: Path, workplace: Path
) -> None:
    before = sorted(workplace.iterdir())
    done = wide(
        "sweep", tiny_recipe, "--G", "16,32,48", "--modes", "wide,token", "--seed", "0:1:1", "--dry-run", "--json"
    )
    assert done.code == 0, done.err
    document = done.document
    assert document["schema"] == "wide.dry_run/1" and document["command"] == "sweep"
    assert len(document["points"]) == 8  # three group sizes and the one token mode, two seeds
    states_seen = [point["stages"]["calibrate"]["state"] for point in document["points"]]
    assert states_seen.count("failed") == 2 and states_seen.count("waiting") == 6
    good = [point for point in document["points"] if point["stages"]["calibrate"]["state"] == "waiting"]
    assert all(point["seconds_on_reference"] > 0 and point["memory_bytes"] > 0 for point in good)
    total = sum(point["seconds_on_reference"] for point in good)
    assert document["seconds_on_reference"] == pytest.approx(total)
    assert "cannot run" in done.err and "FFN group size 48" in done.err
    assert sorted(workplace.iterdir()) == before


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if name.startswith("sweep/")])
def test_every_shipped_sweep_can_be_dry_run(wide: Wide, workplace: Path, name: str) -> None:
    done = wide("sweep", name.split("/")[1], "--dry-run", "--offline", "--json")
    assert done.code == 0, done.err
    document = done.document
    assert all(point["stages"]["calibrate"]["state"] == "waiting" for point in document["points"])
    counts = {"sparsity": 14, "groups": 5 if "smollm2" in name else 6, "lora": 4}
    assert len(document["points"]) == counts[name.rsplit("_", 1)[1]]
    assert list(workplace.iterdir()) == []


@pytest.mark.parametrize(("number", "code", "words"), [(15, 75, "the same command continues"), (2, 130, "interrupted")])
def test_a_signal_ends_the_sweep_with_its_exit_code_and_starts_nothing_more(
    wide: Wide,
    tiny_recipe: Path,
    ran: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    code: int,
    words: str,
) -> None:
    def start(self: InThisProcess, job: Job, arguments: Sequence[str]) -> Ended:
        ran.append(list(arguments))
        os.kill(os.getpid(), number)
        self.last = Ended(75)  # as a calibration ends when it is asked to
        return self.last

    monkeypatch.setattr(InThisProcess, "start", start)
    done = wide("sweep", tiny_recipe, *TWO, "--stages", "calibrate", "--json")
    done.refused_with(words, code=code)
    assert done.out == "" and commands(ran) == ["calibrate"]
    (manifest,) = Path("runs").glob("sweep-*/summary.json")
    assert states(json.loads(manifest.read_text())) == [{"calibrate": "stopped"}, {"calibrate": "waiting"}]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="children are told of a killed parent on Linux")
def test_killed_in_the_middle_and_run_again_it_continues_where_it_stopped(
    wide: Wide,
    start_wide: Callable[..., subprocess.Popen[str]],
    tiny_recipe: Path,
    ran: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p))
    finished = Path(wide("calibrate", tiny_recipe, "--steps", 2, "--json").document["run_dir"], "summary.json")
    finished_at = finished.stat().st_mtime_ns
    arguments = ("sweep", tiny_recipe, "--set", "train.steps=2,300", "--stages", "calibrate", "--json")
    child = start_wide(*arguments)
    wait_until(lambda: steps_logged() > 12, child)
    child.kill()
    child.communicate(timeout=60)
    done = wide(*arguments)  # its child saves and ends before this one starts anything
    assert done.code == 0, done.err
    assert states(done.document) == [{"calibrate": "reused"}, {"calibrate": "done"}]
    assert finished.stat().st_mtime_ns == finished_at
    (log,) = Path("runs").glob("sweep-*/logs/*")
    assert "resuming after step" in log.read_text()


def steps_logged() -> int:
    return sum(path.read_text().count('"lm_loss"') for path in Path("runs").glob("calibrate-*/metrics.jsonl"))


def wait_until(condition: Callable[[], bool], child: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)

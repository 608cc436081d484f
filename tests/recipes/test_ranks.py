"""Two gloo ranks do what one process does: to the same losses, files and figures, through kills and resumes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from test_resume import ROUTING
from whole_commands import BATCH, QUESTIONS, STRONG, Wide, invoke, write_questions, write_recipe

from tiny_models import save_model_folder
from widecli.model import checkpoint
from widecli.report.documents import read_document

# fp32 on a CPU: the same sums in another order. A decision near its threshold could flip; here none does.
LOSS, WEIGHTS = 1e-5, 1e-3
# An adapter starts from zeros, where AdamW moves a weight with a gradient of rounding alone by a whole learning rate.
ADAPTER_LOSS = 1e-4
PADDED = ("data.packing=sample",)
STEPS = 40
LONG = (f"train.steps={STEPS}", "train.save_every=2", *BATCH)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, text_file: Path, held_out: Path) -> Path:
    """What one process does, in `one`, `eval-one` and so on, and what two did in one start."""
    folder = tmp_path_factory.mktemp("ranks")
    write_recipe(folder / "tiny.yaml", model_folder, text_file, held_out)
    write_questions(folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        for arguments in (
            ("calibrate", "tiny.yaml", *BATCH, "--run-dir", "one"),
            # two ranks with one sequence at a time are one process with two
            ("calibrate", "tiny.yaml", *BATCH, *PADDED, "train.micro_batch_size=2", "--run-dir", "one-padded"),
            ("calibrate", "tiny.yaml", *LONG, "--run-dir", "long"),
            (
                "lora",
                "one",
                "lora.dropout=0",
                "train.steps=4",
                *STRONG,
                "lora.objective=distill",
                "--run-dir",
                "lora-one",
            ),
            ("eval", "one", "--no-dense", *QUESTIONS, "--run-dir", "eval-one"),
        ):
            assert invoke(*arguments).code == 0
        run_two_ranks(folder)
    return folder


def run_two_ranks(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    paths = [str(Path(p).resolve()) for p in sys.path if p]
    shared = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *paths]),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    worker = Path(__file__).with_name("rank_worker.py")
    children = [
        subprocess.Popen(
            [sys.executable, str(worker), str(folder)],
            cwd=folder,
            env={**shared, "RANK": str(i), "LOCAL_RANK": str(i)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        for child in children:
            _, err = child.communicate(timeout=180)
            assert child.returncode == 0, err
    finally:
        for child in children:
            child.kill()


def told(place: Path, what: str, rank: int = 0) -> Any:
    return json.loads((place / f"rank-{rank}.json").read_text())[what]


def steps_of(run: Path) -> list[dict[str, float]]:
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [e for e in entries if "lm_loss" in e]


def assert_same_training(one: Path, other: Path, steps: int, loss: float = LOSS) -> None:
    first, second = steps_of(one), steps_of(other)
    assert [e["step"] for e in first] == [e["step"] for e in second] == list(range(1, steps + 1))
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys()
        for key in a.keys() - {"tokens_per_second"}:
            assert b[key] == pytest.approx(a[key], rel=loss, abs=loss), (key, a["step"])
    for name in ROUTING:
        path = Path("checkpoints", f"step-{steps:06d}", name)
        theirs = load_file(other / path)
        for key, value in load_file(one / path).items():
            # the order of channels is found by one rank: it is the same or another one
            assert (theirs[key] - value).abs().max() < (WEIGHTS if value.is_floating_point() else 1), key


@pytest.mark.slow
def test_two_ranks_measure_their_training_speed_together(place: Path) -> None:
    document = read_document(place / "speed.json")
    assert document["command"].startswith("torchrun --nproc-per-node 2 -m widecli.train.speed tiny.yaml ")
    (result,) = document["results"]
    assert document["ranks"] == result["ranks"] == 2 and result["layout"] == "dealt"
    assert (result["batch_size"], result["micro_batch_size"]) == (6, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "run", "like", "steps"),
    [
        ("replicated", "replicated", "one", 8),
        ("sharded", "shard", "one", 8),
        ("padded", "padded", "one-padded", 8),
        ("lora", "lora", "lora-one", 4),
    ],
)
def test_two_ranks_train_to_the_losses_of_one_process(place: Path, name: str, run: str, like: str, steps: int) -> None:
    done = told(place, name)
    assert done["code"] == 0, done["err"]
    assert_same_training(place / like, place / run, steps, ADAPTER_LOSS if name == "lora" else LOSS)
    summary = json.loads(done["out"])
    alone = json.loads((place / like / "summary.json").read_text())
    assert summary["ranks"] == 2 and alone["ranks"] == 1
    assert summary["backbone"] == alone["backbone"]  # read part by part or whole: the same model
    for when in ("dense", "start", "final"):
        assert summary["validation"][when] == pytest.approx(alone["validation"][when], rel=1e-4)
    assert summary["skip_rate"] == pytest.approx(alone["skip_rate"], abs=1e-3)


@pytest.mark.slow
def test_only_the_first_rank_talks_and_writes(place: Path) -> None:
    second = told(place, "replicated", rank=1)
    assert second["code"] == 0 and second["out"] == "" and second["err"] == ""
    assert len(steps_of(place / "replicated")) == 8  # not twice


@pytest.mark.slow
def test_an_evaluation_on_two_ranks_gives_the_same_figures(place: Path) -> None:
    done = told(place, "eval")
    assert done["code"] == 0, done["err"]
    two, one = json.loads(done["out"]), json.loads((place / "eval-one" / "summary.json").read_text())
    for key in ("perplexity", "perplexity_details", "tasks"):
        assert two[key] == one[key], key
    # tokens of the tasks were batched, and padded, differently: a decision near its threshold may differ
    assert two["skip_by_text"].keys() == one["skip_by_text"].keys()
    for text, rates in one["skip_by_text"].items():
        assert two["skip_by_text"][text]["skip_rate"] == pytest.approx(rates["skip_rate"], abs=1e-3), text
    assert two["skip_rate"] == pytest.approx(one["skip_rate"], abs=1e-3)
    documents = [json.loads((place / run / "lm_eval_routed.json").read_text()) for run in ("eval-one", "eval-two")]
    assert documents[0]["results"] == documents[1]["results"]
    assert documents[0]["n-samples"] == documents[1]["n-samples"]


@pytest.mark.slow
def test_a_rank_without_a_window_waits_for_the_others(place: Path) -> None:
    done = told(place, "few windows")
    assert done["code"] == 0, done["err"]
    assert json.loads(done["out"])["perplexity_details"]


@pytest.mark.slow
def test_ranks_that_differ_are_refused_with_the_difference(place: Path) -> None:
    assert told(place, "same") is None
    for rank in (0, 1):
        assert "train.steps is 1 on rank 1" in told(place, "differences", rank)
    refused = told(place, "other recipe")
    assert refused["code"] == 2 and "train.learning_rate is 0.02 on rank 1" in refused["err"]
    assert not (place / "never").exists()


@pytest.mark.slow
def test_a_folder_that_one_machine_alone_sees_is_refused(place: Path) -> None:
    assert told(place, "shared") is None
    for rank in (0, 1):
        assert "is not seen by rank 1" in told(place, "private", rank)
        assert "--run-dir" in told(place, "private", rank)


def ranks_below(launcher: int) -> dict[int, int]:
    """Process ids of a launcher's ranks."""
    found = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        found.update({int(v[5:]): int(child) for v in variables if v.startswith(b"RANK=")})
    return found


def wait_for_steps(child: subprocess.Popen[str], run: Path, steps: int) -> None:
    deadline = time.monotonic() + 120
    path = run / "metrics.jsonl"
    while not path.exists() or path.read_text().count('"lm_loss"') < steps:
        assert child.poll() is None, f"it ended before step {steps}: {child.communicate()}"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def start(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "widecli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p),
            "XDG_CACHE_HOME": str(folder / "cache"),
        },
    )


@pytest.fixture(scope="module")
def stopped(place: Path) -> tuple[int, str, str]:
    """A run of two ranks, `cut`, stopped by SIGTERM to what started them: exit code, stdout, stderr."""
    child = start(place, "calibrate", "tiny.yaml", *LONG, "--run-dir", "cut", "--nproc", 2)
    wait_for_steps(child, place / "cut", 3)
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=120)
    return child.returncode, out, err


@pytest.mark.slow
def test_a_signal_stops_all_ranks_at_one_step_and_one_process_goes_on(
    place: Path, stopped: tuple[int, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = stopped
    assert code == 75, err
    assert out == "" and "Traceback" not in err and err.count("--resume continues") == 1
    done, _ = checkpoint.steps(place / "cut" / "checkpoints")[-1]
    assert 3 <= done < STEPS and len(steps_of(place / "cut")) == done
    monkeypatch.chdir(place)
    shutil.copytree("cut", "on-one")
    resumed = invoke("calibrate", "tiny.yaml", *LONG, "--run-dir", "on-one", "--resume")
    assert resumed.code == 0 and f"resuming after step {done}" in resumed.err, resumed.err
    assert_same_training(place / "long", place / "on-one", STEPS)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_three_ranks_go_on_and_one_that_is_killed_takes_the_others_down(
    place: Path, stopped: tuple[int, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    began, _ = checkpoint.steps(place / "cut" / "checkpoints")[-1]
    monkeypatch.chdir(place)
    shutil.copytree("cut", "on-three")
    child = start(place, "calibrate", "tiny.yaml", *LONG, "--run-dir", "on-three", "--resume", "--nproc", 3)
    wait_for_steps(child, place / "on-three", began + 5)
    os.kill(ranks_below(child.pid)[1], signal.SIGKILL)
    killed = time.monotonic()
    _, err = child.communicate(timeout=60)
    assert time.monotonic() - killed < 60
    assert child.returncode == 1
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert errors == [err.splitlines()[-1]] and "rank 1 was killed by SIGKILL" in errors[0], err
    assert "Traceback" not in err
    done, last = checkpoint.steps(place / "on-three" / "checkpoints")[-1]
    assert began + 4 <= done < STEPS
    checkpoint.refuse_incomplete(last)
    resumed = invoke("calibrate", "tiny.yaml", *LONG, "--run-dir", "on-three", "--resume")
    assert resumed.code == 0, resumed.err
    assert_same_training(place / "long", place / "on-three", STEPS)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_a_killed_evaluation_offers_no_resume(tmp_path: Path) -> None:
    save_model_folder(tmp_path / "model")
    child = start(tmp_path, "eval", "--model", "model", "--nproc", 2)
    deadline = time.monotonic() + 60
    while len(ranks_below(child.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(ranks_below(child.pid)[1], signal.SIGKILL)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert "rank 1 was killed by SIGKILL and the others were stopped" in err and "--resume" not in err, err


def test_world_size_alone_is_refused(wide: Wide, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for command in ("calibrate", "lora", "eval"):
        wide(command, tiny_recipe).refused_with("WORLD_SIZE=2", "RANK and LOCAL_RANK", "torchrun")


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("x", "2"), ("0", "0")])
def test_variables_that_name_no_process_are_refused(
    wide: Wide, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch, rank: str, size: str
) -> None:
    values = {"RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    wide("calibrate", tiny_recipe).refused_with(f"RANK={rank}", f"WORLD_SIZE={size}")


def test_offload_without_ranks_is_refused(wide: Wide, tiny_recipe: Path) -> None:
    wide("calibrate", tiny_recipe, "distributed.offload=true", "--steps", 1).refused_with("offload=true", "--nproc")

"""A run that is stopped and continued ends with the very bytes of one that was not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from whole_commands import Wide

from widecli.model import checkpoint

Start = Callable[..., "subprocess.Popen[str]"]


ROUTING = ("router.safetensors", "compensation.safetensors", "channels.safetensors")
"""What a regrouped and compensated checkpoint decides by."""


def routing(run: str, step: int) -> dict[str, bytes]:
    folder = Path(run, "checkpoints", f"step-{step:06d}")
    return {name: (folder / name).read_bytes() for name in ROUTING}


def steps_of(run: str) -> list[dict[str, Any]]:
    """The steps logged, without what depends on the clock."""
    entries = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in e.items() if k != "tokens_per_second"} for e in entries if "lm_loss" in e]


def logged(run: str) -> int:
    path = Path(run, "metrics.jsonl")
    return path.read_text().count('"lm_loss"') if path.exists() else 0


def wait_for_steps(child: subprocess.Popen[str], run: str, steps: int) -> None:
    deadline = time.monotonic() + 120
    while logged(run) < steps:
        assert child.poll() is None, f"it ended before step {steps}: {child.communicate()}"
        assert time.monotonic() < deadline
        time.sleep(0.005)


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int, number: signal.Signals) -> None:
    """Send this process a signal when a step has been logged."""
    from widecli.track.run import Run

    honest = Run.log

    def log(self: Run, step_now: int | None = None, **metrics: Any) -> None:
        honest(self, metrics.pop("step", step_now), **metrics)
        if step_now is None and self._metrics_path.read_text().count("lm_loss") == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Run, "log", log)


@pytest.mark.parametrize(
    ("number", "extra"),
    [(signal.SIGTERM, ()), (signal.SIGUSR1, ("data.packing=sample", "train.micro_batch_size=1"))],
)
def test_n_steps_then_n_more_equal_2n_steps_bit_for_bit(
    wide: Wide, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, extra: tuple[str, ...]
) -> None:
    assert wide("calibrate", tiny_recipe, "--run-dir", "whole", *extra).code == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 3, number)  # between two checkpoints: the signal itself must make one
        stopped = wide("calibrate", tiny_recipe, "--run-dir", "cut", *extra)
    assert stopped.code == 75, stopped.err
    assert "after step 3; --resume continues" in stopped.err and "Traceback" not in stopped.err
    assert checkpoint.resolve("cut").name == "step-000003"
    assert not Path("cut/summary.json").exists()
    resumed = wide("calibrate", tiny_recipe, "--run-dir", "cut", *extra, "--resume", "--json")
    assert resumed.code == 0, resumed.err
    assert routing("cut", 8) == routing("whole", 8)
    assert steps_of("cut") == steps_of("whole")
    whole = json.loads(Path("whole/summary.json").read_text())
    for key in ("skip_rate", "flops_skipped", "validation", "recipe_hash"):
        assert resumed.document[key] == whole[key]


def test_an_unfinished_run_is_refused_without_resume_and_nothing_is_lost(
    wide: Wide, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 4, signal.SIGTERM)
        assert wide("calibrate", tiny_recipe, "--run-dir", "cut").code == 75
    wide("calibrate", tiny_recipe, "--run-dir", "cut").refused_with("unfinished run", "--resume")
    assert checkpoint.resolve("cut").name == "step-000004"
    wide("calibrate", tiny_recipe, "--run-dir", "cut", "--resume", "--seed", 5).refused_with("train.seed")
    assert checkpoint.resolve("cut").name == "step-000004"


def test_ctrl_c_exits_130_and_says_how_to_go_on(wide: Wide, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # what a shell starts in the background ignores Ctrl-C, and so would this process
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            stop_after(patch, 4, signal.SIGINT)
            ended = wide("calibrate", tiny_recipe, "--run-dir", "cut")
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.code == 130 and "cut" in ended.err and "--resume continues" in ended.err
    assert wide("calibrate", tiny_recipe, "--run-dir", "cut", "--resume").code == 0


def test_resume_starts_a_run_that_is_not_there(wide: Wide, tiny_recipe: Path) -> None:
    assert wide("calibrate", tiny_recipe, "--run-dir", "new", "--resume", "--steps", 2).code == 0


def test_a_resume_from_a_damaged_checkpoint_is_refused_in_a_sentence(
    wide: Wide, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 4, signal.SIGTERM)
        assert wide("calibrate", tiny_recipe, "--run-dir", "cut").code == 75
    path = Path("cut/checkpoints/step-000004/router.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    wide("calibrate", tiny_recipe, "--run-dir", "cut", "--resume").refused_with("router.safetensors")


@pytest.mark.slow
def test_sigterm_to_a_real_process_exits_75_and_resumes_to_the_same_bytes(
    wide: Wide, start_wide: Start, tiny_recipe: Path
) -> None:
    arguments = ("calibrate", tiny_recipe, "--steps", 400, "train.save_every=150", "--json")
    child = start_wide(*arguments, "--run-dir", "cut")
    wait_for_steps(child, "cut", 7)
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 75, err
    assert out == "" and "Traceback" not in err and "--resume continues" in err
    assert 7 <= checkpoint.steps(Path("cut/checkpoints"))[-1][0] < 150
    assert wide(*arguments, "--run-dir", "whole").code == 0
    child = start_wide(*arguments, "--run-dir", "cut", "--resume")
    out, err = child.communicate(timeout=240)
    assert child.returncode == 0, err
    assert json.loads(out)["steps"] == 400
    assert routing("cut", 400) == routing("whole", 400)


@pytest.mark.slow
def test_kill_9_loses_at_most_the_steps_since_the_last_checkpoint(
    wide: Wide, start_wide: Start, tiny_recipe: Path
) -> None:
    arguments = ("calibrate", tiny_recipe, "--steps", 400, "train.save_every=5")
    at = 0
    for steps in (13, 160):
        child = start_wide(*arguments, "--run-dir", "cut", "--resume")
        wait_for_steps(child, "cut", at + steps)
        child.kill()
        _, err = child.communicate(timeout=60)
        at = logged("cut")
        assert at < 400, "it was too fast to be killed"
        kept = checkpoint.steps(Path("cut/checkpoints"))[-1][0]
        assert at - 5 - 1 <= kept <= at + 5, err
        at = kept
    resumed = wide(*arguments, "--run-dir", "cut", "--resume")
    assert resumed.code == 0, resumed.err
    assert wide(*arguments, "--run-dir", "whole").code == 0
    assert routing("cut", 400) == routing("whole", 400)
    assert steps_of("cut") == steps_of("whole")

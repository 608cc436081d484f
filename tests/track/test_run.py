from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from widecli.errors import Preempted, UsageError, WideError
from widecli.recipe.load import dump, resolve
from widecli.storage import held, plain, try_lock, write_text
from widecli.track.run import Run, run_name

RECIPE = dump(resolve("demo").recipe)


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def start(**options: Any) -> Run:
    return Run.create("calibrate", "x", recipe_yaml=options.pop("recipe_yaml", RECIPE), **options)


def summary() -> dict[str, Any]:
    keys = ("model", "plan", "skip_rate", "flops_skipped", "steps", "tokens_per_second", "checkpoint")
    return dict.fromkeys(keys)


def test_a_run_lies_below_runs_with_its_recipe() -> None:
    run = start()
    assert run.path == Path("runs/calibrate-x")
    assert (run.path / "recipe.yaml").read_text() == RECIPE
    assert run.checkpoints.is_dir()
    assert not run.is_finished


def test_an_existing_run_is_refused_with_exit_code_two_and_left_alone() -> None:
    start().log(1, loss=2.0)
    with pytest.raises(UsageError, match=r"--resume.*--overwrite") as error:
        start()
    assert error.value.exit_code == 2
    assert Run.open("runs/calibrate-x").metrics() == [{"step": 1, "loss": 2.0}]


def test_resume_is_offered_only_by_commands_that_have_it() -> None:
    for command, offered in (("calibrate", True), ("inspect", False), ("eval", False)):
        Run.create(command, "x", recipe_yaml="").log(1, loss=2.0)
        with pytest.raises(UsageError, match="unfinished run") as refused:
            Run.create(command, "x", recipe_yaml="")
        assert ("--resume" in str(refused.value)) is offered


def test_a_run_that_failed_before_it_had_anything_is_begun_anew_where_nothing_could_be_continued() -> None:
    Run.create("eval", "x", recipe_yaml="a: 1\n").write_environment()
    run = Run.create("eval", "x", recipe_yaml="b: 2\n")
    assert (run.path / "recipe.yaml").read_text() == "b: 2\n"
    (run.path / "lm_eval_dense.json").write_text("{}")
    with pytest.raises(UsageError, match="unfinished run; --overwrite"):
        Run.create("eval", "x", recipe_yaml="b: 2\n")
    start()
    with pytest.raises(UsageError, match=r"unfinished run \(--resume"):
        start()


@pytest.mark.parametrize("command", ["calibrate", "eval"])
def test_what_failed_before_it_had_anything_leaves_no_run(command: str) -> None:
    with pytest.raises(WideError), Run.held(command, "x", recipe_yaml=RECIPE) as run:
        run.write_environment()
        raise WideError("no data")
    assert not run.path.exists()
    with pytest.raises(WideError), Run.held(command, "x", recipe_yaml=RECIPE) as run:
        run.log(1, loss=2.0)
        raise WideError("no memory")
    assert run.metrics() == [{"step": 1, "loss": 2.0}]
    for end in (KeyboardInterrupt, Preempted):  # --resume may find more than is seen here
        with pytest.raises(end), Run.held(command, "y", recipe_yaml=RECIPE, overwrite=True) as run:
            raise end
        assert run.path.is_dir()


def test_overwrite_replaces_a_run_but_never_a_folder_that_is_none(tmp_path: Path) -> None:
    start().log(1, loss=2.0)
    assert start(overwrite=True).metrics() == []
    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "chapter1.tex").write_text("...")
    with pytest.raises(UsageError, match="not a run directory"):
        start(run_dir=precious, overwrite=True)
    assert (precious / "chapter1.tex").exists()
    assert [p.name for p in Path("runs").iterdir()] == ["calibrate-x"]


def test_an_empty_folder_may_become_a_run(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert start(run_dir=tmp_path / "empty").path == tmp_path / "empty"


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        start(run_dir=tmp_path / "file")
    with pytest.raises(WideError, match="cannot be written"):
        start(run_dir=tmp_path / "file" / "below")


def test_resume_continues_or_starts() -> None:
    start(resume=True).log(1, loss=1.0)
    assert start(resume=True).metrics() == [{"step": 1, "loss": 1.0}]


def test_resume_with_another_recipe_names_the_key_and_both_values() -> None:
    start()
    other = dump(resolve("demo", ["train.seed=5"]).recipe)
    with pytest.raises(UsageError, match=r"train\.seed was 0 and is now 5"):
        start(resume=True, recipe_yaml=other)
    free = dump(resolve("demo", ["track.wandb=offline", "eval.limit=3", "train.save_every=7"]).recipe)
    assert (start(resume=True, recipe_yaml=free).path / "recipe.yaml").read_text() == free


def test_metrics_are_rewound_to_the_resumed_step() -> None:
    run = start()
    for step in range(5):
        run.log(step, loss=float(step))
    run.rewind_metrics(3)
    run.log(3, loss=30.0)
    assert [(m["step"], m["loss"]) for m in run.metrics()] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_line_cut_short_by_a_kill_spoils_nothing() -> None:
    run = start()
    run.log(0, loss=1.0)
    run.close()
    with (run.path / "metrics.jsonl").open("a") as handle:
        handle.write('{"step": 1, "lo')
    again = start(resume=True)
    assert [m["step"] for m in again.metrics()] == [0]
    again.log(1, loss=2.0)
    assert [json.loads(line)["step"] for line in (run.path / "metrics.jsonl").read_text().splitlines()] == [0, 1]


def test_every_logged_line_is_on_disk_at_once() -> None:
    run = start()
    run.log(0, loss=1.0)
    assert len((run.path / "metrics.jsonl").read_text().splitlines()) == 1


def test_numbers_that_are_not_finite_become_null_and_arrays_lists() -> None:
    run = start()
    run.log(0, loss=math.nan, rate=np.float32(0.5), layers=np.array([1.0, math.inf]), where=Path("a"))
    assert run.metrics() == [{"step": 0, "loss": None, "rate": 0.5, "layers": [1.0, None], "where": "a"}]
    with pytest.raises(TypeError):
        plain(object())


def test_a_summary_finishes_the_run_and_carries_schema_command_and_place() -> None:
    run = start()
    assert Run.find_finished("calibrate", "x") is None
    written = run.write_summary(summary())
    assert (written["schema"], written["command"], written["run_dir"]) == (
        "wide.summary/1",
        "calibrate",
        "runs/calibrate-x",
    )
    assert json.loads((run.path / "summary.json").read_text()) == written
    found = Run.find_finished("calibrate", "x")
    assert found is not None
    assert found.summary() == written
    with pytest.raises(UsageError, match="finished run"):
        start()


def test_a_summary_without_a_promised_key_is_a_bug_found_at_once() -> None:
    values = summary()
    del values["plan"]
    values["skip_rate"] = {"attention": 0.1, "ffn": 0.2}
    with pytest.raises(ValueError, match=r"plan, skip_rate\.mean"):
        start().write_summary(values)


@pytest.mark.parametrize("content", [b'{"schema": ', b'{"schema": "\xff"}', b"[" * 5000, b"[1]", b""])
def test_a_damaged_summary_is_not_a_finished_run(content: bytes) -> None:
    run = start()
    (run.path / "summary.json").write_bytes(content)
    (run.path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + content + b"\n")
    assert not run.is_finished and run.metrics() == [{"step": 1}]


def test_opening_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no recipe\.yaml"):
        Run.open(tmp_path)


def test_the_environment_is_recorded() -> None:
    run = start()
    run.write_environment()
    assert json.loads((run.path / "environment.json").read_text())["versions"]["torch"]


@pytest.mark.parametrize(
    ("overrides", "middle"),
    [
        ((), "smollm2-135m-wide-s21-g64-"),
        (("budget.sparsity=0.125", "routing.ffn_group_size=32"), "smollm2-135m-wide-s12.5-g32-"),
        (("model.name=meta-llama/Llama-3.2-3B", "routing.mode=token"), "llama-3.2-3b-token-s21-g64-"),
        (("model.name=./my models/x/",), "x-wide-s21-g64-"),
        (("budget.kind=parts", "budget.ffn=0.5"), "smollm2-135m-wide-sf50-g64-"),
        (("budget.kind=parts", "budget.ffn=0.5", "budget.attention=0.25"), "smollm2-135m-wide-sa25f50-g64-"),
    ],
)
def test_runs_are_named_by_model_mode_sparsity_groups_and_hash(overrides: tuple[str, ...], middle: str) -> None:
    resolved = resolve("demo", overrides)
    assert run_name(resolved) == middle + resolved.hash8


def test_a_failed_write_leaves_the_old_file_and_no_temporary_one(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    write_text(target, "old")
    with pytest.raises(WideError, match=r"b\.json cannot be written"):
        write_text(target / "b.json", "new")  # a file where the folder should be
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_no_space_left_is_one_sentence() -> None:
    run = start()
    (run.path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(WideError, match="No space left"):
        run.log(0, loss=1.0)


def test_a_kill_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    target = tmp_path / "state.json"
    program = (
        "import json, sys, itertools; from pathlib import Path; from widecli.storage import write_json\n"
        "for i in itertools.count(): write_json(Path(sys.argv[1]), {'i': i, 'filling': ['x' * 1000] * 300})\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", program, str(target)], env=environment)
        deadline = time.monotonic() + 30
        while not target.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert len(json.loads(target.read_text())["filling"]) == 300
        target.unlink()


def test_a_directory_is_held_by_one_at_a_time_under_any_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("new/r")
    with held(Path("new/r")):
        for name in (tmp_path / "new" / "r", Path("link")):
            with pytest.raises(WideError, match=r"another process works on .*new/r: wait for it"), held(name):
                pass
        with held(Path("new/other")):
            pass
    assert list(Path("new").iterdir()) == []
    with held(Path("new/r")):
        pass


def test_a_lock_that_its_holder_took_away_at_the_same_moment_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    file, real = Path("lock"), fcntl.flock

    def late(handle: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        file.unlink()
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    handle = try_lock(file)
    assert handle is not None and os.path.samestat(os.fstat(handle), file.stat())
    assert try_lock(file) is None
    os.close(handle)


def test_a_file_system_without_locks_keeps_nobody_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import fcntl

    def missing(handle: int, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", missing)
    said: list[str] = []
    with held(Path("r")), held(Path("r"), warn=said.append):
        pass
    assert len(said) == 1 and "has no locks" in said[0]


def test_where_nothing_can_be_written_beside_a_directory_it_is_locked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwritable_place(file: Path, warn: object) -> int:
        raise WideError(f"{file} cannot be written")

    monkeypatch.setattr("widecli.storage.try_lock", unwritable_place)
    Path("mounted").mkdir()
    with held(Path("mounted")):
        with pytest.raises(WideError, match="another process works on"), held(Path("mounted")):
            pass
        with held(Path("/")), held(Path("not there")):
            pass
    with held(Path("mounted")):
        assert list(Path("mounted").iterdir()) == []


def test_a_process_that_was_killed_holds_nothing() -> None:
    program = (
        "import sys, time; from pathlib import Path; from widecli.storage import held\n"
        "with held(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", program, "r"], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    with pytest.raises(WideError, match="another process"), held(Path("r")):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with held(Path("r")):
        pass

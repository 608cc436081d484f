"""Whole commands on a tiny random Llama in a folder, with a text file beside it: in this process or in another."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from whole_commands import SENTENCES, STRONG, Outcome, Wide, invoke, write_recipe

from tiny_models import save_model_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def other_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same sizes, other weights."""
    return save_model_folder(tmp_path_factory.mktemp("models") / "other-llama", seed=1)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "train.txt"
    path.write_text("".join(SENTENCES))
    return path


@pytest.fixture(scope="session")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "held-out.txt"
    path.write_text("".join(reversed(SENTENCES))[:1500])
    return path


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder a command runs in; `runs/` appears here."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def wide(workplace: Path) -> Wide:
    """Runs `wide ARGUMENTS...` in this process."""
    return invoke


@pytest.fixture
def start_wide(workplace: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts `python -m widecli ARGUMENTS...` as a process of its own."""

    def start(*arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "widecli", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=workplace,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p)},
        )

    return start


@pytest.fixture
def tiny_recipe(workplace: Path, model_folder: Path, text_file: Path, held_out: Path) -> Path:
    """Eight steps of 2 x 32 tokens, a checkpoint every second one."""
    return write_recipe(workplace / "tiny.yaml", model_folder, text_file, held_out)


@pytest.fixture(scope="session")
def calibration(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, text_file: Path, held_out: Path
) -> Outcome:
    """One calibration for all tests, in `calibrated/` below `folder`."""
    folder = tmp_path_factory.mktemp("calibration")
    write_recipe(folder / "tiny.yaml", model_folder, text_file, held_out)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        done = invoke("calibrate", "tiny.yaml", "--run-dir", "calibrated", "--json")
    assert done.code == 0, done.err
    return replace(done, folder=folder)


@pytest.fixture
def run(calibration: Outcome, workplace: Path) -> Outcome:
    """A finished calibration in `calibrated/`, to do with as one likes."""
    assert calibration.folder is not None
    shutil.copytree(calibration.folder / "calibrated", workplace / "calibrated")
    return calibration


@pytest.fixture(scope="session")
def adaptation(tmp_path_factory: pytest.TempPathFactory, calibration: Outcome) -> Outcome:
    """One second stage for all tests, in `adapted/` below `folder`, beside its `calibrated/` and their evaluations."""
    folder = tmp_path_factory.mktemp("adaptation")
    assert calibration.folder is not None
    shutil.copytree(calibration.folder / "calibrated", folder / "calibrated")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        done = invoke("lora", "calibrated", "--run-dir", "adapted", *STRONG, "--json")
        assert done.code == 0, done.err
        for name in ("calibrated", "adapted"):
            assert invoke("eval", name, "--run-dir", f"eval-{name}").code == 0
    return replace(done, folder=folder)


@pytest.fixture
def adapted(adaptation: Outcome, workplace: Path) -> Outcome:
    """A finished second stage in `adapted/`, its calibration in `calibrated/`, both evaluated."""
    assert adaptation.folder is not None
    for name in ("calibrated", "adapted", "eval-calibrated", "eval-adapted"):
        shutil.copytree(adaptation.folder / name, workplace / name)
    return adaptation

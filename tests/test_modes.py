"""Who may read what is written is for the umask, and the folder around it, to say."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from widecli.errors import WideError
from widecli.evaluate.dense_cache import DenseCache
from widecli.storage import atomic_directory, home, replace_unusable_caches, try_lock, user_cache, write_text


@contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def write_all(root: Path) -> dict[str, Path]:
    """Everything that storage writes, below `root`."""
    from safetensors.torch import save_file

    with atomic_directory(root / "checkpoint") as scratch:
        save_file({"a": torch.zeros(1)}, scratch / "a.safetensors")
        (scratch / "adapter").mkdir(mode=0o700)
        (scratch / "adapter" / "config.json").write_text("{}")
    write_text(root / "summary.json", "{}")
    handle = try_lock(root / "lock")
    assert handle is not None
    os.close(handle)
    dense = DenseCache(root / "dense").store({"model": "m"}, {})
    made = root / "checkpoint"
    files = (made / "a.safetensors", made / "adapter" / "config.json", root / "summary.json", root / "lock", dense)
    folders = (made, made / "adapter", root / "dense")
    return {**{f"file {p.name}": p for p in files}, **{f"folder {p.name}": p for p in folders}}


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o027, 0o002])
def test_modes_follow_the_umask(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        written = write_all(tmp_path)
        again = write_all(tmp_path)
    assert written == again
    for name, path in written.items():
        assert mode(path) == (0o666 if name.startswith("file") else 0o777) & ~mask, name


def test_a_group_folder_hands_its_group_on(tmp_path: Path) -> None:
    tmp_path.chmod(0o2775)
    with umask(0o002):
        written = write_all(tmp_path)
    if not mode(tmp_path) & stat.S_ISGID:
        pytest.skip("this file system keeps no set-group-id bits")
    for name, path in written.items():
        assert path.stat().st_gid == tmp_path.stat().st_gid
        assert mode(path) == (0o664 if name.startswith("file") else 0o2775), name


def test_a_link_in_a_directory_leaves_what_it_leads_to_alone(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / "elsewhere").chmod(0o600)
    with umask(0o022), atomic_directory(tmp_path / "made") as scratch:
        (scratch / "link").symlink_to(tmp_path / "elsewhere")
    assert mode(tmp_path / "elsewhere") == 0o600


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user without a home directory, and where temporary files go."""

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_user_without_a_home_has_a_private_cache(homeless: Path) -> None:
    assert home() is None
    cache = user_cache()
    assert cache.parent == homeless and mode(cache) == 0o700 and user_cache() == cache


def test_a_cache_that_others_can_write_is_not_trusted(homeless: Path) -> None:
    user_cache().chmod(0o777)
    with pytest.raises(WideError, match=r"there is no home directory, and .* is not this user's alone.*XDG_CACHE_HOME"):
        user_cache()


def test_a_cache_that_is_a_link_is_not_trusted(homeless: Path) -> None:
    (homeless / "theirs").mkdir()
    (homeless / f"wide-cache-{os.getuid()}").symlink_to(homeless / "theirs")
    with pytest.raises(WideError, match="is not this user's alone"):
        user_cache()


def test_doctor_and_the_record_of_the_machine_do_without_a_home(homeless: Path) -> None:
    from widecli.profiling.checkup import checkup
    from widecli.profiling.environment import environment
    from widecli.track.wandb import is_logged_in

    assert {check.name for check in checkup(offline=True)} >= {"token cache", "hub cache", "runs"}
    assert environment()["command_line"] is not None
    assert is_logged_in() in (True, False)


@pytest.mark.parametrize("variable", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
def test_a_folder_to_compile_into_that_cannot_be_used_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    (tmp_path / "a-file").write_text("")
    said: list[str] = []
    for named in ("/proc/none", str(tmp_path / "a-file"), str(tmp_path / "a-file" / "below")):
        monkeypatch.setenv(variable, named)
        replace_unusable_caches(said.append)
        found = os.environ[variable]
        assert found != named and Path(found).is_dir() and mode(Path(found)) == 0o700
        assert f"{variable}={named} cannot be used" in said.pop() and not said
    monkeypatch.setenv(variable, str(tmp_path / "new"))
    replace_unusable_caches(said.append)
    assert os.environ[variable] == str(tmp_path / "new") and not said


@pytest.mark.slow
def test_a_command_runs_though_nothing_can_be_compiled_into_the_folder_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "widecli", "profile", "--shape", "128x256x2", "--gen", "4", "--seconds", "0.01"]
    paths = os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p)
    environment = {**os.environ, "PYTHONPATH": paths, "TORCHINDUCTOR_CACHE_DIR": "/proc/none"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: TORCHINDUCTOR_CACHE_DIR=/proc/none cannot be used") == 1

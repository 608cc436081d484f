from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from widecli.errors import UsageError, WideError
from widecli.storage import atomic_directory, given_path, remove_directory
from widecli.track.run import Run

Place = Callable[[Path, pytest.MonkeyPatch], Path]


def new(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return folder / "deep" / "new"


def plain(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder / "plain").mkdir()
    return folder / "plain"


def working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(plain(folder, monkeypatch))
    return Path()


def link(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder / "link").symlink_to(plain(folder, monkeypatch))
    return folder / "link"


def link_to_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder / "link").symlink_to(folder / "later")
    return folder / "link"


def mount(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    mounted, real = plain(folder, monkeypatch), Path.replace

    def busy(self: Path, target: Path) -> Path:
        if mounted in (self, Path(target)):
            raise OSError(errno.EBUSY, "Device or resource busy")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", busy)
    monkeypatch.setattr(Path, "rename", busy)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == mounted)
    return mounted


PLACES = [new, plain, working_directory, link, link_to_nothing, mount]


@pytest.mark.parametrize("place", PLACES)
def test_a_directory_is_filled_wherever_it_is(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = place(tmp_path, monkeypatch)
    for content in ("one", "two"):
        with atomic_directory(target) as scratch:
            (scratch / f"{content}.txt").write_text(content)
        assert [path.name for path in target.iterdir()] == [f"{content}.txt"]
    with pytest.raises(ValueError), atomic_directory(target) as scratch:
        (scratch / "three.txt").touch()
        raise ValueError
    assert [path.name for path in target.iterdir()] == ["two.txt"]
    left = [path.name for path in tmp_path.rglob(".*")]
    assert not left, left
    assert not target.is_symlink() or (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("place", PLACES)
def test_a_run_is_replaced_wherever_it_is(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = place(tmp_path, monkeypatch)
    for loss in (1.0, 2.0):
        with Run.held("calibrate", "x", recipe_yaml="", run_dir=target, overwrite=loss > 1) as run:
            run.log(1, loss=loss)
            run.close()
    assert run.metrics() == [{"step": 1, "loss": 2.0}]
    assert not [path.name for path in tmp_path.rglob(".*")]


def test_a_directory_that_cannot_be_taken_away_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    (tmp_path / "r").mkdir()
    with pytest.raises(WideError, match=r"/r cannot be written \(Permission denied\)"):
        remove_directory(tmp_path / "r")


def test_a_tilde_is_the_home_directory_unless_there_is_such_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert given_path("~/x") == Path("/home/me/x")
    assert given_path("~nobody-of-that-name/x") == Path("~nobody-of-that-name/x")
    (tmp_path / "~").mkdir()
    assert given_path("~") == Path("~")
    for name in ("a" * 5000, "nul\0"):
        with pytest.raises(UsageError, match="no name that a file can have"):
            given_path(name)


def test_a_path_in_a_locked_folder_is_not_called_an_impossible_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", denied)
    with pytest.raises(UsageError, match=r"'locked/a\.txt' lies in a folder that may not be read"):
        given_path("locked/a.txt")

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from widecli.recipe.schema import TrackSection
from widecli.track import wandb as tracking
from widecli.track.run import Run


class FakeClient:
    """Stands in for a W&B run."""

    url = "https://wandb.test/run"

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.summary: dict[str, Any] = {}
        self.finished_with: int | None = None

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))

    def finish(self, exit_code: int) -> None:
        self.finished_with = exit_code


class FakeWandb(types.ModuleType):
    """Stands in for the package: records how it was started and fails where told to."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = types.SimpleNamespace(name="wandb")  # type: ignore[assignment]
        self.starts: list[dict[str, Any]] = []
        self.failing: set[str] = set()
        self.client = FakeClient()

    def Settings(self, **settings: Any) -> Any:
        return types.SimpleNamespace(base_url="https://api.wandb.test", **settings)

    def init(self, **arguments: Any) -> FakeClient:
        self.starts.append({**arguments, "stdin_is_terminal": sys.stdin.isatty()})
        if arguments["mode"] in self.failing:
            raise RuntimeError("boom\nsecond line")
        return self.client

    def teardown(self) -> None:
        pass


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return module


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create("calibrate", "x", recipe_yaml="", run_dir=tmp_path / "run")


def start(run: Run, asked: str, warnings: list[str] | None = None) -> tracking.Tracker:
    lines = warnings if warnings is not None else []
    return tracking.start_wandb(TrackSection(wandb=asked), run, {"a": 1}, lines.append)  # type: ignore[arg-type]


def log_in(tmp_path: Path, host: str = "api.wandb.test") -> None:
    (tmp_path / "netrc").write_text(f"machine {host}\n  login user\n  password secret\n")


def test_auto_is_offline_when_not_logged_in_and_says_so_once(fake: FakeWandb, run: Run) -> None:
    warnings: list[str] = []
    tracker = start(run, "auto", warnings)
    assert tracker.mode == "offline"
    assert "not logged in" in tracker.description
    assert warnings == []
    assert [s["mode"] for s in fake.starts] == ["offline"]


def test_auto_is_online_when_logged_in(
    fake: FakeWandb, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(tmp_path)
    assert start(run, "auto").mode == "online"
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    tracker = start(run, "auto")
    assert tracker.mode == "online"
    assert FakeClient.url in tracker.description


def test_a_key_for_another_server_is_no_login(
    fake: FakeWandb, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(tmp_path, host="elsewhere.test")
    assert start(run, "auto").mode == "offline"
    monkeypatch.setenv("WANDB_BASE_URL", "https://elsewhere.test")
    assert start(run, "auto").mode == "online"


def test_online_without_a_login_goes_offline_with_one_warning(fake: FakeWandb, run: Run) -> None:
    warnings: list[str] = []
    assert start(run, "online", warnings).mode == "offline"
    assert len(warnings) == 1
    assert "not logged in" in warnings[0]


@pytest.mark.parametrize(("name", "value"), [("WANDB_MODE", "disabled"), ("WANDB_DISABLED", "true")])
def test_the_environment_switches_auto_off(
    fake: FakeWandb, run: Run, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert start(run, "auto").mode == "off"
    assert fake.starts == []


def test_wandb_mode_offline_holds_in_auto_though_logged_in(
    fake: FakeWandb, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert start(run, "auto").mode == "offline"


def test_off_touches_nothing(fake: FakeWandb, run: Run) -> None:
    tracker = start(run, "off")
    tracker.log(0, {"loss": 1.0})
    tracker.finish()
    assert fake.starts == []
    assert not (run.path / "wandb.json").exists()


def test_a_failed_online_start_falls_back_to_offline_then_off(fake: FakeWandb, run: Run, tmp_path: Path) -> None:
    log_in(tmp_path)
    fake.failing = {"online"}
    warnings: list[str] = []
    assert start(run, "auto", warnings).mode == "offline"
    assert len(warnings) == 1
    assert "boom" in warnings[0]
    assert "second line" not in warnings[0]
    fake.failing = {"online", "offline"}
    assert start(run, "auto").mode == "off"


def test_a_failure_later_warns_once_and_the_run_goes_on(
    fake: FakeWandb, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    tracker = start(run, "offline", warnings)

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr(fake.client, "log", fail)
    for step in range(3):
        tracker.log(step, {"loss": 1.0})
    tracker.finish()
    assert len(warnings) == 1
    assert tracker.mode == "off"


def test_it_never_asks_and_keeps_its_files_with_the_run(fake: FakeWandb, run: Run) -> None:
    start(run, "offline")
    arguments = fake.starts[0]
    assert arguments["stdin_is_terminal"] is False
    assert arguments["dir"] == str(run.path)
    assert arguments["config"] == {"a": 1}
    assert arguments["name"] == run.path.name


def test_a_resumed_run_continues_the_same_wandb_run(fake: FakeWandb, run: Run) -> None:
    start(run, "offline")
    start(run, "offline")
    assert fake.starts[0]["id"] == fake.starts[1]["id"]


def test_what_is_logged_arrives(fake: FakeWandb, run: Run) -> None:
    tracker = start(run, "offline")
    tracker.log(3, {"loss": 1.5})
    tracker.summarise({"skip_rate": {"mean": 0.5}})
    tracker.finish(exit_code=1)
    assert fake.client.logged == [(3, {"loss": 1.5})]
    assert fake.client.summary == {"skip_rate": {"mean": 0.5}}
    assert fake.client.finished_with == 1


def test_without_the_package_it_is_off(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    assert start(run, "auto").mode == "off"
    warnings: list[str] = []
    assert start(run, "online", warnings).mode == "off"
    assert "not installed" in warnings[0]


@pytest.mark.slow
def test_the_real_client_runs_offline_without_asking(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    warnings: list[str] = []
    tracker = start(run, "auto", warnings)
    tracker.log(0, {"loss": 1.0})
    tracker.finish()
    assert warnings == []
    assert tracker.mode == "offline"
    assert list((run.path / "wandb").glob("offline-run-*"))

from __future__ import annotations

import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from widecli.profiling import checkup
from widecli.profiling.checkup import Check


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(int(self.path.strip("/")))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_the_hub_is_reached_or_the_reason_is_given(server: str) -> None:
    assert checkup._unreachable(f"{server}/200") is None
    assert checkup._unreachable(f"{server}/401") is None
    assert checkup._unreachable(f"{server}/403") == "HTTP 403"
    assert checkup._unreachable("http://127.0.0.1:1/")


def test_offline_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(checkup, "_unreachable", lambda url: pytest.fail("asked the network"))
    assert checkup._hub(offline=True).state == "limited"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert checkup._hub(offline=False).state == "limited"


def test_whatever_is_not_ok_says_what_that_prevents() -> None:
    checks = checkup.checkup(data_root="/nonexistent", offline=True)
    assert {"python", "torch", "cpu", "embedded model", "hub", "w&b", "data root", "runs"} <= {c.name for c in checks}
    for check in checks:
        assert bool(check.prevents) == (check.state != "ok"), check


def test_a_missing_requirement_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "package_version", lambda name: None if name == "peft" else "1.0")
    missing = [check for check in checkup._software() if check.required and check.state == "missing"]
    assert [(check.name, check.get) for check in missing] == [("peft", "pip install peft")]


def test_a_broken_package_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("libcudart.so: cannot open\nmore")

    monkeypatch.setattr(checkup.importlib, "import_module", broken)
    check = checkup._imported("torch", "everything", required=True)
    assert (check.state, check.detail) == ("missing", "installed but broken: libcudart.so: cannot open")


def test_a_data_root_is_whole_partial_or_not_there(tmp_path: Path) -> None:
    assert checkup._data_root(str(tmp_path / "no")).state == "missing"
    assert checkup._data_root(str(tmp_path)).state == "missing"
    (tmp_path / "baber" / "piqa").mkdir(parents=True)
    assert checkup._data_root(str(tmp_path)).state == "limited"
    for name in checkup._DATA_SETS:
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    assert checkup._data_root(str(tmp_path)).state == "ok"


def test_the_real_data_root_is_whole(data_root: Path) -> None:
    assert checkup._data_root(str(data_root / "hub")).state == "ok"


def test_little_space_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    states: list[Check] = list(checkup._folders())
    assert {check.state for check in states} == {"limited"}

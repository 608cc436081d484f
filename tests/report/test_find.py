from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from stored_runs import write_calibration, write_pair
from widecli.errors import UsageError
from widecli.report.find import REPORT_DOCUMENT, find_runs
from widecli.storage import write_text


def reasons(folder: Path) -> dict[str, str]:
    return {skipped.path.name: skipped.reason for skipped in find_runs([folder]).skipped}


def test_runs_are_found_below_folders_of_folders_and_named_directly(tmp_path: Path) -> None:
    write_calibration(tmp_path / "runs" / "sweep-a", "x")
    write_calibration(tmp_path / "runs", "y")
    assert {run.label for run in find_runs([tmp_path / "runs"]).runs} == {"calibrate-x", "calibrate-y"}
    assert [run.label for run in find_runs([tmp_path / "runs" / "calibrate-y"]).runs] == ["calibrate-y"]


def test_a_folder_that_may_not_be_read_is_left_out_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_calibration(tmp_path, "good")
    write_calibration(tmp_path, "private")
    monkeypatch.setattr(os, "access", lambda path, _: "private" not in Path(path).name)
    found = find_runs([tmp_path])
    assert [run.label for run in found.runs] == ["calibrate-good"]
    assert reasons(tmp_path) == {"calibrate-private": "it may not be read (permission denied)"}


def test_a_run_named_twice_counts_once(tmp_path: Path) -> None:
    path = write_calibration(tmp_path, "x")
    found = find_runs([tmp_path, path])
    assert len(found.runs) == 1 and found.skipped == ()


def test_runs_of_the_same_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    write_calibration(tmp_path / "first", "x")
    write_calibration(tmp_path / "second", "x")
    labels = {run.label for run in find_runs([tmp_path]).runs}
    assert labels == {"first/calibrate-x", "second/calibrate-x"}


def test_half_written_broken_foreign_and_older_folders_each_get_one_reason(tmp_path: Path) -> None:
    write_calibration(tmp_path, "good")
    (write_calibration(tmp_path, "killed") / "summary.json").unlink()
    (write_calibration(tmp_path, "torn") / "summary.json").write_text('{"schema": "wide.su')
    older = write_calibration(tmp_path, "older") / "summary.json"
    older.write_text(json.dumps({**json.loads(older.read_text()), "schema": "wide.summary/0"}))
    lacking = write_calibration(tmp_path, "lacking") / "summary.json"
    lacking.write_text(json.dumps({k: v for k, v in json.loads(lacking.read_text()).items() if k != "plan"}))
    odd = write_calibration(tmp_path, "odd") / "summary.json"
    odd.write_text(json.dumps({**json.loads(odd.read_text()), "skip_rate": [1]}))
    (write_calibration(tmp_path, "mangled") / "recipe.yaml").write_text("a: [")
    (tmp_path / "thesis" / "chapter").mkdir(parents=True)
    for file in ("recipe.yaml", "wide_config.json"):
        write_text(tmp_path / "exported" / file, "{}")
    assert [run.label for run in find_runs([tmp_path]).runs] == ["calibrate-good"]
    found = reasons(tmp_path)
    assert found.keys() == {f"calibrate-{n}" for n in ("killed", "torn", "older", "lacking", "odd", "mangled")} | {
        "thesis",
        "exported",
    }
    assert found["exported"] == "a checkpoint, not a run"
    assert "not finished" in found["calibrate-killed"]
    assert "cannot be read" in found["calibrate-torn"]
    assert "'wide.summary/0'" in found["calibrate-older"] and "'wide.summary/1'" in found["calibrate-older"]
    assert "plan" in found["calibrate-lacking"]
    assert "skip_rate" in found["calibrate-odd"]
    assert "recipe.yaml" in found["calibrate-mangled"]
    assert found["thesis"] == "not a run directory"


def test_a_link_back_to_where_it_lies_tells_nothing_twice(tmp_path: Path) -> None:
    write_calibration(tmp_path, "good")
    (write_calibration(tmp_path, "killed") / "summary.json").unlink()
    (tmp_path / "loop").symlink_to(tmp_path)
    found = find_runs([tmp_path])
    assert [run.label for run in found.runs] == ["calibrate-good"]
    assert [skipped.path for skipped in found.skipped] == [tmp_path / "calibrate-killed"]


def test_an_earlier_report_among_the_runs_is_not_mentioned(tmp_path: Path) -> None:
    write_pair(tmp_path, "x", perplexity=30.0)
    (tmp_path / "report" / "plots").mkdir(parents=True)
    (tmp_path / "report" / REPORT_DOCUMENT).write_text("{}")
    assert reasons(tmp_path) == {}


def test_a_sweep_stands_for_the_runs_that_its_manifest_lists(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("x", "y", "killed", "other"):
        write_calibration(runs, name)
    (runs / "calibrate-killed" / "summary.json").unlink()
    sweep = runs / "sweep-a"
    (sweep / "points").mkdir(parents=True)
    listed = [f"../calibrate-{name}" for name in ("x", "y", "killed", "gone")]
    (sweep / "summary.json").write_text(
        json.dumps({"schema": "wide.summary/1", "command": "sweep", "runs": listed, "points": []})
    )
    found = find_runs([sweep])
    assert [run.label for run in found.runs] == ["calibrate-x", "calibrate-y"]
    assert [skipped.path.name for skipped in found.skipped] == ["calibrate-killed"]
    everything = find_runs([runs])
    assert len(everything.runs) == 3 and len(everything.skipped) == 1  # none of them twice


def test_nothing_to_read_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a folder"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(UsageError, match="no finished run"):
        find_runs([tmp_path])
    (write_calibration(tmp_path, "killed") / "summary.json").unlink()
    with pytest.raises(UsageError, match=r"calibrate-killed: not finished"):
        find_runs([tmp_path])

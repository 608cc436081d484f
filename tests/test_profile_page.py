"""The page of profiles names every part of a step, each beside its bound."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from widecli.profiling.trace import PARTS


@pytest.fixture
def renderer(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(repository / "reports")
    return importlib.import_module("render_profile")


def test_every_part_that_a_breakdown_may_name_has_a_row(renderer: ModuleType) -> None:
    assert set(renderer.PARTS) == {*PARTS, "ffn"}  # what patterns ran as one operator stands in a record


def test_an_ffn_in_one_operator_stands_beside_the_bound_of_its_halves(renderer: ModuleType) -> None:
    bounds = {"qkv": 1.0, "gate_up": 2.0, "down": 1.5}
    dense = {
        "p50_ms": 9.0,
        "bound_ms": 9.0,
        "fixed_share": 0.1,
        "bound_parts_ms": {key: 2 * bounds[key] for key in bounds},
    }
    dense |= {"breakdown_ms": {"qkv": 2.5, "gate_up": 4.5, "down": 3.25}}
    routed = {"p50_ms": 6.0, "bound_ms": 4.5, "bound_parts_ms": bounds, "breakdown_ms": {"qkv": 1.25, "ffn": 4.75}}
    point = {"phase": "ttft", "batch": 1, "prompt": 8, "masks": "random", "group_size": 16, "patterns": 64}
    point |= {"sparsity": 0.5, "dense": dense, "routed": routed}
    record = renderer.Record("one", {"model": "m", "command": "profile", "points": [point]}, {})
    rows = {line.split(" | ")[0]: line for line in renderer.breakdowns([record]).splitlines()}
    assert rows["| gate and up"] == "| gate and up | 4.5 | 4 |  |  |"
    assert rows["| down"] == "| down | 3.25 | 3 |  |  |"
    assert rows["| gate, up and down in one operator"] == "| gate, up and down in one operator |  |  | 4.75 | 3.5 |"


def test_the_records_of_the_repository_are_rendered(renderer: ModuleType, repository: Path) -> None:
    folder = repository / "reports/profile"
    notes = json.loads((folder / "notes.json").read_text())
    assert (folder / "README.md").read_text() == renderer.page(renderer.load(folder), notes)


def test_the_readme_shows_the_run_with_compensation(renderer: ModuleType, repository: Path) -> None:
    records = renderer.load(repository / "reports/profile")
    readme = (repository / "README.md").read_text()
    assert f"<!-- speed -->\n{renderer.headline(records)}<!-- /speed -->" in readme
    points = json.loads((repository / "reports/profile/compensation/summary.json").read_text())["points"]
    shown = {f"{point['speedup']:.2f}x" for point in points if point["compensation"]}
    assert shown and shown == set(re.findall(r"\d\.\d\dx", renderer.headline(records)))
    documented = (repository / "docs/profiling.md").read_text()
    assert f"<!-- profile -->\n{renderer.short(records)}<!-- /profile -->" in documented

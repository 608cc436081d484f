"""The notebook in `examples/` runs from its first cell to its last, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

CHANGES = (
    "data.sequence_length=32 routing.ffn_group_size=16 routing.rank=4 routing.warm_start_tokens=256 "
    "compensation.rank=4 train.batch_size=2"
)


def test_the_notebook_runs(
    model_folder: Path, text_file: Path, tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="the notebook draws with matplotlib: pip install 'widecli[plots]'")
    notebook = json.loads((repository / "examples/quickstart.ipynb").read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WIDE_EXAMPLE_MODEL", str(model_folder))
    monkeypatch.setenv("WIDE_EXAMPLE_CHANGES", f"{CHANGES} data.source={text_file}")
    names: dict[str, Any] = {}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
            assert not cell["outputs"] and cell["execution_count"] is None, "stored outputs grow old: clear them"
    executed = names["executed"]
    assert executed.shape[1] == names["ids"].shape[1] and 0 < float(executed.mean()) < 1
    assert len(names["done"].tokens) == 2

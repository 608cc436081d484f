"""One process in a run directory or an export at a time, whichever command it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from whole_commands import Outcome, Wide

from widecli.storage import held

COMMANDS = {
    "anew": ("calibrate", "tiny.yaml", "--run-dir"),
    "overwrite": ("calibrate", "tiny.yaml", "train.steps=5", "--overwrite", "--run-dir"),
    "resume": ("calibrate", "tiny.yaml", "--resume", "--run-dir"),
    "lora": ("lora", "calibrated", "--overwrite", "--run-dir"),
    "eval": ("eval", "calibrated", "--overwrite", "--run-dir"),
    "inspect": ("inspect", "calibrated", "--overwrite", "--run-dir"),
    "export": ("export", "calibrated", "--overwrite", "--out"),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_directory_where_another_process_works_is_refused_and_left_alone(
    wide: Wide, workplace: Path, tiny_recipe: Path, run: Outcome, command: str
) -> None:
    (workplace / "work").mkdir()
    (workplace / "work" / "recipe.yaml").write_text((workplace / "calibrated" / "recipe.yaml").read_text())
    before = contents(workplace / "work")
    with held(workplace / "work"):
        done = wide(*COMMANDS[command], "work")
    done.refused_with("another process works on", "work", COMMANDS[command][-1], code=1)
    assert contents(workplace / "work") == before

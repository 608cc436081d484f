"""The documentation's tables of a sweep hold what the records hold, each run in the column of its kind."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from widecli import __version__
from widecli.report.report import build, markdown_page


@pytest.fixture
def renderer(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(repository / "reports")
    return importlib.import_module("render_sweep")


PARTS = {"mode": "token", "ffn_group_size": 64}


def evaluated(folder: Path, name: str, sparsity: float, perplexity: float, **changes: Any) -> None:
    """An evaluation and the recipe behind its checkpoint."""
    run = folder / f"made-{name}"
    run.mkdir()
    (run / "recipe.yaml").write_text(f"budget: {{sparsity: {sparsity}}}\n")
    summary = {
        "plan": {"mode": "wide", "ffn_group_size": 64},
        "checkpoint": f"runs/made-{name}/checkpoints/step-000300",
        "adapter": None,
        "merged": False,
        "protocol": {"limit": 400},
        "retention": 0.9,
        "flops_skipped": {"prunable": sparsity},
        "perplexity": {"wikitext2/token_ppl": perplexity},
    }
    place = folder / f"eval-{name}"
    place.mkdir()
    (place / "summary.json").write_text(json.dumps(summary | changes))


def test_second_stages_of_whole_parts_and_other_modes_stay_out_of_the_columns_of_groups(
    renderer: ModuleType, tmp_path: Path
) -> None:
    evaluated(tmp_path, "dense", 0.0, 11.0, plan=None)
    evaluated(tmp_path, "a-groups", 0.5, 21.0)
    evaluated(tmp_path, "b-all-items", 0.5, 21.5, protocol={"limit": None})
    evaluated(tmp_path, "c-wider", 0.5, 22.0, plan={"mode": "wide", "ffn_group_size": 128})
    evaluated(tmp_path, "d-parts", 0.5, 23.0, plan=PARTS)
    evaluated(tmp_path, "e-lora", 0.5, 24.0, adapter={"rank": 16})
    evaluated(tmp_path, "f-lora-of-parts", 0.5, 25.0, plan=PARTS, adapter={"rank": 16})
    evaluated(tmp_path, "g-patterns", 0.5, 26.0, plan={"mode": "patterns", "ffn_group_size": 64})
    text = renderer.sweep(tmp_path)
    assert "| 50 | 50.0 | 21.50 | 90.0 (all) | 50.0 | 23.00 | 90.0 (400) | 24.00 | 90.0 (400) |" in text
    assert "| WikiText-2 | 21.50 | 22.00 |" in text
    assert "Dense: 11.00." in text and "25.00" not in text and "26.00" not in text


def test_a_record_with_net_and_gross_shares_is_shown_gross_like_those_before(
    renderer: ModuleType, tmp_path: Path
) -> None:
    evaluated(tmp_path, "dense", 0.0, 11.0, plan=None)
    evaluated(tmp_path, "old", 0.5, 21.0)
    evaluated(tmp_path, "new", 0.25, 22.0, flops_skipped={"prunable": 0.2, "prunable_gross": 0.24})
    text = renderer.sweep(tmp_path)
    assert "| 25 | 24.0 | 22.00 |" in text and "| 50 | 50.0 | 21.00 |" in text


def test_the_page_of_the_stored_sweep_is_what_wide_report_makes_of_it(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)  # paths in the page are as seen from there
    page = markdown_page(build(["reports/smollm2-h200-sweep"]))
    stored = (repository / "reports/smollm2-h200-sweep/README.md").read_text()
    assert page == re.sub(r"wide \d+\.\d+\.\d+\.", f"wide {__version__}.", stored, count=1)
    assert "| FLOPs gross, % |" in page and "net, less" not in page


def test_the_records_of_the_repository_are_in_its_documentation(renderer: ModuleType, repository: Path) -> None:
    sweeps, training = ((repository / f"docs/{name}.md").read_text() for name in ("sweeps", "training"))
    assert f"<!-- sweep -->\n{renderer.sweep(repository / 'reports/smollm2-h200-sweep')}<!-- /sweep -->" in sweeps
    assert f"<!-- scaling -->\n{renderer.scaling(repository / 'reports/scaling')}<!-- /scaling -->" in training

"""The README stays short, links lead somewhere, the site builds, and figures in prose are those of records and code."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from widecli.model.cost import part_flops
from widecli.model.plan import ModelShape
from widecli.profiling.shapes import config_of_shape
from widecli.recipe.keys import recipe_keys

LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]+)(?:#[^)]*)?\)")


def written(repository: Path) -> list[Path]:
    return [repository / "README.md", repository / "CONTRIBUTING.md", *sorted((repository / "docs").rglob("*.md"))]


def test_the_readme_can_be_read_in_three_minutes(repository: Path) -> None:
    assert len((repository / "README.md").read_bytes()) <= 10_000


def test_links_lead_somewhere(repository: Path) -> None:
    made = {"img/pareto.png", "reference/commands.md", "reference/recipe.md"}
    for page in written(repository):
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            assert target in made or (page.parent / target).exists(), f"{page.name}: {target}"


def test_recipe_keys_in_the_documentation_exist(repository: Path) -> None:
    """Whatever stands in backticks and looks like a section's key is one."""
    sections = {key.split(".", 1)[0] for key in recipe_keys()}
    for page in written(repository):
        for word in re.findall(r"`([a-z]+\.[a-z_]+)(?:=[^`]*)?`", page.read_text(encoding="utf-8")):
            if word.split(".", 1)[0] in sections and not word.endswith((".yaml", ".json", ".py", ".md")):
                assert word in recipe_keys(), f"{page.name}: {word}"


def test_commands_in_the_documentation_are_accepted(repository: Path) -> None:
    """Every flag that a page gives to a command is one of that command's."""
    import typer.main
    from click import Context

    from widecli.__main__ import app

    group = typer.main.get_command(app)
    with Context(group, info_name="wide") as context:
        for page in written(repository):
            for name, rest in re.findall(r"^(?:\$ )?wide ([a-z]+)([^\n#]*)", page.read_text(encoding="utf-8"), re.M):
                command = group.get_command(context, name)  # type: ignore[attr-defined]
                assert command is not None, f"{page.name}: wide {name}"
                known = {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)}
                for flag in re.findall(r"(?<=\s)(--[A-Za-z-]+)", rest):
                    assert flag in known, f"{page.name}: wide {name} {flag}"


def test_the_site_builds_without_a_warning(repository: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install 'widecli[docs]'")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": f"{repository}/src:{repository}/kernels"}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    keys = (tmp_path / "site/reference/recipe.html").read_text(encoding="utf-8")
    assert "routing.ffn_group_size" in keys and "multiple of 16" in keys
    commands = (tmp_path / "site/reference/commands.html").read_text(encoding="utf-8")
    assert "--compensation" in commands and "wide doctor" in commands


def test_what_the_method_page_says_of_costs_is_so(repository: Path) -> None:
    text = " ".join((repository / "docs/method.md").read_text(encoding="utf-8").split())
    wide = re.search(r"G = 128 and rank 32 they cost ([\d.]+) % of the FFN's FLOPs", text)
    narrow = re.search(r"together cost ([\d.]+) % of the prunable FLOPs", text)
    assert wide is not None and narrow is not None
    shape = ModelShape.from_config(config_of_shape("llama-3.1-8b"))
    groups, rank = shape.intermediate_size // 128, 32
    added = 2 * shape.hidden_size * (groups + 2 * rank)  # (1 - m) M, A n, B of it
    assert float(wide[1]) == pytest.approx(100 * added / part_flops(shape, "ffn", 2048), abs=0.05)
    record = repository / "reports/smollm2-h200-regrouped/eval-lr4e-3/summary.json"
    found = json.loads(record.read_text(encoding="utf-8"))["flops_skipped"]
    assert float(narrow[1]) == pytest.approx(100 * (found["prunable_gross"] - found["prunable"]), abs=0.05)

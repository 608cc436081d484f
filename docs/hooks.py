"""Pages of the documentation that are made, not written: recipe keys, help of every command, pictures of `reports/`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from click import Context
from mkdocs.structure.files import File, Files
from pydantic_core import PydanticUndefined

from widecli.__main__ import app
from widecli.cli.commands import COMMANDS
from widecli.recipe.keys import accepted, recipe_keys

PICTURES = {"img/pareto.png": "reports/page/pareto.png"}
HERE = Path(__file__).parent
TABLE_HEAD = "| key | default | takes | |\n|---|---|---|---|"


def on_files(files: Files, config: Any) -> Files:
    """Add the made pages to those that are written."""
    made = {"reference/recipe.md": recipe_page(), "reference/commands.md": commands_page()}
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    for name, source in PICTURES.items():
        files.append(File.generated(config, name, abs_src_path=str(HERE.parent / source)))
    return files


def recipe_page() -> str:
    """A table of keys for each section of a recipe."""
    sections = defaultdict(list)
    for key, field in recipe_keys().items():
        default = "" if field.default is PydanticUndefined else f"`{shown(field.default)}`"
        words = [cell(text) for text in (accepted(field), field.description or "")]
        sections[key.split(".", 1)[0]].append(f"| `{key}` | {default} | {' | '.join(words)} |")
    head = "# Recipe keys\n\nGive a key in a recipe or as `key=value` on the command line.\n"
    tables = ("\n".join([f"\n## {name}\n", TABLE_HEAD, *rows]) for name, rows in sections.items())
    return head + "\n".join(tables) + "\n"


def shown(value: object) -> str:
    """A value as YAML writes it."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, default=str).strip('"').replace("|", "\\|")


def cell(value: object) -> str:
    """As a cell of a table."""
    return str(value).replace("|", "\\|").replace("\n", " ")


def commands_page() -> str:
    """Every command's flags."""
    group = typer.main.get_command(app)
    parts = ["# Commands\n", "`wide COMMAND --help` says the same in a terminal.\n"]
    with Context(group, info_name="wide") as context:
        for name in COMMANDS:
            command = group.get_command(context, name)  # type: ignore[attr-defined]
            parts += [f"## wide {name}\n", (command.help or "").strip() + "\n", "| flag | |", "|---|---|"]
            parts += [f"| {flags} | {cell(text)} |" for flags, text in options(command)]
            parts.append("")
    return "\n".join(parts)


def options(command: Any) -> Iterator[tuple[str, str]]:
    """(its spellings, its help) of each flag of a command that is shown."""
    for parameter in command.params:
        if getattr(parameter, "hidden", False) or not getattr(parameter, "help", None):
            continue
        spelled = [*parameter.opts, *parameter.secondary_opts]
        yield ", ".join(f"`{flag}`" for flag in spelled), " ".join(parameter.help.split())

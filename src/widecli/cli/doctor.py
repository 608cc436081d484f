"""`wide doctor`: what this machine can do."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from widecli.cli.options import DataRoot, Json, Offline, go_offline

if TYPE_CHECKING:
    from rich.console import Console

    from widecli.profiling.checkup import Check

DOCTOR_SCHEMA = "wide.doctor/1"
_COLOURS = {"ok": "green", "limited": "yellow", "missing": "red"}


def doctor(json: Json = False, data_root: DataRoot = None, offline: Offline = False) -> None:
    """Say what this machine can do: devices, kernels, model, Hub, W&B, data, space.

    For each thing that is missing: what it prevents and how to get it. Exits with 1 when a required one is missing.
    """
    from widecli.cli.console import console, emit_json, note, stdout_for_document

    with stdout_for_document(json):
        offline = go_offline(offline)
        from widecli.profiling.checkup import checkup
        from widecli.profiling.environment import environment

        checks = checkup(data_root, offline)
        missing = [check.name for check in checks if check.required and check.state == "missing"]
        if json:
            document = {
                "schema": DOCTOR_SCHEMA,
                "ok": not missing,
                "checks": [asdict(check) for check in checks],
                "environment": environment(),
            }
            emit_json(document)
        else:
            _print(checks, console)
            note(f"Missing and required: {', '.join(missing)}." if missing else "Nothing that is required is missing.")
    if missing:
        raise typer.Exit(1)


def _print(checks: list[Check], console: Console) -> None:
    """One line a check; under it, for what is not ok, what that prevents and how to get it."""
    from rich.markup import escape

    width = max(len(check.name) for check in checks)
    indent = " " * (width + 10)
    for check in checks:
        colour = _COLOURS[check.state]
        console.print(f"{check.name:<{width}}  [{colour}]{check.state:<7}[/]  {escape(check.detail)}", soft_wrap=True)
        if check.prevents:
            console.print(f"{indent} without it, no: {check.prevents}", style="dim", markup=False, soft_wrap=True)
        if check.get:
            console.print(f"{indent} how to get it: {check.get}", style="dim", markup=False, soft_wrap=True)

from __future__ import annotations

from widecli.cli.options import Json


def doctor(json: Json = False) -> None:
    """Say what this machine can do."""

"""`wide`, also as `python -m widecli`. Imports nothing heavy: `wide --help` answers in under half a second."""

from __future__ import annotations

from typing import Annotated

import typer

from widecli import __version__
from widecli.cli.commands import LazyCommands

app = typer.Typer(
    cls=LazyCommands,
    name="wide",
    help="Token-level dynamic width pruning for Llama-like language models.",
    epilog="wide COMMAND [RECIPE] [KEY=VALUE]... [--flags]; wide COMMAND --help says more.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"wide {__version__}")
        raise typer.Exit


@app.callback()
def _wide(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="wide")


if __name__ == "__main__":
    main()

"""The table of commands and how one is loaded: a command's module is imported only when it is called."""

from __future__ import annotations

import errno
import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import typer
from typer.core import TyperGroup

from widecli.errors import WideError

COMMANDS: Mapping[str, str] = {
    "calibrate": "Train routers on a frozen model: every token learns which groups to run.",
    "lora": "Train a LoRA adapter, and the routers on, from a calibrated checkpoint.",
    "eval": "Measure a checkpoint beside its dense model: perplexity, tasks, skip rates.",
    "sweep": "Run a grid of recipe values: calibrate, adapt and evaluate every point.",
    "export": "Write a checkpoint, or its merged model, as a folder of its own with a model card.",
    "generate": "Continue a prompt with a checkpoint or a dense model, and say how fast that was.",
    "profile": "Measure dense and routed speed in turns: first token, further tokens, bounds, parts.",
    "demo": "Calibrate and evaluate the embedded model on this machine, in minutes.",
    "report": "Tables, plots and one page from all runs: Pareto fronts, sweeps, seeds.",
    "inspect": "Show what a checkpoint's routers learned: layers, groups, words, tiles.",
    "doctor": "Say what this machine can do, and how to get what is missing.",
}
"""Name -> help in one line. `wide NAME` runs the function NAME of the module `widecli.cli.NAME`."""


EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "calibrate": (
        "wide calibrate --sparsity 0.5",
        "wide calibrate --model meta-llama/Llama-3.2-1B --data 'text/*.jsonl.gz' --sparsity 0.4",
        "wide calibrate smollm2_s50_g64 train.steps=1000 --dry-run",
    ),
    "lora": ("wide lora", "wide lora runs/calibrate-... --data text.jsonl lora.rank=8"),
    "eval": (
        "wide eval --tasks paper",
        "wide eval runs/calibrate-... eval.perplexity=wikitext2,my/text.txt@60",
        "wide eval --model meta-llama/Llama-3.2-1B --tasks piqa --limit 400",
    ),
    "sweep": (
        "wide sweep --G 16,64,256 --sparsity 0.3,0.5",
        "wide sweep --set train.learning_rate=0.001,0.002 --stages calibrate,lora,eval --dry-run",
    ),
    "export": ("wide export --merge --out my-model", "wide export runs/lora-... --out routing"),
    "generate": ("wide generate --prompt 'Once upon a time'", "wide generate --chat --prompt 'Name three rivers.'"),
    "profile": ("wide profile --ttft --tpot", "wide profile --shape llama-3.1-8b --sparsity 0,0.5 --batch 1,8"),
    "demo": ("wide demo",),
    "report": ("wide report", "wide report runs/sweep-... --format html,csv --out page"),
    "inspect": ("wide inspect", "wide inspect runs/calibrate-... --text wikitext2 --tokens 4096"),
    "doctor": ("wide doctor",),
}
"""Name -> command lines that its help shows."""


class LazyCommands(TyperGroup):
    """A command group that knows its commands by `COMMANDS` alone until one is called."""

    _listing = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # Typer looks here for "did you mean"; the commands themselves come from get_command.
        self.commands = {name: _as_command(lambda: None, name) for name in COMMANDS}

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in the table's order."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command; a stand-in with its help line while the group's help is being written."""
        if cmd_name not in COMMANDS:
            return None
        if self._listing:
            return self.commands[cmd_name]
        module = importlib.import_module(f"widecli.cli.{cmd_name}")
        return _with_keys(_as_command(ends_in_a_sentence(getattr(module, cmd_name)), cmd_name))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the group's help without importing the commands."""
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


def _as_command(function: Callable[..., Any], name: str) -> Any:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    text = function.__doc__ if function.__doc__ else COMMANDS[name]
    app.command(
        name,
        help=text,
        short_help=COMMANDS[name],
        epilog="\n\n".join(("Examples:", *EXAMPLES.get(name, ()))),
        context_settings={"help_option_names": ["-h", "--help"]},
    )(function)
    return typer.main.get_command(app)


def _with_keys(command: Any) -> Any:
    """A command whose flags say which recipe key they set, and its default where no other recipe is behind it."""
    from widecli.cli.options import FLAG_KEYS
    from widecli.recipe.keys import recipe_keys

    for option in command.params:
        key = FLAG_KEYS.get(option.name)
        if key is None or not getattr(option, "help", None):
            continue
        default = recipe_keys()[key].default
        known = command.name == "calibrate" and isinstance(default, (str, int, float))
        option.help = f"{option.help.removesuffix('.')} ({key}{f', default {default}' if known else ''})."
    return command


def ends_in_a_sentence(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turns the ways a command ends badly into one sentence on stderr and the documented exit code.

    `WIDE_DEBUG=1` lets the traceback through.
    """

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        from widecli.cli.console import complain, warn
        from widecli.cli.launch import complain_as_rank
        from widecli.ranks import is_lost_contact
        from widecli.storage import replace_unusable_caches

        if not sys.stderr.isatty():  # transformers' and the Hub's bars, ours keep to terminals by themselves
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        try:
            replace_unusable_caches(warn)
            command(*args, **kwargs)
        except WideError as error:
            if os.environ.get("WIDE_DEBUG") == "1":
                raise
            complain_as_rank(error)
            raise typer.Exit(error.exit_code) from None
        except RuntimeError as error:
            if not is_lost_contact(error) or os.environ.get("WIDE_DEBUG") == "1":
                raise
            complain_as_rank(error)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            complain("interrupted")
            raise typer.Exit(130) from None
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or os.environ.get("WIDE_DEBUG") == "1":
                raise
            complain(f"No space left on the device{f' for {error.filename}' if error.filename else ''}: free some.")
            raise typer.Exit(1) from None

    return wrapped

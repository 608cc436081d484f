"""Options that several commands share, and the recipe key behind each flag.

A command takes `arguments: Arguments` and the flags it knows, and builds its recipe with
`recipe_from(arguments, sparsity=sparsity, steps=steps, ...)`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from widecli.errors import UsageError
from widecli.storage import given_path

if TYPE_CHECKING:
    from widecli.recipe.load import ResolvedRecipe

_RECIPE = "Recipe keys"
_RUN = "Run"

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE] [KEY=VALUE]... [~KEY]...",
        help="A recipe (a file, or a shipped name such as smollm2_s50_g64), then changes to it: "
        "train.steps=100 sets a key, '~train.steps' takes it back to its default.",
        show_default=False,
    ),
]
Model = Annotated[
    str | None,
    typer.Option("--model", help="Hub id, local folder, or smollm2-135m (embedded).", rich_help_panel=_RECIPE),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data", help="Hub id, file, glob or folder, stdlib, or self; may be given again.", rich_help_panel=_RECIPE
    ),
]
Sparsity = Annotated[
    float | None, typer.Option("--sparsity", help="Share to skip, 0 <= S < 1.", rich_help_panel=_RECIPE)
]
GroupSize = Annotated[
    int | None, typer.Option("--G", help="FFN channels in a group, a multiple of 16.", rich_help_panel=_RECIPE)
]
Mode = Annotated[str | None, typer.Option("--mode", help="wide, token or layer.", rich_help_panel=_RECIPE)]
Steps = Annotated[int | None, typer.Option("--steps", help="Optimiser steps.", rich_help_panel=_RECIPE)]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of order, noise and start.", rich_help_panel=_RECIPE)]
FreezeRouters = Annotated[
    bool | None,
    typer.Option(
        "--freeze-routers/--train-routers",
        help="Train the adapter alone, or the routers with it.",
        rich_help_panel=_RECIPE,
        show_default=False,
    ),
]
Tasks = Annotated[
    str | None,
    typer.Option("--tasks", help="lm-eval tasks, comma-separated; paper = the paper's seven.", rich_help_panel=_RECIPE),
]
Limit = Annotated[int | None, typer.Option("--limit", help="Documents a task.", rich_help_panel=_RECIPE)]
DataRoot = Annotated[
    str | None,
    typer.Option("--data-root", help="Folder with data sets under their Hub ids.", rich_help_panel=_RECIPE),
]
Wandb = Annotated[str | None, typer.Option("--wandb", help="auto, online, offline or off.", rich_help_panel=_RECIPE)]
BeyondPositions = Annotated[
    bool | None,
    typer.Option(
        "--beyond-positions",
        help="Allow sequences longer than the model is made for.",
        rich_help_panel=_RECIPE,
        show_default=False,
    ),
]
RunDir = Annotated[
    str | None,
    typer.Option("--run-dir", help="Directory of this run; else runs/<command>-<name>.", rich_help_panel=_RECIPE),
]

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.", rich_help_panel=_RUN)]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Check everything, print shapes, memory and cost; run nothing.", rich_help_panel=_RUN
    ),
]
Nproc = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        min=1,
        help="Processes on this machine, one a GPU; as torchrun --nproc-per-node.",
        rich_help_panel=_RUN,
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing run.", rich_help_panel=_RUN)]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an existing run.", rich_help_panel=_RUN)]
Offline = Annotated[
    bool, typer.Option("--offline", help="Use only what is on this machine, never the Hub.", rich_help_panel=_RUN)
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run Python code that comes with the model, if it has any.", rich_help_panel=_RUN
    ),
]


def _print_keys(wanted: bool) -> None:
    """Every recipe key with its default and what it is for, section by section."""
    if not wanted:
        return
    import json

    from widecli.recipe.keys import accepted, recipe_keys

    for key, field in recipe_keys().items():
        default = field.get_default(call_default_factory=True)
        shown = default if isinstance(default, str) else json.dumps(default)
        typer.echo(f"{key}={shown}\n    {f'{field.description}; ' if field.description else ''}{accepted(field)}")
    raise typer.Exit


Keys = Annotated[
    bool,
    typer.Option(
        "--keys",
        callback=_print_keys,
        is_eager=True,
        help="List every recipe key with its default and what it takes, and end.",
        rich_help_panel=_RUN,
    ),
]

FLAG_KEYS: Mapping[str, str] = {
    "model": "model.name",
    "data": "data.source",
    "mode": "routing.mode",
    "group_size": "routing.ffn_group_size",
    "sparsity": "budget.sparsity",
    "steps": "train.steps",
    "seed": "train.seed",
    "freeze_routers": "lora.freeze_routers",
    "tasks": "eval.tasks",
    "limit": "eval.limit",
    "data_root": "eval.data_root",
    "wandb": "track.wandb",
    "run_dir": "track.run_dir",
    "beyond_positions": "model.beyond_positions",
}
"""Parameter name of a flag -> the recipe key that it sets."""


def split_arguments(arguments: Sequence[str] | None) -> tuple[str | None, list[str]]:
    """Separates the recipe from its overrides; raises UsageError for a second recipe."""
    recipe: str | None = None
    overrides: list[str] = []
    for argument in arguments or ():
        if is_change(argument):
            overrides.append(argument)
        elif recipe is None:
            recipe = argument
        else:
            raise UsageError(f"Unexpected argument {argument!r}: the recipe is {recipe!r}, and changes are key=value.")
    return recipe, overrides


def is_change(argument: str) -> bool:
    """Whether an argument is `key=value` or `~key`, and not a path: those may hold "=" and begin with "~", too."""
    from widecli.recipe.keys import known_key

    key, equals, _ = argument.removeprefix("~").partition("=")
    if known_key(key.strip()) is not None and argument != key:
        return True
    if not (equals or argument.startswith("~")) or given_path(argument).exists():
        return False
    if "/" in key:
        raise UsageError(f"there is no {argument}: it is neither a path that is here nor a change to a recipe key")
    return True


def recipe_from(
    arguments: Sequence[str] | None, *, base: str | None = None, command: str = "calibrate", **flags: Any
) -> ResolvedRecipe:
    """The recipe that a command line asks for.

    Args:
        arguments: the command's positional arguments.
        base: the recipe to start from when none is named (`recipe.load.default_recipe_name`).
        command: whose recipe a shipped name means when several commands have one of that name.
        flags: values under the names in `FLAG_KEYS`; None = not given.
    """
    from widecli.recipe.load import resolve

    recipe, overrides = split_arguments(arguments)
    given = {FLAG_KEYS[name]: value for name, value in flags.items() if value is not None and value != []}
    resolved = resolve(recipe or base, overrides, given, command)
    asked = "budget.sparsity" in given or any(o.startswith("budget.sparsity=") for o in overrides)
    if asked and resolved.recipe.budget.kind == "parts":
        raise UsageError("budget.sparsity means nothing with budget.kind=parts: set budget.attention or budget.ffn.")
    return resolved


def take_checkpoint(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Splits off the argument that is a checkpoint or a run with one; raises UsageError for a stranger."""
    from widecli.model import checkpoint

    rest = list(arguments)
    for i, argument in enumerate(rest):
        path = given_path(argument)
        if path.is_dir() and not is_change(argument):
            return checkpoint.resolve(path), rest[:i] + rest[i + 1 :]
    recipe, _ = split_arguments(rest)
    if recipe is not None and not is_recipe(recipe):
        raise UsageError(f"{recipe} is neither a checkpoint, a run directory nor a recipe")
    return None, rest


def newest_checkpoint(accept: Callable[[Path], bool] = lambda _: True) -> Path | None:
    """The newest checkpoint of the newest run below runs/ that has one which `accept` takes; None without any."""
    from widecli.model import checkpoint

    for run in sorted(Path("runs").glob("*/"), key=lambda p: p.stat().st_mtime, reverse=True):
        with contextlib.suppress(UsageError, PermissionError):  # somebody else's run
            found = checkpoint.resolve(run)
            if accept(found):
                return found
    return None


def the_newest_checkpoint(doing: str) -> Path:
    """`newest_checkpoint`, told to people as what is being done to it; raises UsageError where there is none."""
    from widecli.cli.console import note

    newest = newest_checkpoint()
    if newest is None:
        raise UsageError("there is no checkpoint below runs/: name one, or run wide calibrate first")
    note(f"{doing} the newest checkpoint, {newest}")
    return newest


def refuse_own_directory(target: str | None, checkpoint: Path) -> None:
    """Refuses to write a run (`--run-dir`) or an export over the checkpoint that it starts from, or its run."""
    path = checkpoint.resolve()
    if target and given_path(target).resolve() in (path, *path.parents):
        raise UsageError(f"{target} holds the checkpoint {checkpoint}; name another directory")


def is_recipe(name: str) -> bool:
    """Whether `name` is a recipe's file or the name of a shipped one."""
    from widecli.recipe.files import find_recipe

    try:
        find_recipe(name)
    except UsageError:
        return False
    return True


def machine_default() -> str | None:
    """The recipe a command starts from when none is named: sized for a GPU if there is one, else the demo's."""
    from widecli.model.backbone import default_device
    from widecli.recipe.load import default_recipe_name

    return default_recipe_name(default_device().type == "cuda")


def go_offline(offline: bool) -> bool:
    """Keeps the Hub's libraries from the network for this process; True when that holds (or held before).

    Call it before anything imports huggingface_hub, transformers or datasets: they read the variables once.
    """
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["HF_DATASETS_OFFLINE"] = "1"
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def trust_remote_code(trusted: bool) -> None:
    """Lets Python code that comes with a model run, in this process and in those that it starts; else it never does."""
    if trusted:
        from widecli.model.pretrained import TRUST_REMOTE_CODE

        os.environ[TRUST_REMOTE_CODE] = "1"

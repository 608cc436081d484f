"""The options of `wide sweep` alone: what it spans, and where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from widecli.errors import UsageError

_AXES = "Axes"
_PLACE = "Where it runs"
_VALUES = "a,b,c or start:stop:step"

GroupSizes = Annotated[
    str | None, typer.Option("--G", help=f"FFN channels in a group: {_VALUES}.", rich_help_panel=_AXES)
]
Sparsities = Annotated[
    str | None, typer.Option("--sparsity", help=f"Shares to skip: {_VALUES}.", rich_help_panel=_AXES)
]
Modes = Annotated[str | None, typer.Option("--modes", "--mode", help="wide,token,layer.", rich_help_panel=_AXES)]
Seeds = Annotated[str | None, typer.Option("--seed", help=f"Seeds: {_VALUES}.", rich_help_panel=_AXES)]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUES", help=f"Any recipe key: {_VALUES}.", rich_help_panel=_AXES),
]
Stages = Annotated[
    str | None,
    typer.Option(
        "--stages", help="calibrate,lora,eval,profile: what runs for each point.", show_default="calibrate,eval"
    ),
]
JobsPerGpu = Annotated[
    int,
    typer.Option("--jobs-per-gpu", min=1, help="Processes that share a GPU, or the CPU, here.", rich_help_panel=_PLACE),
]
ExecutorName = Annotated[
    str | None,
    typer.Option("--executor", help="local, or slurm: a cluster.", rich_help_panel=_PLACE, show_default="local"),
]
Retries = Annotated[
    int | None,
    typer.Option("--retries", help="Times a failed run starts again.", rich_help_panel=_PLACE, show_default="0"),
]
Partition = Annotated[str | None, typer.Option("--partition", help="Slurm partition.", rich_help_panel=_PLACE)]
Account = Annotated[str | None, typer.Option("--account", help="Slurm account.", rich_help_panel=_PLACE)]
Time = Annotated[
    str | None,
    typer.Option("--time", help="Time limit of a turn: D-HH:MM:SS.", rich_help_panel=_PLACE, show_default="4:00:00"),
]
Gpus = Annotated[int | None, typer.Option("--gpus", help="GPUs a run.", rich_help_panel=_PLACE, show_default="1")]
Cpus = Annotated[int | None, typer.Option("--cpus", help="CPU cores a run.", rich_help_panel=_PLACE, show_default="4")]
Mem = Annotated[str | None, typer.Option("--mem", help="Memory a run: 64G.", rich_help_panel=_PLACE)]
MaxJobs = Annotated[
    int | None,
    typer.Option("--max-jobs", help="Most jobs in the queue at once.", rich_help_panel=_PLACE, show_default="100"),
]
Sbatch = Annotated[
    list[str] | None,
    typer.Option("--sbatch", metavar="OPTION=VALUE", help="Any other option: qos=low.", rich_help_panel=_PLACE),
]

PLACE_KEYS: Mapping[str, str] = {
    "executor": "sweep.executor",
    "retries": "sweep.retries",
    "partition": "sweep.slurm.partition",
    "account": "sweep.slurm.account",
    "time": "sweep.slurm.time",
    "gpus": "sweep.slurm.gpus",
    "cpus": "sweep.slurm.cpus",
    "mem": "sweep.slurm.mem",
    "max_jobs": "sweep.slurm.max_jobs",
}
"""Parameter name of a flag on where a sweep runs -> the recipe key that it sets."""


def axes_of(named: dict[str, str | None], more: list[str]) -> dict[str, str]:
    """The axes on the command line: flags first, then `--set key=values`."""
    keys = {"G": "routing.ffn_group_size", "sparsity": "budget.sparsity", "mode": "routing.mode", "seed": "train.seed"}
    axes = {keys[name]: text for name, text in named.items() if text is not None}
    for text in more:
        key, equals, values = text.partition("=")
        if not equals or not values.strip():
            raise UsageError(f"--set {text} is not KEY=VALUES: write train.learning_rate=0.001,0.002")
        if key.strip() in axes:
            raise UsageError(f"{key.strip()} is swept twice: give its values once")
        axes[key.strip()] = values
    return axes


def sbatch_overrides(listed: list[str]) -> list[str]:
    """`--sbatch qos=low` and `--sbatch exclusive` as changes to a recipe."""
    overrides = []
    for text in listed:
        name, equals, value = text.strip("-").partition("=")
        if not name.strip():
            raise UsageError(f"--sbatch {text} names no option of sbatch: write qos=low")
        overrides.append(f"sweep.slurm.extra.{name.strip()}={value if equals else 'true'}")
    return overrides

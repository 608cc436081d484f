"""Several processes for one command: `--nproc N`, what the others keep to themselves, and how they end.

Under `torchrun` (or after `--nproc`) every rank runs the whole command and only the first one talks. `--nproc` uses
torchrun's own process library and not its command line: that would turn exit code 75 into 1 and die of SIGUSR1.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from widecli import ranks
from widecli.cli.console import complain, console, warn
from widecli.errors import Preempted, UsageError, WideError

if TYPE_CHECKING:
    from widecli.recipe.load import ResolvedRecipe
    from widecli.track.run import Run

_FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# A rank that fails lets the first one speak for it, and one that lost another lets that one speak. Meanwhile whoever
# started the ranks takes them down.
_FIRST_SPEAKS_S = 3.0
_TAKEN_DOWN_S = 45.0


@contextlib.contextmanager
def processes(nproc: int | None) -> Iterator[ranks.Ranks]:
    """Run the block as one of `nproc` processes, which are started first if need be; all but the first are silent.

    The process that starts the others never enters the block: it exits as they did.
    """
    found = ranks.place()
    if nproc is not None and found is None:
        start_processes(nproc)
    if nproc is not None and found is not None and nproc != (there := int(os.environ.get("LOCAL_WORLD_SIZE", nproc))):
        raise UsageError(f"--nproc {nproc} inside of a group of {there} processes a machine: leave it away")
    if found is not None and found[0] > 0:
        console.quiet = True
    with ranks.joined() as group:
        yield group


def start_processes(nproc: int) -> NoReturn:
    """Run this very command line in `nproc` processes of this machine and exit as they do."""
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing import start_processes as start

    from widecli.profiling.environment import usable_cores
    from widecli.track.run import CONTINUABLE

    if torch.cuda.is_available() and nproc > (there := torch.cuda.device_count()):
        raise UsageError(f"--nproc {nproc} asks for more processes than the {there} GPUs that are visible here")
    # held by this process, so that no two runs can meet on a port
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "wide",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // nproc)),
    }
    # the library's own report of a failure is long and its last line is not the cause
    import logging

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    context = start(
        "wide",
        sys.executable,
        args=dict.fromkeys(range(nproc), ("-m", "widecli", *sys.argv[1:])),
        envs={i: {**shared, "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(nproc)},
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )

    def forward(number: int, _: FrameType | None) -> None:
        for pid in context.pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    while (result := context.wait(timeout=1, period=0.1)) is None:
        pass
    if not result.is_failed():
        raise typer.Exit(0)
    first = min(result.failures.values(), key=lambda failure: failure.timestamp)
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        saved = "; the last checkpoint is intact: --resume continues from it" if sys.argv[1] in CONTINUABLE else ""
        complain(f"rank {first.local_rank} was killed by {name} and the others were stopped{saved}")
        raise typer.Exit(1)
    raise typer.Exit(first.exitcode)


def complain_as_rank(error: Exception) -> None:
    """Say how this rank's command ended badly, unless that is another rank's to tell."""
    found = _place_or_none()
    if found is None or (found[0] == 0 and not ranks.is_lost_contact(error)):
        _speak(str(error))
        return
    if isinstance(error, Preempted):
        return  # all ranks agreed on that
    if ranks.is_lost_contact(error):
        time.sleep(_TAKEN_DOWN_S)
    else:
        _record(error)
        time.sleep(_FIRST_SPEAKS_S)
    _speak(f"rank {found[0]}: {error}")


def _place_or_none() -> tuple[int, int, int] | None:
    with contextlib.suppress(WideError):
        return ranks.place()
    return None


def _speak(message: str) -> None:
    quiet, console.quiet = console.quiet, False
    complain(message)
    console.quiet = quiet


def _record(error: Exception) -> None:
    """Let torchrun's report of the failure hold the sentence."""
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


@contextlib.contextmanager
def open_run(
    command: str, name: str, resolved: ResolvedRecipe, *, overwrite: bool, resume: bool = False
) -> Iterator[Run]:
    """The run directory that the first rank makes, and keeps other processes out of, and all others see.

    Raises UsageError when ranks have another recipe or other code, or when a machine does not see the directory;
    WideError when another process works on it.
    """
    from widecli.recipe.load import dump
    from widecli.track.run import Run, directory

    group = ranks.current()
    if group.size > 1:
        group.refuse_differences({**_recipe_facts(resolved), "the name of the run": name, **_code_facts()})
    run_dir = resolved.recipe.track.run_dir
    with contextlib.ExitStack() as stack:
        if not group.is_first:
            run = Run(directory(command, name, run_dir), command, writes=False)
        else:
            run = stack.enter_context(
                Run.held(
                    command,
                    name,
                    recipe_yaml=dump(resolved.recipe),
                    run_dir=run_dir,
                    overwrite=overwrite,
                    resume=resume,
                    warn=warn,
                )
            )
        group.refuse_private_folder(run.path)
        yield run


def _recipe_facts(resolved: ResolvedRecipe) -> dict[str, Any]:
    from widecli.recipe.keys import leaves, value_at

    tree = resolved.recipe.model_dump(mode="json")
    return {key: value_at(tree, key) for key in leaves(tree)}


def _code_facts() -> dict[str, str | None]:
    """Versions and a hash of every file of this package: what two machines may have installed differently."""
    from widecli.profiling.environment import package_version

    versions = {
        f"the version of {name}": package_version(name) for name in ("torch", "transformers", "peft", "lm-eval")
    }
    root = Path(__file__).resolve().parents[1]
    files = {
        f"the code of widecli/{path.relative_to(root).as_posix()}": hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        for path in sorted(root.rglob("*.py"))
    }
    return {**versions, **files}

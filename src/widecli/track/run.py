"""A run's directory: `recipe.yaml`, `metrics.jsonl`, `summary.json`, `environment.json`, `checkpoints/`.

A run is finished when its summary is there: `write_summary` is the last thing that a command does.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from widecli.errors import Preempted, UsageError, WideError
from widecli.recipe.keys import leaves, value_at
from widecli.recipe.load import ResolvedRecipe, load_stored, load_text
from widecli.recipe.schema import BudgetSection
from widecli.storage import (
    given_path,
    held,
    plain,
    refuse_name_for_tensors,
    remove_directory,
    unwritable,
    write_json,
    write_text,
)
from widecli.track.summary import completed

RUNS = Path("runs")
_TRAIN = ("calibrate", "lora")
CONTINUABLE = (*_TRAIN, "profile")
"""Commands that keep what they have on the way, which take `--resume`."""
_FROM_THE_START = {"recipe.yaml", "environment.json", "checkpoints"}
_LONGEST_LINE_BYTES = 1 << 20
# What may differ when a run continues: none of it changes the batches, the noise or the learning rates.
_FREE_ON_RESUME = ("track.", "eval.", "distributed.", "train.save_every")


def run_name(resolved: ResolvedRecipe) -> str:
    """`<model>-<mode>-s<S>-g<G>-<hash8>`; S in percent, one figure a part for `budget.kind=parts`."""
    recipe = resolved.recipe
    model = recipe.model.name.rstrip("/").rsplit("/", 1)[-1].lower()
    slug = "".join(c if c.isalnum() or c in "._" else "-" for c in model).strip("-.") or "model"
    return f"{slug}-{recipe.routing.mode}-s{_sparsity(recipe.budget)}-g{recipe.routing.ffn_group_size}-{resolved.hash8}"


def _sparsity(budget: BudgetSection) -> str:
    if budget.kind != "parts":
        return f"{100 * budget.sparsity:.4g}"
    parts = (("a", budget.attention), ("f", budget.ffn))
    return "".join(f"{letter}{100 * target:.4g}" for letter, target in parts if target is not None)


class Run:
    """One run's directory and what is written to it.

    With `writes=False` it only looks on: one process of several writes.
    """

    def __init__(self, path: Path, command: str, *, writes: bool = True) -> None:
        self.path = path
        self.command = command
        self.writes = writes
        self._metrics: IO[str] | None = None

    @classmethod
    @contextlib.contextmanager
    def held(
        cls,
        command: str,
        name: str,
        *,
        recipe_yaml: str,
        run_dir: str | Path | None = None,
        overwrite: bool = False,
        resume: bool = False,
        warn: Callable[[str], None] = lambda _: None,
    ) -> Iterator[Run]:
        """`create`, and no other process in the directory inside the block; raises WideError when one is there.

        A block that fails before anything was trained or measured leaves no run behind.
        """
        with held(directory(command, name, run_dir), warn=warn):
            run = cls.create(
                command, name, recipe_yaml=recipe_yaml, run_dir=run_dir, overwrite=overwrite, resume=resume
            )
            try:
                yield run
            except Preempted:
                raise
            except WideError:
                run.close()
                if run.is_empty:
                    remove_directory(run.path)
                raise

    @classmethod
    def create(
        cls,
        command: str,
        name: str,
        *,
        recipe_yaml: str,
        run_dir: str | Path | None = None,
        overwrite: bool = False,
        resume: bool = False,
    ) -> Run:
        """Makes `runs/<command>-<name>/` (or `run_dir`) and stores the recipe there.

        Args:
            command: the command's name, as in `calibrate`.
            name: see `run_name`.
            recipe_yaml: the resolved recipe (`recipe.load.dump`).
            run_dir: the directory itself, instead of the one below `runs/`.
            overwrite: replace an existing run; refused for a directory that is not a run.
            resume: continue an existing run; one that is not there is started.

        Raises:
            UsageError: the directory exists and neither flag was given, it is not a run's, or `resume` with another
                recipe.
        """
        run = cls.check(command, name, run_dir=run_dir, overwrite=overwrite, resume=resume)
        path = run.path
        occupied = path.is_dir() and any(path.iterdir())
        if occupied and resume:
            _refuse_other_recipe(path, recipe_yaml)
        elif occupied:
            remove_directory(path)
        try:
            (path.resolve() / "checkpoints").mkdir(parents=True, exist_ok=True)  # a link may lead to what is not there
        except OSError as error:
            raise unwritable(path, error) from error
        write_text(path / "recipe.yaml", recipe_yaml)
        return run

    @classmethod
    def check(
        cls,
        command: str,
        name: str,
        *,
        run_dir: str | Path | None = None,
        overwrite: bool = False,
        resume: bool = False,
    ) -> Run:
        """What `create` would make or continue, or its UsageError, but for another recipe; changes nothing."""
        path = directory(command, name, run_dir)
        run = cls(path, command)
        refuse_name_for_tensors(path, "--run-dir")
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is a file; name another directory with --run-dir.")
        occupied = path.is_dir() and any(path.iterdir())
        if occupied and not (path / "recipe.yaml").is_file():
            raise UsageError(f"{path} is not empty and not a run directory; name another one with --run-dir.")
        if resume and overwrite:
            raise UsageError("--resume continues a run and --overwrite replaces it; give one of them.")
        if occupied and overwrite and command not in _TRAIN and run.has_checkpoints:
            raise UsageError(
                f"{path} holds the checkpoints of a training run, which wide {command} does not replace; name another "
                "directory with --run-dir."
            )
        if occupied and not (resume or overwrite or run.holds_nothing):
            how = " (--resume continues it)" if command in CONTINUABLE else ""
            state = "holds a finished run" if run.is_finished else f"holds an unfinished run{how}"
            raise UsageError(f"{path} {state}; --overwrite replaces it, --run-dir names another directory.")
        return run

    @property
    def holds_nothing(self) -> bool:
        """It ended before it had anything to lose, and its command measures all of it or nothing."""
        return self.command not in _TRAIN and self.is_empty

    @property
    def is_empty(self) -> bool:
        """Whether nothing but the recipe and the machine is recorded."""
        return not self.has_checkpoints and {p.name for p in self.path.iterdir()} <= _FROM_THE_START

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """An existing run, to read or to share between ranks; raises UsageError when it is not one."""
        path = Path(path)
        if not (path / "recipe.yaml").is_file():
            raise UsageError(f"{path} is not a run directory: it has no recipe.yaml.")
        summary = Run(path, "").summary()
        return cls(path, summary["command"] if summary else path.name.split("-", 1)[0])

    @classmethod
    def find_finished(cls, command: str, name: str, run_dir: str | Path | None = None) -> Run | None:
        """The finished run of the same recipe (the name holds its hash), if there is one."""
        run = cls(directory(command, name, run_dir), command)
        return run if run.is_finished else None

    @property
    def checkpoints(self) -> Path:
        """Where the run's checkpoints lie."""
        return self.path / "checkpoints"

    @property
    def has_checkpoints(self) -> bool:
        """Whether it holds any."""
        return self.checkpoints.is_dir() and any(self.checkpoints.iterdir())

    @property
    def is_finished(self) -> bool:
        """Whether the run came to its end."""
        return self.summary() is not None

    def summary(self) -> dict[str, Any] | None:
        """The run's summary; None when it has none that can be read."""
        try:
            summary = json.loads((self.path / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        return summary if isinstance(summary, dict) and "schema" in summary else None

    def log(self, step: int, **metrics: Any) -> None:
        """Appends one line to `metrics.jsonl` and flushes it; a number that is not finite is written as null."""
        if not self.writes:
            return
        line = json.dumps({"step": step, **plain(metrics)}, ensure_ascii=False, allow_nan=False)
        try:
            if self._metrics is None:
                self._drop_torn_line()
                self._metrics = self._metrics_path.open("a", encoding="utf-8", errors="backslashreplace")
            self._metrics.write(line + "\n")
            self._metrics.flush()
        except OSError as error:
            raise unwritable(self._metrics_path, error) from error

    def metrics(self) -> list[dict[str, Any]]:
        """What was logged, in order; a line cut short by a kill, or damaged, is left out."""
        try:
            lines = self._metrics_path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        entries = []
        for line in lines:
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(entry, dict) and isinstance(entry.get("step"), int):
                entries.append(entry)
        return entries

    def rewind_metrics(self, step: int) -> None:
        """Keeps the entries before `step`, where the run continues, and drops the rest."""
        self.close()
        if not self.writes or not self._metrics_path.exists():
            return
        kept = [entry for entry in self.metrics() if entry["step"] < step]
        write_text(self._metrics_path, "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in kept))

    def write_summary(self, values: dict[str, Any]) -> dict[str, Any]:
        """Completes (schema, command, run directory) and writes `summary.json`, which marks the run finished.

        Returns:
            The document as written: what `--json` prints.
        """
        summary: dict[str, Any] = plain(completed(self.command, {**values, "run_dir": str(self.path)}))
        if self.writes:
            write_json(self.path / "summary.json", summary)
        return summary

    def write_environment(self) -> None:
        """Records the machine, versions and command line in `environment.json`."""
        from widecli.profiling.environment import environment

        if self.writes:
            write_json(self.path / "environment.json", environment())

    def write_json(self, name: str, value: object) -> Path:
        """Writes another document of the run (lm-eval's results), atomically."""
        if self.writes:
            write_json(self.path / name, value)
        return self.path / name

    def close(self) -> None:
        """Closes the metrics file; logging opens it again."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    @property
    def _metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def _drop_torn_line(self) -> None:
        """A kill can leave half a line; appending to it would spoil the next entry too."""
        if not self._metrics_path.exists():
            return
        size = self._metrics_path.stat().st_size
        with self._metrics_path.open("rb") as handle:
            handle.seek(max(0, size - _LONGEST_LINE_BYTES))
            tail = handle.read(min(size, _LONGEST_LINE_BYTES))
        if tail and not tail.endswith(b"\n"):
            os.truncate(self._metrics_path, size - len(tail) + tail.rfind(b"\n") + 1)


def directory(command: str, name: str, run_dir: str | Path | None = None) -> Path:
    """Where a run of that command and name lies."""
    return given_path(str(run_dir)) if run_dir is not None else RUNS / f"{command}-{name}"


def _refuse_other_recipe(path: Path, recipe_yaml: str) -> None:
    stored_path = path / "recipe.yaml"
    stored = load_stored(stored_path).model_dump(mode="json")
    wanted = load_text(recipe_yaml).model_dump(mode="json")
    keys = [key for key in leaves(wanted) if not key.startswith(_FREE_ON_RESUME)]
    changed = [key for key in keys if value_at(stored, key) != value_at(wanted, key)]
    if changed:
        first = changed[0]
        more = f" (and {', '.join(changed[1:])})" if len(changed) > 1 else ""
        raise UsageError(
            f"{path} cannot be resumed with another recipe: {first} was {value_at(stored, first)} and is now "
            f"{value_at(wanted, first)}{more}; give the recipe {stored_path}, or another --run-dir."
        )

"""What commands that train share: tracking a run, and showing it as it goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from widecli.cli.console import console, note, progress, warn
from widecli.cli.launch import open_run
from widecli.ranks import current

if TYPE_CHECKING:
    from widecli.recipe.load import ResolvedRecipe
    from widecli.track.run import Run
    from widecli.train.loop import StepRecord


def tracked(resolved: ResolvedRecipe, run: Run, train: Callable[[TrainingBar], dict[str, Any]]) -> dict[str, Any]:
    """Train under a bar and W&B, and finish the run with what `train` returns; returns its summary."""
    from widecli.track.wandb import start_wandb

    run.write_environment()
    section = resolved.recipe.track
    if not run.writes:
        section = section.model_copy(update={"wandb": "off"})
    tracker = start_wandb(section, run, resolved.recipe.model_dump(mode="json"), warn=warn)
    note(tracker.description)
    exit_code = 1
    try:
        with TrainingBar(tracker, run.command) as bar:
            summary = run.write_summary(train(bar))
        tracker.summarise(summary)
        exit_code = 0
    finally:
        run.close()
        tracker.finish(exit_code)
    return summary


def run_stage(
    resolved: ResolvedRecipe,
    command: str,
    name: str,
    train: Callable[[Run, TrainingBar], dict[str, Any]],
    expected: dict[str, Any],
    *,
    resume: bool,
    overwrite: bool,
) -> dict[str, Any]:
    """Make or continue the run directory of a training command and train in it; returns the run's summary."""
    from widecli.cli.cost_card import print_expected_time
    from widecli.cli.tables import print_training

    with open_run(command, name, resolved, overwrite=overwrite, resume=resume) as run:
        summary: dict[str, Any] | None = current().from_first(run.summary()) if resume else None
        if summary:
            note(f"{run.path} is finished already")
        else:
            print_expected_time(resolved, expected)
            try:
                summary = tracked(resolved, run, lambda bar: train(run, bar))
            except KeyboardInterrupt:
                note(f"{run.path} holds what was saved until now: --resume continues it")
                raise
    print_training(summary)
    return summary


class TrainingBar:
    """Shows a training stage as it goes: a bar on a terminal, now and then a line elsewhere."""

    def __init__(self, tracker: Any, title: str) -> None:
        self._tracker = tracker
        self._title = title
        self._progress = progress()
        self._task: Any = None
        self._steps = 0

    def __enter__(self) -> TrainingBar:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def note(self, message: str) -> None:
        """One line on what happens now."""
        note(message)

    def started(self, steps: int, first: int) -> None:
        """The loop begins."""
        self._steps = steps
        self._task = self._progress.add_task(self._title, total=steps, completed=first, detail="")

    def step(self, record: StepRecord) -> None:
        """A step is done."""
        text = describe(record)
        self._progress.update(self._task, completed=record.step, detail=text)
        if not console.is_terminal and (record.step == 1 or record.step % max(1, self._steps // 10) == 0):
            note(f"step {record.step}/{self._steps}  {text}")
        self._tracker.log(record.step, {k: v for k, v in vars(record).items() if k != "step" and v is not None})


def describe(record: StepRecord) -> str:
    """Loss, skip rates and speed in one short line."""
    rates = [
        f"{name} {rate:.0%}"
        for name, rate in (("attention", record.skip_attention), ("FFN", record.skip_ffn))
        if rate is not None
    ]
    loss = f"loss {record.lm_loss:.3f}"
    if record.distill_loss is not None:
        loss += f" (to the dense model {record.distill_loss:.3f})"
    return f"{loss}  skipped: {', '.join(rates)}  {record.tokens_per_second:,.0f} tok/s"

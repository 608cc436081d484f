"""`wide calibrate`: train the routers of a frozen model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from widecli.cli import options
from widecli.cli.console import console, emit_json, note, progress, stdout_for_document, warn

if TYPE_CHECKING:
    from widecli.recipe.load import ResolvedRecipe
    from widecli.track.run import Run
    from widecli.train.loop import StepRecord


def calibrate(
    arguments: options.Arguments = None,
    model: options.Model = None,
    data: options.Data = None,
    sparsity: options.Sparsity = None,
    group_size: options.GroupSize = None,
    mode: options.Mode = None,
    steps: options.Steps = None,
    seed: options.Seed = None,
    wandb: options.Wandb = None,
    run_dir: options.RunDir = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    offline: options.Offline = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Train routers on a frozen model: every token learns, layer by layer, which groups to run.

    Without a recipe: the embedded SmolLM2-135M, at a size that suits this machine.
    """
    offline = options.go_offline(offline)
    with stdout_for_document(json):
        resolved = options.recipe_from(
            arguments,
            base=None if options.split_arguments(arguments)[0] else options.machine_default(),
            model=model,
            data=data,
            sparsity=sparsity,
            group_size=group_size,
            mode=mode,
            steps=steps,
            seed=seed,
            wandb=wandb,
            run_dir=run_dir,
        )
        document = (
            plan_run(resolved)
            if dry_run
            else run_calibration(resolved, resume=resume, overwrite=overwrite, offline=offline)
        )
        if json:
            emit_json(document)


def plan_run(resolved: ResolvedRecipe) -> dict[str, Any]:
    """Check a recipe against its model's sizes and print what the run would take; touches no device."""
    from widecli.cli.cost_card import dry_run_document, print_dry_run

    document = dry_run_document(resolved)
    print_dry_run(document)
    return document


def run_calibration(
    resolved: ResolvedRecipe, *, resume: bool = False, overwrite: bool = False, offline: bool = False
) -> dict[str, Any]:
    """Run (or continue) the calibration of a recipe; returns its summary."""
    from widecli.cli.cost_card import dry_run_document, print_expected_time
    from widecli.cli.tables import print_calibration
    from widecli.recipe.load import dump
    from widecli.track.run import Run, run_name

    expected = dry_run_document(resolved)  # refuses what cannot work before anything is created or loaded
    run = Run.create(
        "calibrate",
        run_name(resolved),
        recipe_yaml=dump(resolved.recipe),
        run_dir=resolved.recipe.track.run_dir,
        overwrite=overwrite,
        resume=resume,
    )
    if resume and (summary := run.summary()):
        note(f"{run.path} is finished already")
        print_calibration(summary)
        return summary
    print_expected_time(resolved, expected)
    summary = _tracked(resolved, run, offline)
    print_calibration(summary)
    return summary


def _tracked(resolved: ResolvedRecipe, run: Run, offline: bool) -> dict[str, Any]:
    from widecli.track.wandb import start_wandb
    from widecli.train.calibrate import calibrate as train

    run.write_environment()
    tracker = start_wandb(resolved.recipe.track, run, resolved.recipe.model_dump(mode="json"), warn=warn)
    note(tracker.description)
    exit_code = 1
    try:
        with _Bar(tracker) as bar:
            summary = run.write_summary(train(resolved, run, bar, offline=offline))
        tracker.summarise(summary)
        exit_code = 0
    finally:
        run.close()
        tracker.finish(exit_code)
    return summary


class _Bar:
    """Shows a calibration as it goes: a bar on a terminal, now and then a line elsewhere."""

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker
        self._progress = progress()
        self._task: Any = None
        self._steps = 0

    def __enter__(self) -> _Bar:
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
        self._task = self._progress.add_task("calibrate", total=steps, completed=first, detail="")

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
    return f"loss {record.lm_loss:.3f}  skipped: {', '.join(rates)}  {record.tokens_per_second:,.0f} tok/s"

"""From a grid's points to the commands that run them, each in the run directory which that command would choose."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from widecli.errors import UsageError, WideError

if TYPE_CHECKING:
    from widecli.recipe.schema import EvalSection
    from widecli.sweep.grid import Point
    from widecli.sweep.jobs import Job, Plan

TRAINING = ("calibrate", "lora")


def make_plan(
    points: Sequence[Point], stages: Sequence[str], folder: Path, *, second: Mapping[str, Any], offline: bool
) -> Plan:
    """The jobs of every point. Raises UsageError when none can run.

    Args:
        points: from `widecli.sweep.grid.expand`.
        stages: in their order.
        folder: the sweep's directory; recipes of points are named below it.
        second: recipe key -> what the second stage sets differently.
        offline: children stay off the network.
    """
    from widecli.sweep.jobs import Plan

    builder = _Builder(Plan(list(points)), stages, folder, second, ("--offline",) if offline else ())
    refusals: list[str] = []
    for point in points:
        refusal, estimate = _try(point, stages)
        builder.add(point, refusal)
        builder.plan.estimates.append(estimate)
        if refusal is not None:
            refusals.append(refusal)
    if len(refusals) == len(points):
        raise UsageError(refusals[0])
    return builder.plan


def check_evaluations(points: Sequence[Point], offline: bool) -> None:
    """Refuse texts and tasks that do not exist (offline: are not here) before any point starts. Raises UsageError."""
    from widecli.evaluate.tasks import check_tasks
    from widecli.evaluate.texts import check_texts

    for section in {point.resolved.recipe.eval for point in points}:
        if not section.tasks and not section.perplexity:
            raise UsageError("nothing to evaluate: name eval.perplexity texts or eval.tasks, or leave eval out")
        check_tasks(section.tasks, data_root=section.data_root, offline=offline)
        check_texts(section.perplexity)


def _try(point: Point, stages: Sequence[str]) -> tuple[str | None, dict[str, Any]]:
    """Why a point cannot run, and what its trainings would take, by stage; looks at sizes and file names only."""
    from widecli.cli.cost_card import dry_run_document

    estimate: dict[str, Any] = {}
    try:
        for stage in TRAINING:
            if stage in stages or stage == "calibrate":
                recipe = point.calibration if stage == "calibrate" else point.resolved
                document = dry_run_document(recipe, stage)
                if stage in stages:
                    estimate[stage] = document["estimate"]
    except UsageError as error:
        return str(error), {}
    return None, estimate


class _Builder:
    """Makes each job once: points that share a stage share its job."""

    def __init__(
        self, plan: Plan, stages: Sequence[str], folder: Path, second: Mapping[str, Any], options: tuple[str, ...]
    ) -> None:
        self.plan = plan
        self.stages = stages
        self.folder = folder
        self.second = second
        self.options = options
        self.made: dict[str, Job] = {}
        self.calibrated = _calibrations()

    def add(self, point: Point, refusal: str | None) -> None:
        calibration = self.calibration(point, refusal)
        jobs = {"calibrate": calibration}
        trained = {"calibrate": calibration}
        if "lora" in self.stages:
            trained["lora"] = jobs["lora"] = self.second_stage(point, calibration)
        for stage, start in trained.items():
            if stage not in self.stages and not (stage == "calibrate" and len(trained) == 1):
                continue  # only what this sweep trains is measured, a calibration at least
            of_stage = "" if stage == "calibrate" else f" {stage}"
            if "eval" in self.stages:
                jobs[f"eval{of_stage}"] = self.evaluation(point, start)
            if "profile" in self.stages:
                jobs[f"profile{of_stage}"] = self.profile(start)
        self.plan.of_point.append(jobs)

    def calibration(self, point: Point, refusal: str | None) -> Job:
        from widecli.sweep.grid import calibration_key
        from widecli.track.run import run_name

        name, file = run_name(point.calibration), self.file(point)
        own = _directory("calibrate", name)
        path = self.calibrated.get(calibration_key(point.calibration.recipe), own)
        elsewhere = () if path == own else ("--run-dir", str(path))
        job = self.job(
            f"calibrate-{name}",
            "calibrate",
            lambda: path,
            lambda: ["calibrate", str(file), *elsewhere, "--resume", *self.options],
            steps=point.calibration.recipe.train.steps,
            only_reuse=None
            if "calibrate" in self.stages
            else f"there is no finished calibration {name} below runs/: add calibrate to --stages",
        )
        if refusal is not None:
            job.fail(refusal)
        return job

    def second_stage(self, point: Point, calibration: Job) -> Job:
        from widecli.recipe.schema import LoraSection

        changes = _differences(LoraSection(), point.resolved.recipe.lora, "lora")
        changes += [f"{key}={json.dumps(value)}" for key, value in self.second.items()]
        return self.job(
            f"lora-{_behind(calibration)}{_digest(changes)}",
            "lora",
            lambda: _second_run(_path(calibration), changes),
            lambda: ["lora", str(_path(calibration)), *changes, "--resume", *self.options],
            needs=(calibration,),
            steps=point.calibration.recipe.train.steps,
        )

    def evaluation(self, point: Point, start: Job) -> Job:
        section = point.resolved.recipe.eval
        return self.job(
            f"eval-{_behind(start)}{_digest([section.model_dump_json()])}",
            "eval",
            lambda: _evaluation_run(_path(start), section),
            # an evaluation that was cut off starts anew
            lambda: ["eval", str(_path(start)), *_changes(_path(start), section), "--overwrite", *self.options],
            needs=(start,),
            after=(self.dense(point),),
        )

    def dense(self, point: Point) -> Job:
        """The dense model under a point's protocol: measured once, from the cache for every checkpoint after it."""
        from widecli.cli.eval import evaluation_name
        from widecli.evaluate.evaluation import Evaluation

        recipe, file = point.resolved.recipe, self.file(point)
        changes = _differences(point.calibration.recipe.eval, recipe.eval, "eval")
        field = point.calibration.recipe.data.text_field
        name = evaluation_name(Evaluation(recipe.model, recipe.eval, None, True, bool(self.options), field))
        return self.job(
            f"eval-{name}",
            "eval",
            lambda: _directory("eval", name),
            lambda: [
                *("eval", str(file), "--model", recipe.model.name),
                *(*changes, "--overwrite", *self.options),
            ],
            first=True,
        )

    def profile(self, start: Job) -> Job:
        def folder() -> Path:
            from widecli.model.checkpoint import content_hash, resolve

            path = _path(start)  # its hash: a run made anew under the same name is timed anew
            return _directory("profile", f"{path.name.removeprefix('calibrate-')}-{content_hash(resolve(path))}")

        return self.job(
            f"profile-{_behind(start)}",
            "profile",
            folder,
            lambda: ["profile", str(_path(start)), "--run-dir", str(folder()), "--overwrite", *self.options],
            needs=(start,),
        )

    def job(self, name: str, *arguments: Any, first: bool = False, **settings: Any) -> Job:
        from widecli.sweep.jobs import Job

        if name not in self.made:
            self.made[name] = Job(name, *arguments, **settings)
            self.plan.jobs.insert(0 if first else len(self.plan.jobs), self.made[name])
        return self.made[name]

    def file(self, point: Point) -> Path:
        from widecli.track.run import run_name

        file = self.folder / "points" / f"{run_name(point.calibration)}.yaml"
        self.plan.recipes[file] = point.calibration
        return file


def _behind(start: Job) -> str:
    return start.name.removeprefix("calibrate-")


def _path(job: Job) -> Path:
    assert job.path is not None, f"{job.name} was not located"
    return job.path


def _directory(command: str, name: str) -> Path:
    from widecli.track.run import directory

    return directory(command, name)


def _calibrations() -> dict[str, Path]:
    """The calibrations below runs/ by what they depend on, finished ones first, however they are called."""
    from widecli.recipe.load import load_stored
    from widecli.sweep.grid import calibration_key
    from widecli.track.run import RUNS, Run

    found: dict[str, Path] = {}
    for path in sorted(RUNS.iterdir()) if RUNS.is_dir() else []:
        if not (path / "checkpoints").is_dir() or not (path / "recipe.yaml").is_file():
            continue
        summary = Run(path, "").summary()
        if (summary["command"] if summary else path.name.split("-", 1)[0]) != "calibrate":
            continue
        try:
            key = calibration_key(load_stored(path / "recipe.yaml"))
        except (WideError, OSError, UnicodeDecodeError):
            continue  # of another version
        if summary or key not in found:
            found[key] = path
    return found


def _second_run(start: Path, changes: list[str]) -> Path:
    from widecli.cli.lora import lora_name, prepare

    checkpoint, resolved = prepare([str(start), *changes], {})
    assert checkpoint is not None
    return _directory("lora", lora_name(resolved, checkpoint))


def _evaluation_run(start: Path, section: EvalSection) -> Path:
    from widecli.cli.eval import evaluation_name, prepare

    job, _ = prepare([str(start), *_changes(start, section)], {})
    return _directory("eval", evaluation_name(job))


def _changes(run: Path, section: EvalSection) -> list[str]:
    """What `wide eval RUN` has to be told: the run's own recipe may measure something else."""
    from widecli.model.checkpoint import resolve
    from widecli.recipe.load import load_stored

    stored = resolve(run) / "recipe.yaml"
    return _differences(load_stored(stored).eval, section, "eval")


def _differences(before: Any, after: Any, section: str) -> list[str]:
    """`key=value` for every key of a section that differs."""
    old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
    return [f"{section}.{key}={json.dumps(new[key])}" for key in new if new[key] != old[key]]


def _digest(changes: list[str]) -> str:
    return "-" + hashlib.sha256("\n".join(changes).encode()).hexdigest()[:6] if changes else ""

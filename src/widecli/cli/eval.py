"""`wide eval`: what a checkpoint keeps of its dense model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from widecli.cli import options
from widecli.cli.console import emit_json, note, stdout_for_document
from widecli.cli.launch import open_run, processes
from widecli.errors import UsageError

if TYPE_CHECKING:
    from widecli.evaluate.evaluation import Evaluation
    from widecli.recipe.load import ResolvedRecipe

Targets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CHECKPOINT] [RECIPE] [KEY=VALUE]...",
        help="A checkpoint or a run directory (default: the newest below runs/), then a recipe with an eval section, "
        "then changes to it.",
        show_default=False,
    ),
]
Dense = Annotated[
    bool, typer.Option("--dense/--no-dense", help="Measure the dense model beside the checkpoint.", show_default=True)
]


def eval(
    arguments: Targets = None,
    model: options.Model = None,
    tasks: options.Tasks = None,
    limit: options.Limit = None,
    data_root: options.DataRoot = None,
    dense: Dense = True,
    run_dir: options.RunDir = None,
    overwrite: options.Overwrite = False,
    beyond_positions: options.BeyondPositions = None,
    offline: options.Offline = False,
    trust_remote_code: options.TrustRemoteCode = False,
    nproc: options.Nproc = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Measure a checkpoint beside its dense model: token perplexity and lm-eval tasks, with the skip rates seen.

    With --model and no checkpoint: that dense model alone.
    """
    offline = options.go_offline(offline)
    options.trust_remote_code(trust_remote_code)
    with processes(None if dry_run else nproc), stdout_for_document(json):
        flags = {"tasks": tasks, "limit": limit, "data_root": data_root, "run_dir": run_dir, "model": model}
        flags["beyond_positions"] = beyond_positions
        job, resolved = prepare(arguments, flags, with_dense=dense, offline=offline)
        document = describe(job) if dry_run else run_evaluation(job, resolved, overwrite=overwrite)
        if json:
            emit_json(document)


def prepare(
    arguments: list[str] | None, flags: dict[str, Any], *, with_dense: bool = True, offline: bool = False
) -> tuple[Evaluation, ResolvedRecipe]:
    """What a command line asks to evaluate. The model is the checkpoint's, the protocol the recipe's."""
    from widecli.evaluate.evaluation import Evaluation
    from widecli.evaluate.tasks import check_tasks
    from widecli.evaluate.texts import check_texts
    from widecli.model import checkpoint
    from widecli.model.backbone import refuse_beyond_positions
    from widecli.recipe.load import load_stored

    target, rest = options.take_checkpoint(arguments or [])
    if target is None and flags.get("model") is None:
        target = options.newest_checkpoint()
        if target is None:
            raise UsageError("there is no checkpoint below runs/: name one, or a dense model with --model")
        note(f"evaluating the newest checkpoint, {target}")
    recipe, _ = options.split_arguments(rest)
    stored = target / "recipe.yaml" if target else None
    if target is not None:
        checkpoint.refuse_incomplete(target)
    base = str(stored) if stored and recipe is None else None
    if base is not None:
        rest = ["~track.run_dir", *rest]  # that is where the calibration lies
    resolved = options.recipe_from(rest, base=base, **flags)
    model = resolved.recipe.model
    if stored and flags.get("model") is None:
        model = load_stored(stored).model
        model = model.model_copy(update={"beyond_positions": resolved.recipe.model.beyond_positions})
    section = resolved.recipe.eval
    check_tasks(section.tasks, data_root=section.data_root, offline=offline)
    check_texts(section.perplexity)
    job = Evaluation(model, section, target, with_dense, offline, resolved.recipe.data.text_field)
    refuse_beyond_positions(model, job.lengths)
    return job, resolved


def evaluation_name(job: Evaluation) -> str:
    """`<run or model>-<step or dense>-<hash of the protocol and of the checkpoint's routers and adapter>`.

    So an evaluation of a run that was made anew under its name (`--overwrite`) is another evaluation.
    """
    import hashlib
    import json

    from widecli.model.checkpoint import content_hash

    protocol = json.dumps(job.protocol.as_dict(), sort_keys=True)
    content = f"/{content_hash(job.checkpoint)}" if job.checkpoint else ""
    digest = hashlib.sha256(f"{protocol}{content}".encode()).hexdigest()[:8]
    if job.checkpoint is None:
        stem = job.model.name.rstrip("/").rsplit("/", 1)[-1].lower()
        return f"{stem}-dense-{digest}"
    path = job.checkpoint.resolve()
    owner = path.parent.parent.name if path.parent.name == "checkpoints" else path.parent.name
    return f"{owner.removeprefix('calibrate-')}-{path.name}-{digest}"


def describe(job: Evaluation) -> dict[str, Any]:
    """What would be measured; loads neither weights nor data sets."""
    from widecli.model import checkpoint

    protocol = job.protocol.as_dict()
    plan = checkpoint.read_config(job.checkpoint).plan.to_json() if job.checkpoint else None
    note(f"would evaluate {job.checkpoint or 'the dense model'} on {job.model.name}")
    for key in ("perplexity", "tasks", "limit", "max_length", "data"):
        note(f"  {key}: {protocol[key]}")
    return {
        "schema": "wide.dry_run/1",
        "command": "eval",
        "model": job.model.name,
        "plan": plan,
        "protocol": protocol,
        "checkpoint": str(job.checkpoint) if job.checkpoint else None,
        "run": evaluation_name(job),
    }


def run_evaluation(job: Evaluation, resolved: ResolvedRecipe, *, overwrite: bool = False) -> dict[str, Any]:
    """Evaluate into a run directory of its own; returns the summary."""
    from widecli.cli.tables import print_evaluation
    from widecli.evaluate.evaluation import evaluate

    recipe = resolved.recipe.model_copy(update={"model": job.model})
    if job.checkpoint:
        options.refuse_own_directory(recipe.track.run_dir, job.checkpoint)
    with open_run("eval", evaluation_name(job), replace(resolved, recipe=recipe), overwrite=overwrite) as run:
        run.write_environment()
        summary = run.write_summary(evaluate(job, note, run.write_json))
    print_evaluation(summary)
    return summary

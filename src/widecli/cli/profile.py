"""`wide profile`: what routing gains in time to first token and time per token, beside the dense model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from widecli.cli import options
from widecli.cli.console import emit_json, note, stdout_for_document, warn
from widecli.errors import Preempted, UsageError
from widecli.signals import NOTICES, handled

if TYPE_CHECKING:
    from types import FrameType

    from widecli.profiling.request import Flags, Request

_GRID = "What is measured"

Checkpoint = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CHECKPOINT]",
        help="A checkpoint or a run directory (default: the newest below runs/, else the embedded model).",
        show_default=False,
    ),
]
Shape = Annotated[
    str | None,
    typer.Option("--shape", help="A model's sizes with random weights: llama-3.1-8b, ..., or 4096x14336x32."),
]
Ttft = Annotated[bool, typer.Option("--ttft", help="Time to first token.", rich_help_panel=_GRID)]
Tpot = Annotated[bool, typer.Option("--tpot", help="Time per further token.", rich_help_panel=_GRID)]
Memory = Annotated[bool, typer.Option("--memory", help="Peak memory, and the memory model.", rich_help_panel=_GRID)]
Energy = Annotated[bool, typer.Option("--energy", help="Joules a token, by NVML.", rich_help_panel=_GRID)]
Breakdown = Annotated[bool, typer.Option("--breakdown", help="Time of each part of a step.", rich_help_panel=_GRID)]
Throughput = Annotated[
    bool, typer.Option("--throughput", help="Most tokens a second over batch sizes.", rich_help_panel=_GRID)
]
CompareHf = Annotated[
    bool,
    typer.Option("--compare-hf", help="Beside the same dense model in transformers.", rich_help_panel=_GRID),
]
Batch = Annotated[str | None, typer.Option("--batch", help="Batch sizes: 1,8,32.", rich_help_panel=_GRID)]
Prompt = Annotated[str | None, typer.Option("--prompt", help="Prompt tokens: 1024,16384.", rich_help_panel=_GRID)]
Gen = Annotated[int | None, typer.Option("--gen", help="Tokens generated.", rich_help_panel=_GRID)]
Sparsity = Annotated[
    str | None, typer.Option("--sparsity", help="Shares skipped by random masks: 0,0.5.", rich_help_panel=_GRID)
]
GroupSize = Annotated[str | None, typer.Option("--G", help="FFN channels in a group: 64,128.", rich_help_panel=_GRID)]
Patterns = Annotated[
    int | None,
    typer.Option(
        "--patterns", help="Random FFN masks are one of so many patterns.", rich_help_panel=_GRID, show_default=False
    ),
]
MasksOption = Annotated[
    str | None,
    typer.Option(
        "--masks", help="learned (the checkpoint's, on real text) or random.", rich_help_panel=_GRID, show_default=False
    ),
]
Text = Annotated[str, typer.Option("--text", help="Text that learned masks decide on: a name or a file.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="bfloat16, float16 or float32.", show_default=False)]
Seconds = Annotated[float, typer.Option("--seconds", help="Time for one setting, all variants together.", min=0)]


def profile(
    checkpoint: Checkpoint = None,
    shape: Shape = None,
    model: options.Model = None,
    ttft: Ttft = False,
    tpot: Tpot = False,
    memory: Memory = False,
    energy: Energy = False,
    breakdown: Breakdown = False,
    throughput: Throughput = False,
    compare_hf: CompareHf = False,
    batch: Batch = None,
    prompt: Prompt = None,
    gen: Gen = None,
    sparsity: Sparsity = None,
    group_size: GroupSize = None,
    patterns: Patterns = None,
    masks: MasksOption = None,
    text: Text = "pydoc-topics",
    dtype: Dtype = None,
    seconds: Seconds = 5.0,
    data_root: options.DataRoot = None,
    wandb: options.Wandb = None,
    run_dir: options.RunDir = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    offline: options.Offline = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Measure dense and routed inference in turns: time to first token, time per token, each beside its ideal bound.

    A checkpoint runs its own decisions on real text; --masks random, --shape and --model run random masks.
    """
    offline = options.go_offline(offline)
    with stdout_for_document(json):
        from widecli.profiling.request import Flags, read

        flags = Flags(
            checkpoint,
            shape,
            model,
            masks=masks,
            dtype=dtype,
            text=text,
            batch=batch,
            prompt=prompt,
            gen=gen,
            sparsity=sparsity,
            group_size=group_size,
            patterns=patterns,
            ttft=ttft,
            tpot=tpot,
            memory=memory,
            energy=energy,
            breakdown=breakdown,
            throughput=throughput,
            compare_hf=compare_hf,
            seconds=seconds,
        )
        if checkpoint is None and shape is None and model is None:
            flags = _by_itself(flags)
        request = read(flags)
        if dry_run:
            document = describe(request)
        else:
            words = _text(text, data_root, offline) if request.settings.masks == "learned" else ""
            document = run_profile(request, words, wandb=wandb, run_dir=run_dir, resume=resume, overwrite=overwrite)
        if json:
            emit_json(document)


def _by_itself(flags: Flags) -> Flags:
    """The newest checkpoint, else the embedded model."""
    from dataclasses import replace

    from widecli.model.backbone import EMBEDDED

    found = options.newest_checkpoint()
    if found is not None:
        note(f"the newest checkpoint, {found}")
        return replace(flags, checkpoint=found)
    note(f"there is no checkpoint below runs/: {EMBEDDED} with random masks")
    return replace(flags, model=EMBEDDED)


def _text(name: str, data_root: str | None, offline: bool) -> str:
    from widecli.evaluate.texts import check_texts, perplexity_text

    check_texts([name])
    return perplexity_text(name, data_root, offline)[1]


def describe(request: Request) -> dict[str, Any]:
    """What would be measured: memory, bounds and time; allocates nothing."""
    from widecli.cli.cost_card import duration
    from widecli.profiling.grid import estimates, expected_seconds

    outline, settings = request.outline, request.settings
    seconds = expected_seconds(outline, settings)
    note(f"would measure {outline.name} ({request.where}), about {duration(seconds)} plus loading")
    cells = estimates(outline, settings)
    for cell in cells:
        size = cell["memory"]["total_bytes"] / 2**30
        note(
            f"  {cell['phase'].upper()} batch {cell['batch']}, prompt {cell['prompt']}: dense bound "
            f"{cell['dense_bound_ms']:.3g} ms, {size:.1f} GiB"
        )
    return {
        "schema": "wide.dry_run/1",
        "command": "profile",
        "model": outline.name,
        "checkpoint": str(request.checkpoint) if request.checkpoint else None,
        "settings": settings.as_dict(),
        "seconds": seconds,
        "cells": cells,
        "run": request.run_name,
    }


def run_profile(
    request: Request,
    words: str,
    *,
    wandb: str | None = None,
    run_dir: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Measure into a run directory of its own, or what is missing in one; returns the summary."""
    from widecli.cli.cost_card import duration
    from widecli.profiling.cells import MeasuredCells
    from widecli.profiling.grid import expected_seconds
    from widecli.profiling.measurement import POINTS_SCHEMA, measure, saturation
    from widecli.track.run import Run, directory
    from widecli.track.wandb import start_wandb

    if request.checkpoint and run_dir:
        options.refuse_own_directory(run_dir, request.checkpoint)
    identity = request.identity()
    if resume and not overwrite:  # of both the run says that they do not go together
        path = directory("profile", request.run_name, run_dir)
        finished = _refuse_other_run(path, identity)
        if finished is not None:
            note(f"{path} is finished already")
            _show(finished)
            return finished
    recipe = request.recipe(wandb)
    remarks: list[str] = []

    def remark(message: str) -> None:
        note(message)
        if message not in remarks:
            remarks.append(message)

    if request.outline.device.type == "cpu":
        remark("no GPU: the operators compute everything and mask, so what is skipped here saves no time")
    note(f"about {duration(expected_seconds(request.outline, request.settings))} on {request.where}, plus loading")
    subject = request.load(words)
    run = Run.create(
        "profile", request.run_name, recipe_yaml=recipe.text, run_dir=run_dir, overwrite=overwrite, resume=resume
    )
    cells = MeasuredCells(run.path, identity)
    remarks[:0] = [message for message in cells.notes if message not in remarks]
    if not cells.points:
        run.write_environment()
    run.rewind_metrics(len(cells.points))
    tracker = start_wandb(recipe.track, run, request.settings.as_dict(), warn=warn)
    note(tracker.description)
    exit_code = 1

    def done(points: list[dict[str, Any]]) -> None:
        first = len(cells.points)
        for point in points:
            point["run"] = str(run.path)
        cells.add(points, remarks)  # before it is told: what is told twice W&B takes once
        for logged, point in enumerate(points, first):
            figures = _figures(point)
            run.log(logged, **figures)
            tracker.log(logged, figures)

    def told_to_stop(number: int, frame: FrameType | None) -> None:
        raise Preempted(f"stopped by a signal; --resume continues {run.path}")

    try:
        with handled(NOTICES, told_to_stop):
            points = measure(subject, request.settings, note, remark, done, cells.of)
        most = saturation(points) if request.settings.throughput else None
        found = {"points_schema": POINTS_SCHEMA, "points": points, "throughput": most, "notes": remarks}
        summary = run.write_summary({**request.facts(subject), "identity": identity, **found})
        cells.finish()
        tracker.summarise({"points": len(points)})
        exit_code = 0
    except KeyboardInterrupt:
        note(f"{run.path} holds what was measured until now: --resume continues it")
        raise
    finally:
        run.close()
        tracker.finish(exit_code)
    _show(summary)
    note(f"run: {run.path}")
    return summary


def _refuse_other_run(path: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The summary of the run at `path`, None if it did not come to its end.

    Raises UsageError where something else was measured there or another command ran.
    """
    from widecli.profiling.cells import MeasuredCells, refuse_other
    from widecli.track.run import Run

    run = Run(path, "profile")
    summary = run.summary()
    if summary is not None and "identity" in summary:
        refuse_other(path, summary["identity"], identity)
        return summary
    cells = MeasuredCells(path, identity)
    if path.is_dir() and any(path.iterdir()) and not cells.points and not run.holds_nothing:
        raise UsageError(
            f"{path} holds nothing that wide profile could continue; name another directory with --run-dir, or replace "
            "it with --overwrite if it is a profile's."
        )
    return None


def _figures(point: dict[str, Any]) -> dict[str, Any]:
    """What a metrics line says of a point."""
    phase = point["phase"]
    figures = {f"{phase} {key}": point[key] for key in ("batch", "prompt", "sparsity", "group_size", "patterns")}
    figures |= {f"{phase} {side}": point[side]["p50_ms"] for side in ("dense", "routed")}
    return figures | {f"{phase} speedup": point["speedup"]}


def _show(summary: dict[str, Any]) -> None:
    from widecli.cli.profile_tables import print_breakdown, print_points, print_saturation

    points, settings = summary["points"], summary["settings"]
    print_points(points, summary["model"], settings["masks"])
    if settings["breakdown"]:
        print_breakdown(points)
    if summary["throughput"]:
        print_saturation(summary["throughput"])

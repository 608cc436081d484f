"""`wide profile`: what routing gains in time to first token and time per token, beside the dense model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from widecli.cli import options
from widecli.cli.console import emit_json, note, stdout_for_document

if TYPE_CHECKING:
    from widecli.profiling.request import Flags, Request
    from widecli.profiling.subject import Settings

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
Dense = Annotated[
    str,
    typer.Option(
        "--dense",
        help="Dense products of one row: own (the routed kernels, faster) or library (cuBLAS).",
        rich_help_panel=_GRID,
    ),
]
Batch = Annotated[str | None, typer.Option("--batch", help="Batch sizes: 1,8,32.", rich_help_panel=_GRID)]
Prompt = Annotated[str | None, typer.Option("--prompt", help="Prompt tokens: 1024,16384.", rich_help_panel=_GRID)]
Gen = Annotated[int | None, typer.Option("--gen", help="Tokens generated.", rich_help_panel=_GRID)]
Sparsity = Annotated[
    str | None, typer.Option("--sparsity", help="Shares skipped by random masks: 0,0.5.", rich_help_panel=_GRID)
]
GroupSize = Annotated[str | None, typer.Option("--G", help="FFN channels in a group: 64,128.", rich_help_panel=_GRID)]
Compensation = Annotated[
    str | None,
    typer.Option(
        "--compensation",
        help="Ranks of what random weights add for skipped groups: none,0,32 (0 = means alone).",
        rich_help_panel=_GRID,
        show_default=False,
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
    dense: Dense = "own",
    batch: Batch = None,
    prompt: Prompt = None,
    gen: Gen = None,
    sparsity: Sparsity = None,
    group_size: GroupSize = None,
    compensation: Compensation = None,
    masks: MasksOption = None,
    text: Text = "pydoc-topics",
    dtype: Dtype = None,
    seconds: Seconds = 5.0,
    data_root: options.DataRoot = None,
    wandb: options.Wandb = None,
    run_dir: options.RunDir = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    beyond_positions: options.BeyondPositions = None,
    offline: options.Offline = False,
    trust_remote_code: options.TrustRemoteCode = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Measure dense and routed inference in turns: time to first token, time per token, each beside its ideal bound.

    A checkpoint runs its own decisions on real text; --masks random, --shape and --model run random masks.
    """
    offline = options.go_offline(offline)
    options.trust_remote_code(trust_remote_code)
    with stdout_for_document(json):
        from widecli.cli.profile_run import recorded_at, run_profile, standing
        from widecli.profiling.request import Flags, read
        from widecli.track.run import Run, directory

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
            compensation=compensation,
            ttft=ttft,
            tpot=tpot,
            memory=memory,
            energy=energy,
            breakdown=breakdown,
            throughput=throughput,
            compare_hf=compare_hf,
            dense=dense,
            seconds=seconds,
            beyond_positions=bool(beyond_positions),
        )
        if checkpoint is None and shape is None and model is None:
            flags = _by_itself(flags)
        request = read(flags)
        path = directory("profile", request.run_name, run_dir)
        continues = resume and not overwrite  # of both the run says that they do not go together
        if continues:
            request = request.continuing(recorded_at(path))
        else:
            request.check()
        if dry_run:
            request.recipe(wandb)
            Run.check("profile", request.run_name, run_dir=run_dir, overwrite=overwrite, resume=resume)
            document = describe(request, standing(path, request).kept if continues else frozenset())
        else:
            words = _text(text, data_root, offline, request.settings) if request.settings.masks == "learned" else ""
            document = run_profile(request, words, wandb=wandb, run_dir=run_dir, resume=resume, overwrite=overwrite)
        if json:
            emit_json(document)


def _by_itself(flags: Flags) -> Flags:
    """The newest checkpoint, else the embedded model."""
    from dataclasses import replace

    from widecli.model.shapes import EMBEDDED

    found = options.newest_checkpoint()
    if found is not None:
        note(f"the newest checkpoint, {found}")
        return replace(flags, checkpoint=found)
    note(f"there is no checkpoint below runs/: {EMBEDDED} with random masks")
    return replace(flags, model=EMBEDDED)


def _text(name: str, data_root: str | None, offline: bool, settings: Settings) -> str:
    from widecli.evaluate.texts import beginning, check_texts, perplexity_text
    from widecli.profiling.subject import characters_read

    check_texts([name])
    return beginning(perplexity_text(name, data_root, offline)[1], characters_read(settings))


def describe(request: Request, kept: frozenset[tuple[int, int]]) -> dict[str, Any]:
    """What would be measured besides the cells that are kept: memory, bounds and time; allocates nothing."""
    from widecli.cli.cost_card import duration
    from widecli.profiling.grid import estimates, expected_seconds

    outline, settings = request.outline, request.settings
    if kept:
        whole = len(settings.batches) * len(settings.prompts)
        note(f"{len(kept)} of {whole} cells (a batch and a prompt each) are measured already and kept")
    seconds = expected_seconds(outline, settings, kept)
    cells = estimates(outline, settings, kept)
    plan = f"would measure {outline.name} ({request.where}), about {duration(seconds)} plus loading"
    note(plan if cells else "nothing is left to measure")
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
        "kept": len(kept),
        "run": request.run_name,
    }

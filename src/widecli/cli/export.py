"""`wide export`: a checkpoint as a folder to hand on."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from widecli.cli import options
from widecli.cli.console import emit_json, note, stdout_for_document, warn
from widecli.errors import UsageError
from widecli.storage import given_path, held, refuse_name_for_tensors

Checkpoint = Annotated[
    str | None,
    typer.Argument(
        metavar="[CHECKPOINT]", help="A checkpoint or a run (default: the newest below runs/).", show_default=False
    ),
]
Out = Annotated[Path, typer.Option("--out", help="Folder to write.", show_default=False)]
Merge = Annotated[
    bool, typer.Option("--merge", help="Fold the adapter into the model and write the whole model beside its routing.")
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option("--dtype", help="Of the merged weights; auto = as the base model is stored."),
]


def export(
    out: Out,
    checkpoint: Checkpoint = None,
    merge: Merge = False,
    dtype: Dtype = "auto",
    model: options.Model = None,
    overwrite: options.Overwrite = False,
    offline: options.Offline = False,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Write a checkpoint as a folder of its own, with a model card that holds what its runs measured.

    With --merge a Hugging Face model directory with the adapter merged and FFN channels in the routers' order, and the
    routing: transformers alone loads and routes it, given trust_remote_code=True. Without, routing and adapter alone,
    which need their base model. `wide eval FOLDER` takes both.
    """
    options.go_offline(offline)
    options.trust_remote_code(trust_remote_code)
    with stdout_for_document(json):
        out = given_path(str(out))
        with held(out, "--out", warn):
            document = run_export(find(checkpoint), out, merge=merge, dtype=dtype, model=model, overwrite=overwrite)
        if json:
            emit_json(document)


def find(checkpoint: str | None) -> Path:
    """The checkpoint meant on the command line, or the newest."""
    from widecli.model.checkpoint import resolve

    if checkpoint is not None:
        return resolve(checkpoint)
    return options.the_newest_checkpoint("exporting")


def run_export(
    source: Path, out: Path, *, merge: bool, dtype: str = "auto", model: str | None = None, overwrite: bool = False
) -> dict[str, Any]:
    """Export a checkpoint; returns what was written as `wide.export/1`."""
    from widecli.cli.model_card import card
    from widecli.model.backbone import load_backbone, stored_dtype
    from widecli.model.checkpoint import read_config, refuse_incomplete
    from widecli.model.export import MergeCheck, export_copy, export_merged
    from widecli.recipe.load import load_stored

    config = read_config(source)
    if config.merged is not None:
        raise UsageError(f"{source} is an exported model already: copy the folder")
    refuse_incomplete(source)
    stored = source / "recipe.yaml"
    if dtype != "auto" and not merge:
        raise UsageError(f"--dtype {dtype} is for merged weights: add --merge, or leave it out")
    refuse_occupied(out, source, overwrite)
    check: MergeCheck | None = None
    if merge:
        section = load_stored(stored).model
        if model is not None:
            section = section.model_copy(update={"name": model, "revision": None})
        section = section.model_copy(update={"dtype": stored_dtype(section) if dtype == "auto" else dtype})
        note(f"loading {section.name} in {section.dtype}")
        backbone = load_backbone(section)
        check = export_merged(source, out, backbone, lambda found: card(source, config, merged=True, check=found))
        if config.adapter is None:
            order = ", its FFN channels regrouped" if config.plan.grouping == "clustered" else ""
            note(f"the checkpoint has no adapter to merge: the model written is the dense one{order}")
        if check is not None:
            note(describe(check))
    else:
        export_copy(source, out, card(source, config, merged=False))
        note(f"wrote routing{' and adapter' if config.adapter else ''} alone; --merge writes the whole model too")
    note(f"exported to {out}; measure it with: wide eval {out}")
    return {
        "schema": "wide.export/1",
        "command": "export",
        "out": str(out),
        "checkpoint": str(source),
        "model": config.backbone.id,
        "merged": merge,
        "adapter": dict(config.adapter) if config.adapter else None,
        "check": asdict(check) if check is not None else None,
    }


def refuse_occupied(out: Path, source: Path, overwrite: bool) -> None:
    """Only an empty or new folder is written to; with `overwrite` also an earlier export."""
    from widecli.model.checkpoint import CONFIG

    refuse_name_for_tensors(out, "--out")
    options.refuse_own_directory(str(out), source)
    if source.resolve() in out.resolve().parents:
        raise UsageError(f"{out} lies inside the checkpoint {source}; name another folder")
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; name a folder with --out")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not (out / CONFIG).is_file():
        raise UsageError(f"{out} is not empty and not an export; name another folder with --out")
    if not overwrite:
        raise UsageError(f"{out} holds an export; --overwrite replaces it, --out names another folder")


def describe(check: Any) -> str:
    """How far merged and unmerged are apart, in a sentence."""
    changed = f"{check.changed_decisions} of {check.decisions:,} decisions changed"
    return (
        f"merged and unmerged on {check.tokens} tokens in {check.dtype}: logits within "
        f"{check.largest_difference:.1e} of their standard deviation, {changed}, "
        f"{check.same_top_word:.1%} of the likeliest words the same"
    )

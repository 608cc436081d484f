"""`wide patterns`: a calibrated checkpoint whose tokens pick one of a few learned patterns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from widecli.cli import options
from widecli.cli.console import console, emit_json, note, stdout_for_document
from widecli.errors import UsageError

if TYPE_CHECKING:
    from widecli.model.pattern_fit import Conversion, PatternUse
    from widecli.train.patterns import Settings

Checkpoint = Annotated[
    str | None,
    typer.Argument(
        metavar="[CHECKPOINT]", help="A checkpoint or a run (default: the newest below runs/).", show_default=False
    ),
]
Out = Annotated[Path, typer.Option("--out", help="Folder to write.", show_default=False)]
Size = Annotated[int, typer.Option("--size", help="Patterns a segment.", min=1)]
Segments = Annotated[
    int, typer.Option("--segments", help="Equal runs of groups, each with patterns of its own.", min=1)
]
Parts = Annotated[Literal["ffn", "attention", "all"], typer.Option("--parts", help="What goes by patterns.")]
Tokens = Annotated[int, typer.Option("--tokens", help="Tokens to read.", min=2)]
Text = Annotated[
    list[str] | None,
    typer.Option(
        "--data", help="Text to read (default: what it was calibrated on); may be given again.", show_default=False
    ),
]
MatchBy = Annotated[
    Literal["global", "layer", "none"],
    typer.Option("--match", help="Skip as much as before by one shift a part, by one a layer, or not at all."),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the text's order and of the first patterns.", min=0)]


def patterns(
    out: Out,
    checkpoint: Checkpoint = None,
    size: Size = 64,
    segments: Segments = 1,
    parts: Parts = "ffn",
    tokens: Tokens = 8192,
    data: Text = None,
    match: MatchBy = "global",
    seed: Seed = 0,
    overwrite: options.Overwrite = False,
    offline: options.Offline = False,
    json: options.Json = False,
) -> None:
    """Turn a calibrated checkpoint into one whose tokens pick one of a few patterns of groups, without training.

    A layer's patterns are fitted to what its router decides on text. Attention with few groups gets every pattern there
    is and decides as before. `wide eval`, `lora`, `generate` and `inspect` take the folder.
    """
    offline = options.go_offline(offline)
    with stdout_for_document(json):
        from widecli.cli.export import refuse_occupied
        from widecli.model.plan import PatternPlan
        from widecli.train.patterns import Settings, convert_checkpoint, refuse

        source = _find(checkpoint)
        settings = Settings(PatternPlan(size, segments, parts), tokens, match, seed, data)
        out = out.expanduser()
        refuse(source, settings)
        refuse_occupied(out, source, overwrite)
        found = convert_checkpoint(source, out, settings, note, offline)
        _show(found)
        note(f"converted to {out}; measure it with: wide eval {out}")
        if json:
            emit_json(_document(source, out, settings, found))


def _find(checkpoint: str | None) -> Path:
    """The checkpoint meant on the command line, or the newest one that decides by groups."""
    from widecli.model.checkpoint import read_config, resolve

    if checkpoint is not None:
        return resolve(checkpoint)
    newest = options.newest_checkpoint(lambda path: read_config(path).plan.mode == "wide")
    if newest is None:
        raise UsageError("there is no calibrated checkpoint below runs/: name one")
    note(f"converting the newest checkpoint, {newest}")
    return newest


def _document(source: Path, out: Path, settings: Settings, found: Conversion) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "schema": "wide.patterns/1",
        "command": "patterns",
        "out": str(out),
        "checkpoint": str(source),
        "patterns": asdict(settings.patterns),
        "tokens": found.tokens,
        "measured_tokens": found.measured_tokens,
        "match": settings.match,
        "seed": settings.seed,
        "agreement": _means(found),
        "skip_rate": {"bits": found.before, "unmatched": found.unmatched, "matched": found.after},
        "flops_skipped": found.achieved["flops_skipped"],
        "layers": [{**asdict(use), "effective": use.effective, "unused": use.unused} for use in found.uses],
    }


def _means(found: Conversion) -> dict[str, float]:
    """Mean agreement with independent bits over the layers of each part."""
    parts = sorted({use.part for use in found.uses})
    by_part = {part: [use.agreement for use in found.uses if use.part == part] for part in parts}
    return {part: sum(values) / len(values) for part, values in by_part.items()}


def _show(found: Conversion) -> None:
    from rich.table import Table

    table = Table(title=f"patterns, {found.tokens:,} tokens", title_justify="left")
    for name in ("", "agree with bits", "skipped by bits", "unmatched", "matched"):
        table.add_column(name, justify="left" if not name else "right")
    agreement = _means(found)
    for part in found.after:
        agreed = f"{agreement[part]:.1%}" if part in agreement else "bits"
        rates = (found.before[part], found.unmatched[part], found.after[part])
        table.add_row(part, agreed, *(f"{rate:.1%}" for rate in rates))
    console.print(table)
    layers = Table(title="in use", title_justify="left")
    for name in ("layer", "", "agree", "effective", "unused", "most used", "groups they run, fewest to most"):
        layers.add_column(name, justify="left" if not name else "right")
    for use in found.uses:
        layers.add_row(str(use.layer), use.part, *_use_row(use))
    console.print(layers)


def _use_row(use: PatternUse) -> tuple[str, ...]:
    total = sum(use.counts[0]) or 1
    most = max(max(counts) for counts in use.counts) / total
    pairs = [pair for both in zip(use.counts, use.sizes, strict=True) for pair in zip(*both, strict=True)]
    run = [size for count, size in pairs if count]
    return (
        f"{use.agreement:.1%}",
        f"{use.effective:.1f} of {len(use.counts[0])}",
        str(use.unused),
        f"{most:.1%}",
        f"{min(run)} to {max(run)}",
    )

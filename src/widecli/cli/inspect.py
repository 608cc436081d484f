"""`wide inspect`: what the routers of a checkpoint learned."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from widecli.cli import options
from widecli.cli.console import console, emit_json, note, stdout_for_document, warn

if TYPE_CHECKING:
    from widecli.inspection.observe import Observation
    from widecli.inspection.statistics import Statistics
    from widecli.track.run import Run

FORMATS = ("html", "png", "svg")
TOKENS_SHOWN = 96  # columns of a heat map that can still be read
LEAST_COUNT = 3  # a token seen less often says nothing about its kind

Checkpoint = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CHECKPOINT]",
        help="A checkpoint or a run directory with one (default: the newest below runs/).",
        show_default=False,
    ),
]
Text = Annotated[
    str, typer.Option("--text", help="wikitext2, pydoc-topics, or a .txt or .jsonl[.gz] file.", show_default=True)
]
Tokens = Annotated[int, typer.Option("--tokens", help="Tokens to read from its beginning.", min=2, show_default=True)]
Formats = Annotated[
    str | None,
    typer.Option("--format", help="html, png, svg, comma-separated (default: html and png).", show_default=False),
]


def inspect(
    checkpoint: Checkpoint = None,
    text: Text = "pydoc-topics",
    tokens: Tokens = 2048,
    formats: Formats = None,
    data_root: options.DataRoot = None,
    run_dir: options.RunDir = None,
    overwrite: options.Overwrite = False,
    offline: options.Offline = False,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Show what the routers decide on a text: skip rates by layer and group, which words run, constant groups, entropy,
    correlation between layers, what a tile of tokens must run together, how far channels were regrouped, and what
    skipped groups leave beside what they would have added.
    """
    offline = options.go_offline(offline)
    options.trust_remote_code(trust_remote_code)
    with stdout_for_document(json):
        from widecli.cli.report import chosen_formats, drawable

        asked = formats is not None
        wanted = drawable(chosen_formats(formats, FORMATS) if asked else ["html", "png"], asked=asked)
        summary = run_inspection(
            checkpoint or options.the_newest_checkpoint("inspecting"),
            text,
            tokens,
            wanted,
            data_root=data_root,
            run_dir=run_dir,
            overwrite=overwrite,
            offline=offline,
        )
        if json:
            emit_json(summary)


def run_inspection(
    checkpoint: Path,
    text: str,
    tokens: int,
    formats: list[str],
    *,
    data_root: str | None = None,
    run_dir: str | None = None,
    overwrite: bool = False,
    offline: bool = False,
) -> dict[str, Any]:
    """Inspect into a run directory of its own; returns the summary."""
    from widecli.evaluate.texts import check_texts
    from widecli.inspection.observe import observe
    from widecli.inspection.statistics import statistics
    from widecli.model.checkpoint import refuse_incomplete, resolve, section_of
    from widecli.recipe.files import recipe_text
    from widecli.track.run import Run

    check_texts([text])
    directory = resolve(checkpoint)
    refuse_incomplete(directory)
    recipe = recipe_text(directory / "recipe.yaml")
    name = inspection_name(directory, text, tokens)
    with Run.held("inspect", name, recipe_yaml=recipe, run_dir=run_dir, overwrite=overwrite, warn=warn) as run:
        run.write_environment()
        model = section_of(directory)
        seen = observe(directory, model, text, tokens=tokens, data_root=data_root, offline=offline, note=note)
        found = statistics(seen)
        files = write_pictures(run, seen, found, formats)
        summary = run.write_summary(
            {
                "model": seen.model,
                "plan": seen.config.plan.to_json(),
                "steps": seen.config.step,
                "recipe_hash": seen.config.recipe_hash,
                "checkpoint": str(directory),
                "skip_rate": seen.summary["skip_rate"],
                "flops_skipped": seen.summary["flops_skipped"],
                "text": seen.text,
                "tokens": len(seen.tokens),
                "first_tokens": list(seen.tokens[:TOKENS_SHOWN]),
                **found.as_dict(TOKENS_SHOWN),
                "files": files,
            }
        )
    show(seen, found)
    for file in files:
        if file.endswith(".html"):
            note(f"html: {run.path / file}")
    note(f"run: {run.path}")
    return summary


def inspection_name(directory: Path, text: str, tokens: int) -> str:
    """`<run>-<step>-<text>-<tokens>`, the text as evaluations call it."""
    from widecli.evaluate.texts import METRIC, perplexity_keys

    path = directory.resolve()
    owner = path.parent.parent.name if path.parent.name == "checkpoints" else path.parent.name
    called = perplexity_keys([text])[text].removesuffix(f"/{METRIC}")
    return f"{owner.removeprefix('calibrate-')}-{path.name}-{called}-{tokens}"


def write_pictures(run: Run, seen: Observation, found: Statistics, formats: list[str]) -> list[str]:
    """The page and the plots, into the run's directory; returns their names."""
    from widecli.inspection.views import charts, heat_maps, inspection_page
    from widecli.storage import write_bytes, write_text

    written = []
    name = run.path.name
    if "html" in formats:
        write_text(run.path / "inspect.html", inspection_page(seen, found, name, TOKENS_SHOWN, LEAST_COUNT))
        written.append("inspect.html")
    for kind in ("png", "svg"):
        if kind in formats:
            from widecli.report.plots import draw, draw_heat_map

            for chart in charts(found, name):
                write_bytes(run.path / f"{chart.name}.{kind}", draw(chart, kind))
                written.append(f"{chart.name}.{kind}")
            for heat in heat_maps(found, seen.tokens, TOKENS_SHOWN):
                write_bytes(run.path / f"{heat.name}.{kind}", draw_heat_map(heat, kind))
                written.append(f"{heat.name}.{kind}")
    return written


def show(seen: Observation, found: Statistics) -> None:
    """What a terminal has room for: the layers, the words, and the text's beginning shaded by how much runs."""
    from widecli.cli.tables import print_layers
    from widecli.inspection.views import groups_table, layer_table, overall_table, words_table
    from widecli.report.tables import terminal

    note(f"{seen.model}, {seen.text}")
    print_layers(seen.summary["layers"])
    table = layer_table(found)
    console.print(terminal(table, console.width))
    console.print(terminal(overall_table(found), console.width))
    note(table.caption)
    groups = groups_table(found)
    if groups.rows:
        console.print(terminal(groups, console.width))
        note(groups.caption)
    else:
        note("channels are grouped as they are stored, and skipped groups leave nothing")
    for top in (True, False):
        words = words_table(found, LEAST_COUNT, top)
        if words.rows:
            console.print(terminal(words, console.width))
    if console.is_terminal and console.color_system:
        print_shaded(seen, found)


def print_shaded(seen: Observation, found: Statistics) -> None:
    """The first tokens on a background that is the darker the more of the model they run."""
    from rich.text import Text as RichText

    shares = [
        sum(row[i] or 0.0 for rows in found.token_shares.values() for row in rows)
        for i in range(min(len(seen.tokens), 2 * TOKENS_SHOWN))
    ]
    low, high = min(shares), max(shares)
    shaded = RichText("the text, darker = runs more:\n")
    for token, share in zip(seen.tokens, shares, strict=False):
        level = int(5 * (share - low) / ((high - low) or 1.0))
        shaded.append(token, style=f"on color({(254, 153, 117, 75, 32, 26)[level]})" if level else "")
    console.print(shaded)

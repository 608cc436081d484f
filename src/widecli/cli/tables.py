"""Summaries as tables for people. JSON holds fractions; tables show percent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from widecli.cli.console import console, note, warn
from widecli.cli.cost_card import targets
from widecli.report.flops import in_words

WORTH_A_WARNING = 0.05
_SHADES = " ▁▂▃▄▅▆▇█"


def print_training(summary: dict[str, Any]) -> None:
    """What a training stage achieved and where it lies."""
    title = {"calibrate": "calibrated", "lora": "adapted"}[summary["command"]]
    table = Table(title=title, title_justify="left", show_header=False)
    if validation := summary.get("validation"):
        figures = ", ".join(
            f"{when} {validation[when]:.2f}" for when in ("dense", "start", "final") if validation[when] is not None
        )
        table.add_row(f"token perplexity, {validation['text']}", figures)
    table.add_row("budget", targets(summary["budget"]))
    if adapter := summary.get("adapter"):
        routers = f"routers {summary['routers']}, objective {summary['objective']}"
        table.add_row("adapter", f"LoRA, rank {adapter['rank']}, {adapter['parameters']:,} parameters; {routers}")
    _add_skipped(table, summary)
    if speed := summary.get("tokens_per_second"):
        table.add_row("training speed", f"{speed:,.0f} tokens/s")
    console.print(table)
    print_layers(summary.get("layers") or {})
    if (missed := _undershoot(summary)) > WORTH_A_WARNING and summary.get("routers") != "frozen":
        warn(f"{100 * missed:.0f} points less are skipped than the budget asks for: more steps close the gap")
    note(f"checkpoint: {summary['checkpoint']}")
    note(f"run: {summary['run_dir']}")


def _undershoot(summary: dict[str, Any]) -> float:
    """How far the skip rates stay below the targets at worst; negative when they are met."""
    budget, rate = summary["budget"], summary["skip_rate"]
    if budget["kind"] == "parts":
        return max(float(budget[p] - (rate[p] or 0.0)) for p in ("attention", "ffn") if budget[p] is not None)
    reached = summary["flops_skipped"]["prunable"] if budget["kind"] == "flops" else rate["mean"]
    return float(budget["sparsity"] - reached)


def _add_skipped(table: Table, summary: dict[str, Any]) -> None:
    if rate := summary.get("skip_rate"):
        shown = ", ".join(f"{key} {value:.1%}" for key, value in rate.items() if value is not None)
        table.add_row("skip rate", shown)
    if flops := summary.get("flops_skipped"):
        table.add_row("FLOPs skipped", f"{in_words(flops)} at {flops['context_tokens']} tokens")


def print_layers(layers: dict[str, Sequence[float]]) -> None:
    """Skip rate of every layer, one bar each, layer 0 on the left."""
    if not layers:
        return
    table = Table(title="skipped by layer (first to last)", title_justify="left", show_header=False)
    for part, rates in layers.items():
        bars = "".join(_SHADES[min(len(_SHADES) - 1, round(rate * (len(_SHADES) - 1)))] for rate in rates)
        table.add_row(part, bars, f"{min(rates):.0%} to {max(rates):.0%}")
    for part, rates in layers.items():
        table.add_row(f"{part}, %", " ".join(f"{100 * rate:.0f}" for rate in rates), "")
    console.print(table)


def print_evaluation(summary: dict[str, Any]) -> None:
    """Routed beside dense, the skip rates seen, and where it all lies."""
    from widecli.evaluate.results import rows

    routed = summary["checkpoint"] is not None
    dense = summary["dense"] or {}
    table = Table(title=f"{summary['model']}, {'routed' if routed else 'dense'}", title_justify="left")
    table.add_column("measure")
    table.add_column("metric")
    if dense:
        table.add_column("dense", justify="right")
    table.add_column("routed" if routed else "value", justify="right")
    if dense:
        table.add_column("routed / dense", justify="right")
    measured = rows(
        summary["tasks"],
        summary["perplexity"],
        dense_tasks=dense.get("tasks"),
        dense_perplexity=dense.get("perplexity"),
    )
    for row in measured:
        percent = row["higher_is_better"]
        cells = [row["name"], row["metric"]]
        if dense:
            cells.append(_figure(row["dense"], percent))
        cells.append(_figure(row["value"], percent))
        if dense:
            cells.append("" if row["ratio"] is None else (f"{row['ratio']:.1%}" if percent else f"{row['ratio']:.2f}x"))
        table.add_row(*cells)
    console.print(table)
    if routed:
        skipped = Table(show_header=False)
        _add_skipped(skipped, summary)
        console.print(skipped)
        print_layers(summary.get("layers") or {})
    note(f"run: {summary['run_dir']}")


def _figure(value: float | None, percent: bool) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if percent else f"{value:.2f}"

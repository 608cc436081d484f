"""What a terminal shows of a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from widecli.cli.console import console, note
from widecli.profiling.trace import PARTS
from widecli.report.sweeps import compensation_of
from widecli.report.tables import Column, Table, Value, terminal

_FLAT = 1e-3  # share of a step below which a part is not shown


def print_points(points: Sequence[Mapping[str, Any]], model: str, masks: str) -> None:
    """Dense beside routed, each with the share of its bound that was reached; transformers where it was compared."""
    rows: list[dict[str, Value]] = []
    for point in points:
        row: dict[str, Value] = {key: point[key] for key in ("batch", "prompt", "sparsity", "group_size", "speedup")}
        row["phase"] = point["phase"].upper()
        row["compensation"] = _compensation(point) if any(map(compensation_of, points)) else None
        for side in ("dense", "routed"):
            figures = point[side]
            row |= {side: figures["p50_ms"], f"{side} reached": figures["bound_reached"]}
            row[f"{side} rate"] = figures["tokens_per_second"]
            row[f"{side} joules"] = figures.get("joules_per_token")
            peak = figures.get("memory", {}).get("peak_bytes")
            row[f"{side} memory"] = None if peak is None else peak / 2**30
        if theirs := point["hugging_face"]:
            row |= {"theirs": theirs["p50_ms"], "over theirs": theirs["p50_ms"] / point["dense"]["p50_ms"]}
        rows.append(row)
    columns = [
        Column("phase", "phase"),
        Column("batch", "batch", "count"),
        Column("prompt", "prompt", "count"),
        Column("sparsity", "S, %", "percent"),
        Column("group_size", "G", "count"),
        Column("compensation", "compen-\nsation"),
    ]
    for side in ("dense", "routed"):
        columns += [
            Column(side, f"{side},\nms", "ms"),
            Column(f"{side} reached", "of bound,\n%", "percent", 2),
            Column(f"{side} rate", "tokens/s", importance=3),
            Column(f"{side} joules", "J/token", "figure", 4),
            Column(f"{side} memory", "GiB", "figure", 4),
        ]
    columns.append(Column("speedup", "speed-up", "times"))
    columns += [
        Column("theirs", "transformers,\nms", "ms", 1),
        Column("over theirs", "dense\nover it", "times", 1),
    ]
    for row in rows:
        for side in ("dense", "routed"):
            rate = row[f"{side} rate"]
            row[f"{side} rate"] = f"{rate:,.0f}" if isinstance(rate, float) and rate >= 100 else f"{rate:.3g}"
    title = f"{model}, {masks} masks: medians"
    console.print(terminal(Table("profile", title, tuple(columns), tuple(rows)).filled(), console.width))


def print_breakdown(points: Sequence[Mapping[str, Any]]) -> None:
    """Milliseconds of each part, the dense model beside every variant; one table for each cell."""
    cells: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for point in points:
        cells.setdefault((point["phase"], point["batch"], point["prompt"]), []).append(point)
    for (phase, batch, prompt), members in cells.items():
        dense = members[0]["dense"]
        if dense["fixed_share"] is None:
            note("no breakdown: the profiler may not read this device")
            continue
        steps = [dense["breakdown_ms"], *(point["routed"]["breakdown_ms"] for point in members)]
        heads = ["dense", *map(_head, members)]
        rows: list[dict[str, Value]] = []
        for part in (part for part in PARTS if any(step.get(part, 0.0) > _FLAT * sum(step.values()) for step in steps)):
            times = {str(i): _milliseconds(step.get(part)) for i, step in enumerate(steps)}
            rows.append({"part": part, **times, "bound": _milliseconds(dense["bound_parts_ms"].get(part))})
        columns = [Column("part", "part"), *(Column(str(i), head) for i, head in enumerate(heads))]
        columns.insert(2, Column("bound", "dense\nbound", importance=1))
        title = f"{phase.upper()}, batch {batch}, prompt {prompt}: milliseconds by part"
        console.print(terminal(Table("breakdown", title, tuple(columns), tuple(rows)), console.width))
        note(f"of the dense step {dense['fixed_share']:.1%} cannot be skipped")


def print_saturation(most: Sequence[Mapping[str, Any]]) -> None:
    """The most tokens a second."""
    for entry in most:
        rate = "learned" if entry["sparsity"] is None else f"S {100 * entry['sparsity']:.4g} %"
        sides = ", ".join(
            f"{side} {entry[side]['tokens_per_second']:,.0f} tokens/s at batch {entry[side]['batch']}"
            for side in ("dense", "routed")
        )
        what = "prefill" if entry["phase"] == "ttft" else "decode"
        groups = f"G {entry['group_size']}" + (f", {made}" if (made := compensation_of(entry)) else "")
        note(f"{what}, prompt {entry['prompt']}, {rate}, {groups}: {sides}, {entry['speedup']:.2f}x")


def _compensation(point: Mapping[str, Any]) -> str:
    """For a narrow column: with a rank there are means too, unless it says not."""
    made = point.get("compensation")
    if not made:
        return "none"
    if not made["rank"]:
        return "means"
    return f"rank {made['rank']}" + ("" if made["mean"] else " alone")


def _head(point: Mapping[str, Any]) -> str:
    """A variant above its column."""
    compensation = compensation_of(point)
    lines = [f"S {100 * point['sparsity']:.3g} %", f"G {point['group_size']}"]
    return "\n".join([*lines, *([compensation] if compensation else [])])


def _milliseconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g}"

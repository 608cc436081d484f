"""Render the runs of `wide profile` in reports/profile as one page: `wide profile ... --run-dir reports/profile/NAME`.

A run's folder holds `summary.json` and `environment.json`. `notes.json` beside the folders says what else must be known
of a run, by its name: what stands between a figure and its bound, and what was done about it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from render_kernels import table

from widecli.report.find import StoredRun
from widecli.report.summaries import revision, share_table
from widecli.report.sweeps import by_library, compensation_of, throughput
from widecli.report.tables import markdown

HEAD = """# Profiles

Written by `reports/render.py` from the records in this folder; no figure is typed by hand. Times are medians. TTFT is
prompt in to first token, TPOT the time of each further one; dense and routed run the same code in turns, so does
transformers (one forward pass with the faster of cuDNN's and Flash attention; `generate` with a static cache, compiled)
on the same weights. Beside a time stands the share of its bound that it reached: the time that its FLOPs and bytes
alone would take by the device's data sheet. S is the share of groups skipped, G the channels of an FFN group.
"""
PARTS = {
    "embed": "embedding",
    "norm_route": "norms and routers",
    "qkv": "Q, K, V",
    "rope_cache": "rotation, cache write",
    "attention": "attention",
    "o": "O",
    "gate_up": "gate and up",
    "down": "down",
    "ffn": "gate, up and down in one operator",  # of patterns, until 0.1
    "lm_head": "LM head",
    "statistics": "counting what was skipped",
    "other": "other",
    "launch_gaps": "launch gaps",
}
_README_GROUP_SIZE = 128  # of random masks
_FEW_SHARES = 2  # a run over more is a curve
_FLAT = 5e-3  # share of a step below which a part has no row
_END_TO_END_TOKENS = (64, 128, 512)

Point = dict[str, Any]


class Record(NamedTuple):
    """One run."""

    name: str
    summary: dict[str, Any]
    environment: dict[str, Any]

    @property
    def points(self) -> list[Point]:
        """Its points."""
        return list(self.summary["points"])


def load(folder: Path) -> list[Record]:
    """All records below `folder`, by name."""
    found = []
    for path in sorted(folder.glob("*/summary.json")):
        environment = path.with_name("environment.json")
        known = json.loads(environment.read_text()) if environment.is_file() else {}
        found.append(Record(path.parent.name, json.loads(path.read_text()), known))
    return [record for record in found if record.summary.get("command") == "profile"]


def groups_of(point: Point) -> str:
    """How a point's rows are routed, but for the share."""
    patterns = f", {point['patterns']} patterns" if point.get("patterns") else ""
    compensation = f", {made}" if (made := compensation_of(point)) else ""
    return f"{point['masks']}, G={point['group_size']}{patterns}{compensation}"


def described(record: Record, point: Point) -> str:
    """The same, and whose the dense products are where they are not our own."""
    return groups_of(point) + (", dense by the library" if by_library(record.summary) else "")


def percent(value: float | None) -> str:
    """A fraction as percent."""
    return "" if value is None else f"{100 * value:.1f}"


def milliseconds(value: float | None) -> str:
    """Three digits, or all before the point."""
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _everything(records: list[Record]) -> Iterator[tuple[Record, Point]]:
    pairs = [(record, point) for record in records for point in record.points]
    return iter(sorted(pairs, key=lambda pair: _order(*pair)))


def _by_date(records: list[Record]) -> Iterator[tuple[Record, Point]]:
    """In the same order, equal points as they were measured."""
    return _everything(sorted(records, key=lambda record: str(record.environment["date"])))


def _order(record: Record, point: Point) -> tuple[Any, ...]:
    keys = ("batch", "prompt", "group_size")
    return (
        record.summary["model"],
        point["phase"],
        *(point[key] for key in keys),
        described(record, point),
        point["sparsity"],
    )


def times(records: list[Record]) -> str:
    """One row a point."""
    rows = []
    for record, point in _everything(records):
        dense, routed, theirs = point["dense"], point["routed"], point.get("hugging_face")
        rows.append(
            [
                record.summary["model"],
                point["phase"].upper(),
                str(point["batch"]),
                f"{point['prompt']:,}",
                described(record, point),
                percent(point["sparsity"]),
                milliseconds(dense["p50_ms"]),
                percent(dense["bound_reached"]),
                milliseconds(routed["p50_ms"]),
                percent(routed["bound_reached"]),
                f"{point['speedup']:.2f}x",
                milliseconds(theirs["p50_ms"]) if theirs else "",
                f"{theirs['p50_ms'] / dense['p50_ms']:.2f}x" if theirs else "",
                f"`{record.name}`",
            ]
        )
    head = ["model", "phase", "batch", "prompt", "masks", "S, %", "dense, ms", "of bound, %", "routed, ms"]
    return table([*head, "of bound, %", "speed-up", "transformers, ms", "our dense over it", "run"], rows)


def nothing_skipped(records: list[Record]) -> str:
    """What routing itself costs: routers run and nothing is skipped."""
    rows = [
        [
            record.summary["model"],
            point["phase"].upper(),
            str(point["batch"]),
            f"{point['prompt']:,}",
            described(record, point),
            f"{100 * point['speedup']:.1f}",
            f"`{record.name}`",
        ]
        for record, point in _everything(records)
        if point["sparsity"] == 0
    ]
    return table(["model", "phase", "batch", "prompt", "masks", "of dense, %", "run"], rows) if rows else ""


def end_to_end(records: list[Record]) -> str:
    """First token and further ones together, from points of both phases; of points measured again the latest."""
    found: dict[tuple[Any, ...], dict[str, Point]] = defaultdict(dict)
    for record, point in _by_date(records):
        key = (record.summary["model"], point["batch"], point["prompt"], described(record, point), point["sparsity"])
        if point["masks"] == "random":  # a learned share differs from phase to phase
            found[key][point["phase"]] = point
    rows = []
    for (model, batch, prompt, groups, sparsity), phases in found.items():
        if len(phases) < 2:
            continue
        row = [model, str(batch), f"{prompt:,}", groups, percent(sparsity)]
        for tokens in _END_TO_END_TOKENS:
            dense, routed = (
                phases["ttft"][side]["p50_ms"] + (tokens - 1) * phases["tpot"][side]["p50_ms"]
                for side in ("dense", "routed")
            )
            row.append(f"{dense / routed:.2f}x")
        rows.append(row)
    head = ["model", "batch", "prompt", "masks", "S, %", *(f"{n} tokens" for n in _END_TO_END_TOKENS)]
    return table(head, rows) if rows else ""


def curves(records: list[Record]) -> str:
    """Speed-up by what is skipped, where a run has several shares, as `wide report` shows it."""
    models = {record.name: record.summary["model"] for record in records}
    runs = [StoredRun(Path(name), name, summary, {}, known) for name, summary, known in records]
    measured = throughput(runs, models)
    tables = [share_table(model, [p for p in measured if p.model == model]) for model in dict.fromkeys(models.values())]
    return "\n".join(markdown(made) for made in tables if made.rows)


def breakdowns(records: list[Record]) -> str:
    """Milliseconds by part, one table a cell: dense and every variant, each beside its bound."""
    cells: dict[tuple[Any, ...], list[Point]] = defaultdict(list)
    for record, point in _everything(records):
        if point["dense"].get("breakdown_ms"):
            cells[record.name, record.summary["model"], point["phase"], point["batch"], point["prompt"]].append(point)
    texts = []
    for (name, model, phase, batch, prompt), points in cells.items():
        dense = points[0]["dense"]
        steps = [dense, *(point["routed"] for point in points)]
        heads = ["dense", *(f"{groups_of(point)}, S={percent(point['sparsity'])} %" for point in points)]
        whole = dense["p50_ms"]
        rows = []
        for part, label in PARTS.items():
            if not any(step["breakdown_ms"].get(part, 0.0) > _FLAT * whole for step in steps):
                continue
            row = [label]
            for step in steps:
                row += [milliseconds(step["breakdown_ms"].get(part)), milliseconds(_part_bound(step, part))]
            rows.append(row)
        sums = ["**step**"]
        for step in steps:
            sums += [f"**{milliseconds(step['p50_ms'])}**", milliseconds(step["bound_ms"])]
        columns = [column for head in heads for column in (head, "bound")]
        texts.append(
            f"{model}, {phase.upper()}, batch {batch}, prompt {prompt:,} (`{name}`); {percent(dense['fixed_share'])} % "
            f"of the dense step cannot be skipped.\n\n{table(['part, ms', *columns], [*rows, sums])}"
        )
    return "\n".join(texts)


def _part_bound(step: Mapping[str, Any], part: str) -> float | None:
    """Milliseconds of a part by its FLOPs and bytes; of an FFN that runs as one operator, those of its halves."""
    bounds: Mapping[str, float] = step["bound_parts_ms"]
    halves = ("gate_up", "down")
    if "ffn" in step["breakdown_ms"] and part in ("ffn", *halves):
        return sum(bounds[half] for half in halves) if part == "ffn" else None
    return bounds.get(part)


def resources(records: list[Record]) -> str:
    """Peak memory and energy, where they were measured."""
    rows = []
    for record, point in _everything(records):
        sides = [point["dense"], point["routed"]]
        peaks = [side.get("memory", {}).get("peak_bytes") for side in sides]
        joules = [side.get("joules_per_token") for side in sides]
        if any(value is not None for value in (*peaks, *joules)):
            where = [record.summary["model"], point["phase"].upper(), str(point["batch"]), f"{point['prompt']:,}"]
            shown = ["" if peak is None else f"{peak / 2**30:.1f}" for peak in peaks]
            shown += ["" if value is None else f"{value:.3g}" for value in joules]
            rows.append([*where, groups_of(point), percent(point["sparsity"]), *shown])
    head = ["model", "phase", "batch", "prompt", "masks", "S, %", "dense, GiB", "routed, GiB", "dense, J/token"]
    return table([*head, "routed, J/token"], rows) if rows else ""


def runs(records: list[Record], notes: dict[str, str]) -> str:
    """Where each run was made, its command, and what must be known of it."""
    lines = []
    for record in records:
        known, summary = record.environment, record.summary
        versions = known.get("versions", {})
        facts = [summary["device_name"] or known.get("cpu") or summary["device"], summary["dtype"]]
        facts += [f"{name} {versions[name]}" for name in ("torch", "triton", "transformers") if versions.get(name)]
        facts += [f"driver {known['gpu_driver']}"] if known.get("gpu_driver") else []
        facts += [str(known.get("date", ""))[:10], revision(known)]
        command = " ".join(known.get("command_line", []))
        remarks = [*summary["notes"], *([notes[record.name]] if record.name in notes else [])]
        lines.append(f"- `{record.name}`: {', '.join(filter(None, facts))}; `{command}`")
        lines += [f"  - {remark}" for remark in remarks]
    return "\n".join(lines) + "\n"


def page(records: list[Record], notes: dict[str, str]) -> str:
    """The whole page."""
    sections = {
        "Times": times(records),
        "Nothing skipped: what routing itself costs": nothing_skipped(records),
        "End to end": end_to_end(records),
        "By what is skipped": curves(records),
        "Where the time goes": breakdowns(records),
        "Memory and energy": resources(records),
        "Runs": runs(records, notes),
    }
    return "\n".join([HEAD, *(f"## {title}\n\n{text}" for title, text in sections.items() if text)])


def _is_curve(record: Record) -> bool:
    return len({point["sparsity"] for point in record.points if point["masks"] == "random"}) > _FEW_SHARES


def headline(records: list[Record]) -> str:
    """For the project's README: the run with compensation, as new calibrations have it."""
    rows = []
    for record, point in _everything([record for record in records if record.name == "compensation"]):
        if point["compensation"] is None:
            continue
        sides = [milliseconds(point[side]["p50_ms"]) for side in ("dense", "routed")]
        what = "prompt to first token" if point["phase"] == "ttft" else "each further token"
        rows.append([what, f"{point['prompt']:,}", *sides, f"{point['speedup']:.2f}x", f"`{record.name}`"])
    return table(["time", "prompt", "dense, ms", "routed, ms", "speed-up", "run"], rows)


def short(records: list[Record]) -> str:
    """What the documentation shows: dense, routed at about half skipped, nothing skipped, transformers.

    A row is one run: what stands in it was measured in turns. Of random masks those of one width where that was
    measured, of learned ones single sequences; runs over many shares have a table of their own. Patterns are no more.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = defaultdict(dict)
    among_several = {r.summary["model"] for r in records for p in r.points if p["group_size"] == _README_GROUP_SIZE}
    for record, point in _everything([record for record in records if not _is_curve(record)]):
        if point.get("patterns"):
            continue
        if point["masks"] == "learned":
            if point["batch"] > 1:
                continue
        elif record.summary["model"] in among_several and point["group_size"] != _README_GROUP_SIZE:
            continue
        setting = (record.summary["model"], point["phase"], point["batch"], point["prompt"])
        row = found[*setting, described(record, point), record.name]
        if point["sparsity"] == 0:
            row["nothing"] = f"{100 * point['speedup']:.1f}"
        elif point["masks"] == "learned" or point["sparsity"] == 0.5:
            row["point"] = point
        if theirs := point.get("hugging_face"):
            row["theirs"] = milliseconds(theirs["p50_ms"])
    rows = []
    for (model, phase, batch, prompt, groups, name), row in found.items():
        if point := row.get("point"):
            figures = [milliseconds(point[side]["p50_ms"]) for side in ("dense", "routed")]
            reached = [percent(point[side]["bound_reached"]) for side in ("dense", "routed")]
            rows.append(
                [
                    *(model, f"{phase.upper()}, batch {batch}, prompt {prompt:,}", groups, percent(point["sparsity"])),
                    *(row.get("theirs", ""), figures[0], reached[0], figures[1], reached[1]),
                    *(f"{point['speedup']:.2f}x", row.get("nothing", ""), str(point["routed"]["n"]), f"`{name}`"),
                ]
            )
    head = ["model", "", "masks", "S, %", "transformers, ms", "dense, ms", "of bound, %", "routed, ms", "of bound, %"]
    return table([*head, "speed-up", "at S = 0, % of dense", "n", "run"], rows)


def render(folder: Path) -> list[Record]:
    """Write README.md in `folder`, where it holds records; returns them."""
    records = load(folder)
    if records:
        notes = folder / "notes.json"
        known = json.loads(notes.read_text()) if notes.is_file() else {}
        (folder / "README.md").write_text(page(records, known))
    return records

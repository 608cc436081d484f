"""Render the records of `python -m wide_kernels.bench` in reports/kernels as Markdown, one page beside each.

`limits.json` beside them, where there is one, holds what limits an operator by the name of its target; `notes.json`
what else must be known of a record, by its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMA = "wide_kernels.bench/1"
HEAD = """# Kernels: {name}

Written by `reports/render.py` from `{name}.json`; no figure is typed by hand. {environment}.
{checks} Times are medians of CUDA graphs, dense and routed calls in turn, L2 flushed before each call; the speedup is
over the fastest dense library call. Errors are relative (Frobenius norm) to float64 on sampled rows.
"""


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, first column left, the others right."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" + "---:|" * (len(head) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def targets(entries: list[dict[str, Any]], limits: dict[str, str]) -> str:
    """What was to be reached and what was."""
    rows = []
    for entry in entries:
        reached = entry["reached"]
        unit = " us" if entry["unit"] == "us" else "x"
        variants = entry.get("variants", {})
        told = ", ".join(f"`{op}` {value:.2f}{unit}" for op, value in variants.items()) if len(variants) > 1 else ""
        rows.append(
            [
                entry["name"],
                f"{entry['must']:g}{unit}",
                f"{entry['goal']:g}{unit}",
                "" if entry["ideal"] is None else f"{entry['ideal']:g}{unit}",
                "" if reached is None else f"{reached:.2f}{unit}",
                f"{entry['with_layout']:.2f}{unit}" if entry.get("with_layout") else "",
                entry["level"],
                "" if reached is None else f"{entry['error']:.1e}",
                entry.get("backend", ""),
                told,
                limits.get(entry["name"], ""),
            ]
        )
    head = ["target", "must", "goal", "ideal", "reached", "with its layout", "level", "error", "backend", "variants"]
    return table([*head, "what limits"], rows)


def _microseconds(times: dict[str, Any] | None) -> str:
    return "" if times is None else f"{times['p50_ms'] * 1e3:,.1f}"


def _megabytes(memory: dict[str, int], name: str) -> str:
    return f"{memory[name] / 2**20:,.1f}" if name in memory else ""


def figures(records: list[dict[str, Any]]) -> str:
    """One row a measured case."""
    rows = []
    for record in records:
        memory, baselines = record["peak_extra_bytes"], record["baselines"]
        dense = record["best_dense"]
        sequences = f" {record['batch']} x {record['keys']:,} keys" if "keys" in record else ""
        rows.append(
            [
                f"`{record['op']}`{sequences}",
                f"{record['rows']:,}",
                str(record["group_size"]),
                f"{record['density']:g}",
                record["masks"],
                _microseconds(record["routed"]),
                f"{_microseconds(baselines[dense])} ({dense})",
                f"{record['speedup']:.2f}x",
                f"{record['tflops']:.0f}",
                f"{record['error']:.1e}",
                {True: "yes", False: "no"}.get(record.get("bitwise_repeatable"), ""),
                _megabytes(memory, "routed"),
                _megabytes(memory, dense),
                record["backend"],
            ]
        )
    head = ["op", "T", "G", "density", "masks", "us", "dense us", "speedup", "TFLOP/s", "error", "bits repeat"]
    return table([*head, "peak MiB", "dense peak MiB", "backend"], rows)


def naive(records: list[dict[str, Any]]) -> str:
    """The gather-scatter forms beside ours: time and memory."""
    rows = []
    for record in records:
        for name, times in record["baselines"].items():
            if not name.startswith("gather-scatter"):
                continue
            memory = record["peak_extra_bytes"]
            rows.append(
                [
                    f"`{record['op']}` T={record['rows']:,} G={record['group_size']}",
                    name,
                    _microseconds(times),
                    f"{times['p50_ms'] / record['routed']['p50_ms']:.1f}x",
                    _megabytes(memory, name),
                    f"{memory[name] / max(1, memory['routed']):.1f}x" if name in memory else "",
                ]
            )
    return table(["op", "form", "us", "of our time", "peak MiB", "of our peak"], rows) if rows else ""


def backends(records: list[dict[str, Any]]) -> str:
    """Where several backends ran: each one's time, auto's choice in bold; and who refused, with the reason."""
    rows = []
    for record in records:
        timed, refused = record.get("backends", {}), record.get("refused", {})
        if len(timed) < 2 and not refused:
            continue
        shown = [
            f"**{name} {_microseconds(times)}**" if times["chosen"] else f"{name} {_microseconds(times)}"
            for name, times in timed.items()
        ]
        label = f"`{record['op']}` T={record['rows']:,} G={record['group_size']} density {record['density']:g}"
        rows.append([label, ", ".join(shown), "; ".join(refused.values())])
    return table(["op", "us by backend", "refused"], rows) if rows else ""


def launched(records: list[dict[str, Any]]) -> str:
    """Why a backend ran and which kernels it launched, once for each case that launches others."""
    seen: dict[tuple[str, str, tuple[str, ...]], str] = {}
    for record in records:
        key = (record["op"], record["explain"], tuple(record["kernels"]))
        seen.setdefault(key, f"T={record['rows']:,} G={record['group_size']}")
    rows = [
        [f"`{op}` {where}", why.replace("\n", "; ").replace("|", "/"), ", ".join(f"`{name[:60]}`" for name in names)]
        for (op, why, names), where in seen.items()
    ]
    return table(["op, first at", "explain", "launched kernels"], rows)


def structures(records: list[dict[str, Any]]) -> str:
    """What recorded masks are like."""
    found = {record["masks"]: record["structure"] for record in records if record.get("structure")}
    keys = ["density", "entropy", "constant", "union_natural", "union_sorted", "segment"]
    rows = [[f"`{name}`", *(f"{each[key]:.3g}" for key in keys)] for name, each in found.items()]
    return table(["masks", *(key.replace("_", ", ") for key in keys)], rows) if rows else ""


def patterns(records: list[dict[str, Any]]) -> str:
    """Operators on rows that follow patterns: every backend beside dense and beside independent bits of the same G."""
    rows = []
    for record in records:
        dense = record["baselines"][record["best_dense"]]["p50_ms"]
        bits = record["baselines"].get("independent bits")
        times = {name: found["p50_ms"] for name, found in record["backends"].items()}
        best = min(times, key=lambda name: times[name])
        rows.append(
            [
                f"`{record['op']}`",
                *(f"{record[key]:g}" for key in ("rows", "group_size", "patterns")),
                record["frequency"],
                f"{100 * record['waste']:.1f}",
                ", ".join(f"{name} {1e3 * time:,.0f}" for name, time in times.items()),
                f"{1e3 * dense:,.0f}",
                f"{dense / times[best]:.2f}x ({best})",
                "" if bits is None else f"{bits['p50_ms'] / times[best]:.2f}x",
                f"{record['error']:.1e}",
                "yes" if record["bitwise_repeatable"] else "no",
            ]
        )
    head = ["operator", "T", "G", "C", "frequencies", "waste, %", "us by backend", "dense, us", "best against dense"]
    return table([*head, "against bits", "error", "the same bit for bit"], rows)


def sections(
    summary: list[dict[str, Any]], records: list[dict[str, Any]], limits: dict[str, str]
) -> Iterator[tuple[str, str]]:
    """Title and text of a page's parts."""
    if any("patterns" in record for record in records):
        yield "Patterns (density 0.5)", patterns(records)
    else:
        if any(entry["reached"] is not None for entry in summary):
            yield "Targets (T = 16384, density 0.5, unless said)", targets(summary, limits)
        yield "Figures", figures(records)
        yield "The gather-scatter form without kernels", naive(records)
        yield "Backends", backends(records)
        yield "Recorded masks", structures(records)
    yield "What ran", launched(records)


def page(name: str, document: dict[str, Any], limits: dict[str, str], note: str) -> str:
    """The whole page of one record."""
    known, checks = document["environment"], document["checks"]
    shown = ("gpu", "driver", "torch", "triton", "cuda", "revision", "date")
    environment = ", ".join(f"{key} {known[key]}" for key in shown if known.get(key))
    outcome = f"{checks['done']} awkward cases checked before timing, {len(checks['wrong'])} wrong."
    if not checks["done"]:
        outcome = "Awkward cases were checked in a run of their own."
    results = document.get("results", [])
    records = [record for record in results if "left_out" not in record]
    left_out = [record["left_out"] for record in results if "left_out" in record]
    parts = [HEAD.format(name=name, environment=environment, checks=outcome)]
    if note:
        parts.append(f"{note}\n")
    parts += [f"## {title}\n\n{text}" for title, text in sections(document.get("summary", []), records, limits) if text]
    if left_out:
        parts.append("Left out when the time ended: " + ", ".join(left_out) + ".\n")
    return "\n".join(parts)


def short(document: dict[str, Any]) -> str:
    """What the project's README shows of a record: the targets, and the speedups by group size."""
    rows = []
    for entry in document["summary"]:
        unit = " us" if entry["unit"] == "us" else "x"
        rows.append([entry["name"], f"{entry['reached']:.2f}{unit}", f"{entry['error']:.1e}", entry["backend"]])
    text = table(["operator", "times the fastest dense call", "relative error", "backend"], rows) + "\n"
    found: dict[str, dict[int, float]] = {}
    for record in document["results"]:
        at_point = "left_out" not in record and (record["rows"], record["density"]) == (16384, 0.5)
        if at_point and record["op"] in ("gemm_mn", "gated_mlp_up", "gemm_k bf16", "ffn"):
            found.setdefault(record["op"], {})[record["group_size"]] = record["speedup"]
    sizes = sorted({size for by_size in found.values() for size in by_size})
    rows = [[f"`{op}`", *(f"{by_size[size]:.2f}x" for size in sizes)] for op, by_size in found.items()]
    return text + table(["T = 16384, by G", *map(str, sizes)], rows)


def render(folder: Path) -> list[Path]:
    """Write NAME.md beside every record NAME.json; returns the pages."""
    limits, notes = (
        json.loads(path.read_text()) if path.is_file() else {}
        for path in (folder / "limits.json", folder / "notes.json")
    )
    pages = []
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        if document.get("schema") == SCHEMA:
            pages.append(path.with_suffix(".md"))
            pages[-1].write_text(page(path.stem, document, limits, notes.get(path.stem, "")))
    return pages

"""Render the records of kernels in reports/kernels as Markdown, one page beside each.

Most are written by `python -m wide_kernels.bench`; those of schema DECODE_SCHEMA hold what was measured of decode
attention alone, of which `python -m wide_kernels.benchmarks.read_floor` writes the part `floor`.

`limits.json` beside them, where there is one, holds what limits an operator by the name of its target; `notes.json`
what else must be known of a record, by its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SCHEMA = "wide_kernels.bench/1"
DECODE_SCHEMA = "wide_kernels.decode/1"
HEAD = """# Kernels: {name}

Written by `reports/render.py` from `{name}.json`; no figure is typed by hand. {environment}.
{checks} Times are medians of CUDA graphs, dense and routed calls in turn, L2 flushed before each call; the speedup is
over the fastest dense library call. Errors are relative (Frobenius norm) to float64 on sampled rows.
"""

DECODE_HEAD = """# Kernels: {name}

Written by `reports/render.py` from `{name}.json`; no figure is typed by hand. {environment}.
Decode attention, {model} shapes, {dtype}. Times are medians of CUDA graphs; `alone`: one call, L2 flushed before it;
`of N`: one of N calls in a graph, each on a cache of its own, as the layers of a model make them.
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


def environment_of(document: dict[str, Any]) -> str:
    """What the figures depend on, in words."""
    known = document["environment"]
    shown = ("gpu", "driver", "torch", "triton", "cuda", "revision", "date")
    return ", ".join(f"{key} {known[key]}" for key in shown if known.get(key))


def checked(checks: dict[str, Any]) -> str:
    """Configurations of a kernel that were right before they were timed, and how right."""
    rows = []
    for entry in checks["configurations"]:
        settings = ", ".join(f"{key} {value}" for key, value in entry["settings"].items())
        counts = [str(entry["cases"]), str(entry["wrong"])]
        rows.append([entry["configuration"], settings, *counts, f"{entry['largest_error']:.1e}"])
    said = (
        f"Each case: an error against float64 below {checks['tolerance']:g}, {checks['calls_compared']} calls and "
        f"{checks['graph_replays']} replays of a graph that agree bit for bit, zeros where a head is skipped.\n\n"
    )
    return said + table(["configuration", "settings", "cases", "wrong", "largest error"], rows)


def decode_times(times: list[dict[str, Any]]) -> str:
    """Forms of the operator by point: microseconds and the speedup over the fastest dense call of the point."""
    points: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in times:
        point = tuple(row[key] for key in ("batch", "keys", "executed_pairs", "pairs", "calls"))
        points.setdefault(point, {})[row["what"]] = row["us"]
    best = {point: min(us for what, us in by.items() if what.startswith("dense")) for point, by in points.items()}
    head = [
        f"{batch} x {keys:,} keys, {executed} of {pairs} heads, {_calls(calls)}"
        for batch, keys, executed, pairs, calls in points
    ]
    rows = []
    for what in dict.fromkeys(row["what"] for row in times):
        found = [(by.get(what), best[point]) for point, by in points.items()]
        rows.append([what, *("" if us is None else f"{us:.2f}, {dense / us:.2f}x" for us, dense in found)])
    return table(["us, speedup over dense", *head], rows)


def _calls(count: int) -> str:
    return "alone" if count == 1 else f"of {count}"


def by_shape(entries: list[dict[str, Any]]) -> str:
    """Two launches against one by batch and keys."""
    rows = [
        [
            f"{entry['batch']} x {entry['keys']:,}",
            str(entry["calls"]),
            f"{entry['triton_us']:.2f}",
            f"{entry['gluon_us']:.2f}",
            f"{entry['triton_us'] / entry['gluon_us']:.2f}x",
        ]
        for entry in entries
    ]
    said = "Every other KV head skipped; calls in a graph, L2 not flushed, so that small caches stay in it.\n\n"
    return said + table(["batch x keys", "caches", "triton, us", "gluon, us", "triton / gluon"], rows)


def floor(found: dict[str, Any]) -> str:
    """Only reading beside the operator and dense calls, the fastest variant of every `form`."""
    best: dict[str, dict[str, Any]] = {}
    for row in sorted(found["rows"], key=lambda row: float(row["us"])):
        best.setdefault(row.get("form", row["what"]), row)
    tried = [row.get("form", row["what"]) for row in found["rows"]]
    dense = min((row for row in best.values() if row["what"].startswith("dense")), key=lambda row: float(row["us"]))
    rows = []
    for form, row in best.items():
        reads = row["what"].startswith("read")
        cells = []
        for key in ("us", "us_in_graph"):
            us = row.get(key)
            speed = f"{found['bytes'] / us / 1e6:.2f}" if us and reads else ""
            share = f"{dense[key] / us:.2f}x" if us and "empty" not in row["what"] else ""
            cells += ["" if us is None else f"{us:.2f}", speed, share]
        rows.append([row["what"], str(tried.count(form)), *cells])
    said = (
        f"One sequence, {found['keys']:,} keys, {found['executed_heads']} of {found['heads']} KV heads: "
        f"{found['bytes'] / 1e6:.1f} MB. Readers store a few bytes a program and compute nothing but a sum.\n\n"
    )
    many = _calls(found["calls"])
    head = ["", "variants", "us, alone", "TB/s", "dense over it", f"us, {many}", f"TB/s, {many}", "dense over it"]
    return said + table(head, rows)


def decode_page(name: str, document: dict[str, Any], limits: dict[str, str], note: str) -> str:
    """The whole page of a record of decode attention; whichever of its parts there are."""
    words = {"environment": environment_of(document), "model": document["model"], "dtype": document["dtype"]}
    parts = [DECODE_HEAD.format(name=name, **words)]
    if "made_by" in document:
        parts.append(f"Made by {document['made_by']}.\n")
    if note:
        parts.append(f"{note}\n")
    known: dict[str, tuple[str, Callable[[Any], str]]] = {
        "summary": ("Target", lambda entries: targets(entries, limits)),
        "times": ("Times by configuration", decode_times),
        "by_shape": ("One launch (Gluon) against two (Triton)", by_shape),
        "floor": ("Only reading the same bytes", floor),
        "checks": ("Checks", checked),
    }
    parts += [f"## {title}\n\n{text(document[key])}" for key, (title, text) in known.items() if key in document]
    return "\n".join(parts)


def page(name: str, document: dict[str, Any], limits: dict[str, str], note: str) -> str:
    """The whole page of one record."""
    checks, environment = document["checks"], environment_of(document)
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


def short(document: dict[str, Any], *later: dict[str, Any]) -> str:
    """What the project's README shows of a record: the targets, and the speedups by group size.

    What a later record reached of a target takes the place of what the first did.
    """
    reached = [entry for each in (document, *later) for entry in each["summary"] if entry["reached"] is not None]
    rows = []
    for entry in {entry["name"]: entry for entry in reached}.values():
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
        if written := {SCHEMA: page, DECODE_SCHEMA: decode_page}.get(document.get("schema")):
            pages.append(path.with_suffix(".md"))
            pages[-1].write_text(written(path.stem, document, limits, notes.get(path.stem, "")))
    return pages

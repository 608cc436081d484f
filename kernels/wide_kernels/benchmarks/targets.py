"""What the kernels are meant to reach on one H200, and what a record says they did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

MODEL = "llama-3.1-8b"


@dataclass(frozen=True)
class Target:
    """A goal for one operator at one point, random masks of density 0.5; `unit`: times faster than dense (x) or us.

    `group` None: any. Where several variants of an operator were measured, the fastest counts and all are told.
    """

    name: str
    op: str
    rows: int | None
    group: int | None
    must: float
    goal: float
    ideal: float | None
    unit: str = "x"
    keys: int | None = None  # of a decode attention, at batch 1


TARGETS = (
    Target("GEMM-MN, G=128", "gemm_mn", 16384, 128, 1.40, 1.65, 2.0),
    Target("fused gate/up/SwiGLU, G=128", "gated_mlp_up", 16384, 128, 1.50, 1.80, 2.15),
    Target("GEMM-K, G=128", "gemm_k", 16384, 128, 1.00, 1.45, 2.0),
    Target("GEMM-K, G=512", "gemm_k", 16384, 512, 1.20, 1.70, 2.0),
    Target("prefill attention", "attention_prefill", 16384, None, 1.27, 1.70, 2.0),
    Target("decode FFN, B=1", "ffn", 1, 128, 1.80, 2.15, 2.35),
    Target("decode attention, B=1, 16k keys", "attention_decode", 1, None, 2.0, 4.0, 4.3, keys=16384),
    Target("mask layout, 112 groups", "route_layout", 16384, 128, 30.0, 10.0, None, "us"),
)


def _answers(target: Target, record: dict[str, Any]) -> bool:
    return (
        "left_out" not in record
        and record["op"].split()[0] == target.op
        and target.rows in (None, record["rows"])
        and target.group in (None, record["group_size"])
        and record["density"] == 0.5
        and record["model"] == MODEL
        and record["masks"] == "random"
        and target.keys in (None, record.get("keys"))
    )


def _value(target: Target, record: dict[str, Any]) -> float:
    return float(record["speedup"] if target.unit == "x" else record["routed"]["p50_ms"] * 1e3)


def summary(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry a target: what was reached, by which variant, and whether that is the goal, the must, or less."""
    found = []
    for target in TARGETS:
        entry: dict[str, Any] = asdict(target) | {"reached": None, "level": "not measured"}
        records = [record for record in results if _answers(target, record)]
        if records:
            more = target.unit == "x"
            best = (max if more else min)(records, key=lambda record: _value(target, record))
            value = _value(target, best)
            met = [level for level in ("must", "goal") if (value >= entry[level]) == more or value == entry[level]]
            layouts = [
                record["routed"]["p50_ms"]
                for record in results
                if "left_out" not in record
                and record["op"] == "route_layout"
                and all(record[key] == best[key] for key in ("model", "rows", "group_size", "density", "masks"))
            ]
            entry |= {"reached": value, "level": met[-1] if met else "below"}
            entry |= {key: best[key] for key in ("op", "error", "backend", "best_dense", "bitwise_repeatable")}
            entry["variants"] = {record["op"]: _value(target, record) for record in records}
            if more and layouts and best["op"].split()[0].startswith("g"):
                routed = best["routed"]["p50_ms"]
                entry["with_layout"] = value * routed / (routed + layouts[0])
        found.append(entry)
    return found


def lines(entries: Sequence[dict[str, Any]]) -> list[str]:
    """The summary for people."""
    text = [f"{'target':34}{'must':>7}{'goal':>7}{'reached':>9}  level"]
    for entry in entries:
        reached = "-" if entry["reached"] is None else f"{entry['reached']:.2f}"
        line = f"{entry['name']:34}{entry['must']:>7g}{entry['goal']:>7g}{reached:>9}  {entry['level']}"
        if entry["reached"] is not None:
            line += f", {entry['op']} on {entry['backend']}, error {entry['error']:.1e}"
            if entry.get("with_layout"):
                line += f", {entry['with_layout']:.2f} with its layout"
            if len(entry["variants"]) > 1:
                line += " (" + ", ".join(f"{op} {value:.2f}" for op, value in entry["variants"].items()) + ")"
        text.append(line)
    return text

"""`summary.json`, schema `wide.summary/1`: what every command reports, and `--json` prints.

All fractions are in [0, 1]. A key that a command cannot fill is null, never absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SUMMARY_SCHEMA = "wide.summary/1"

_ROUTED = ("model", "plan", "skip_rate", "flops_skipped", "steps", "tokens_per_second", "checkpoint")
REQUIRED_KEYS: Mapping[str, tuple[str, ...]] = {
    "calibrate": _ROUTED,
    "lora": (*_ROUTED, "adapter", "objective", "routers", "origin"),
    "eval": (*_ROUTED, "perplexity", "tasks", "average", "retention", "dense"),
    "inspect": ("model", "plan", "skip_rate", "flops_skipped", "steps", "checkpoint", "text", "tokens", "layers"),
    "profile": ("model", "plan", "checkpoint", "points"),
    "sweep": ("model", "axes", "stages", "finished", "points", "runs"),
}
"""Command -> keys of its summary, besides `schema`, `command` and `run_dir`."""

_PARTS: Mapping[str, tuple[str, ...]] = {
    "skip_rate": ("attention", "ffn", "mean"),
    "flops_skipped": ("prunable", "total", "context_tokens"),
}


def completed(command: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The summary in its fixed order of keys; raises ValueError when the command left out a required one."""
    required = REQUIRED_KEYS.get(command, ())
    missing = [key for key in required if key not in values]
    for key, parts in _PARTS.items():
        if isinstance(values.get(key), Mapping):
            missing.extend(f"{key}.{part}" for part in parts if part not in values[key])
    if missing:
        raise ValueError(f"the summary of {command} lacks {', '.join(missing)}")
    ordered = {key: values[key] for key in required}
    return {"schema": SUMMARY_SCHEMA, "command": command, **ordered, **values}

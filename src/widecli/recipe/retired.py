"""Pattern routing, which recipes could ask for until 0.1: its keys, and what is said where something still asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODE = "patterns"
RETIRED = "which this version no longer has (independent groups are better at the same speed); use widecli 0.1 for it"

PATTERN_KEYS: Mapping[str, Any] = {
    "routing.pattern_count": 64,
    "routing.pattern_segments": 1,
    "routing.pattern_parts": "ffn",
    "routing.pattern_start": "converted",
    "routing.pattern_after": 0.0,
    "routing.pattern_update": "fixed",
    "routing.pattern_refit_every": 50,
    "routing.pattern_noise_scale": 1.0,
}
"""Key -> its default, at which it says nothing: so it stands in every recipe that a run of 0.1 stored."""


def drop_silent_keys(tree: dict[Any, Any]) -> None:
    """Take the keys that say nothing out of a recipe's tree."""
    routing = tree.get("routing")
    if isinstance(routing, dict):
        for key, default in PATTERN_KEYS.items():
            name = key.removeprefix("routing.")
            if name in routing and routing[name] == default:
                del routing[name]

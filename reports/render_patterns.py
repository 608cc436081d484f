"""Tables of the runs whose tokens picked patterns, beside the ones whose groups decide by themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import mean, stdev
from typing import Any

from render_kernels import table

HEAD = """## Patterns, SmolLM2-135M on one H200

Measured with versions until 0.1, which had `routing.mode=patterns`: a token picks one of a few patterns of a layer's
groups. The text, steps (300) and sizes of the first section. `b16` and `b64`: every group of 16 or 64 channels decides
by itself; `cG-CxP`: the seed-0 run of these converted by `wide patterns --size C --segments P --tokens 32768` without
training; `p16` and `p64`: trained with C = 64 patterns, fitted at the start and in use from the first step, or
(`after8`) fitted after 8 tenths of the steps to what groups decide by themselves until then; then fixed, learned by
gradient, or fitted again every 50 steps. `late` is the recipe as it ended, `after8-learned` with patterns that keep
the massive groups of the tokens that take them; before, one of four runs (`outvoted`, folder `smollm2-h200-outvoted`)
lost those of the first tokens in one layer. Its S = 25 % ran before the change. Patterns for the FFN only: three head
groups have all eight. Several seeds: mean ± standard deviation. Folder: `smollm2-h200-patterns`.
"""
PICTURE = """
![Perplexity against measured FFN time, for bits and patterns](page/ffn_time.png)

The same rows against what their decisions cost, drawn by widecli 0.1: the time of an FFN in Llama-3.1-8B shapes, from
`kernels/`, as a share of dense, where G and C were timed and the model runs about the share of its FFN that was timed.
"""
Runs = Mapping[str, dict[str, Any]]


def _kind(name: str, found: dict[str, Any]) -> tuple[float, int, str, str, str]:
    """What a row stands for: sparsity, G, decision, C and segments."""
    plan = found["plan"]
    sparsity = 0.25 if name.startswith("s25-") else 0.5
    patterns = plan.get("patterns")
    name = name.removeprefix("s25-").rpartition("-seed")[0] or name
    if patterns is None:
        return sparsity, plan["ffn_group_size"], "bits", "", ""
    how = "converted" if found["checkpoint"].startswith("conv/") else f"trained, {name.partition('-')[2]}"
    return sparsity, plan["ffn_group_size"], how, str(patterns["count"]), str(patterns["segments"])


def _spread(values: list[float], digits: int = 2) -> str:
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"


def quality(evals: Runs) -> str:
    """A row for each kind of decision: what it skips and what that costs."""
    kinds: dict[tuple[float, int, str, str, str], list[str]] = defaultdict(list)
    for name, found in evals.items():
        if found["plan"] is not None:
            kinds[_kind(name, found)].append(name)
    rows = []
    for kind in sorted(kinds, key=lambda k: (-k[0], k[1], k[2], int(k[3] or 0), k[4])):
        found = [evals[name] for name in kinds[kind]]
        kept = [100 * f["retention"] for f in found if f["retention"] is not None]
        rows.append(
            [
                f"{100 * kind[0]:g}",
                *map(str, kind[1:]),
                _spread([100 * f["skip_rate"]["ffn"] for f in found], 1),
                _spread([100 * f["flops_skipped"]["prunable"] for f in found], 1),
                _spread([f["perplexity"]["wikitext2/token_ppl"] for f in found]),
                _spread([f["perplexity"]["wikitext2@60/token_ppl"] for f in found]),
                _spread(kept, 1) if kept else "",
                ", ".join(f"`{name}`" for name in kinds[kind]),
            ]
        )
    head = ["S, %", "G", "decision", "C", "segments", "FFN skipped, %"]
    head += ["prunable FLOPs skipped, gross, %", "WikiText-2"]
    return table([*head, "first 60 windows", "seven tasks kept, % (400 items)", "runs"], rows)

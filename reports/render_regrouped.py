"""Tables of the runs on regrouped channels with compensation: finished runs, a search, runs that were cut off."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

from render_kernels import table

from widecli.report.flops import gross_and_net

HEAD = """## Regrouped channels and compensation, SmolLM2-135M on one H200

`routing.grouping=clustered`, means and a bypass of rank 32, fitted before the first step; G = 128, 300 steps of
32 x 1024 tokens, S = 47.5 % of the prunable FLOPs (net), seed 0, one run each. The text is that of the first section
(10.9M tokens), again without WikiText-2; perplexity of its first 60 windows of 2048, dense 20.69. Net: what routers and
compensation cost is subtracted. The paper's form at G = 64 with the same steps is at 57.92 to 60 (first sections),
with 46 % skipped gross. Folder: `smollm2-h200-regrouped`; file names in its records are shortened to `text/` and
`data/hub`.
"""
SECOND_HEAD = """
### Other settings, another seed, other sizes, LoRA

Changes against `distill-fast-compensation-lr4e-3` above (4e-3 for the routers, 1e-2 for the compensation, distill 0.5,
temperature 2 to 0.5, the whole budget from the first step); S = 47 % unless it says otherwise. `seed1` differs from it
by nothing but the seed and ends 3.7 points of perplexity higher: at these rates one run says little. Colder, warmer,
faster and ramped runs all end higher too, none by more than seeds differ but `lr8`. `lora` runs train on from `seed1`.
Folder: `second`.
"""
SEARCH_HEAD = """
### What was tried at S = 46.5 % (net)

A loop around the same training code, without commands and checkpoints, five runs side by side; compensation starts at
its means with an empty bypass unless `fit` says otherwise. `changes` are against 2e-3 for the routers, 3e-3 for the
compensation, the next-token loss. `silu`: a nonlinearity in the bypass. `unscaled`: the bypass is added whole, also
where a token skips little. One run each; two runs of one recipe differ by 3 % in the first two sections.
"""
CHANGING = ("routing", "compensation", "budget", "train", "lora")
CUT_HEAD = """
### Runs that were cut off

The same recipe with half of the objective from the dense model (`train.distill=0.5`) and 3e-3 for the compensation;
stopped near step 220 by a time limit. Mean next-token loss of steps 151 to 200 on the training text. In
`g16-before-...` every group of 16 channels still decided by itself; patterns would have been fitted to it at step 240
(0.1's `routing.mode=patterns`). Groups of 16 are no better than groups of 128 once channels are regrouped, so patterns
over narrow groups, which can only lose against the groups' own decisions, have nothing to win.
"""


def finished(evals: dict[str, dict[str, Any]], runs: dict[str, dict[str, Any]], settings: Any) -> str:
    """One row a finished run."""
    rows = []
    for name, found in evals.items():
        gross, net = gross_and_net(found["flops_skipped"])
        skip, train = found["skip_rate"], settings(name)
        rows.append(
            [
                f"`{name}`",
                f"{train['train']['learning_rate']:g}",
                f"{train['compensation']['learning_rate']:g}",
                f"{train['train']['distill']:g}",
                *(f"{100 * value:.1f}" for value in (skip["attention"], skip["ffn"], gross, net)),
                f"{found['perplexity']['wikitext2@60/token_ppl']:.2f}",
            ]
        )
    rows.sort(key=lambda row: float(row[-1]))
    head = ["run", "routers' rate", "compensation's rate", "distill", "attention skipped, %", "FFN skipped, %"]
    return table([*head, "prunable FLOPs skipped, gross, %", "net, %", "first 60 windows"], rows)


def second(folder: Path, recipe: Any, base: dict[str, Any]) -> str:
    """One row a run: what its recipe changes against `base`, and what came out."""
    rows = []
    for path in sorted(folder.glob("eval-*/summary.json")):
        name = path.parent.name.removeprefix("eval-")
        stage = "lora" if (folder / f"lora-{name}").is_dir() else "calibrate"
        found = json.loads(path.read_text())
        gross, net = gross_and_net(found["flops_skipped"])
        ours = recipe(folder / f"{stage}-{name}" / "recipe.yaml")
        changes = [
            f"{section}.{key}={value:g}" if isinstance(value, float) else f"{section}.{key}={value}"
            for section in CHANGING
            for key, value in (ours.get(section) or {}).items()
            if value != (base.get(section) or {}).get(key)
        ]
        skip = found["skip_rate"]
        shares = (f"{100 * value:.1f}" for value in (skip["attention"], skip["ffn"], gross, net))
        perplexity = found["perplexity"]["wikitext2@60/token_ppl"]
        rows.append([f"`{name}`", stage, ", ".join(changes), *shares, f"{perplexity:.2f}"])
    rows.sort(key=lambda row: float(row[-1]))
    head = ["run", "stage", "changes", "attention skipped, %", "FFN skipped, %", "prunable FLOPs skipped, gross, %"]
    return table([*head, "net, %", "first 60 windows"], rows)


def search(path: Path) -> str:
    """One row a run of the search."""
    rows = []
    for run in json.loads(path.read_text()):
        end = run["end"]
        changes = ", ".join(f"{key}={value}" for key, value in run["changes"].items() if key not in ("kind",))
        kind = run["changes"].get("kind", "rate")
        rows.append([f"`{run['name']}`", kind, changes, *(f"{100 * end[k]:.1f}" for k in ("gross", "net")), end["ppl"]])
    rows.sort(key=lambda row: float(row[-1]))
    head = ["run", "budget", "changes", "prunable FLOPs skipped, gross, %", "net, %", "first 60 windows"]
    return table(head, [[*row[:-1], f"{row[-1]:.2f}"] for row in rows])


def cut_off(folder: Path) -> str:
    """Losses of runs that did not end."""
    rows = []
    for path in sorted(folder.glob("*/metrics.jsonl")):
        steps = [entry for line in path.read_text().splitlines() if "lm_loss" in (entry := json.loads(line))]
        some = [entry for entry in steps if 150 < entry["step"] <= 200]
        values = [mean(entry[key] for entry in some) for key in ("skip_attention", "skip_ffn")]
        loss = mean(entry["lm_loss"] for entry in some)
        rows.append([f"`{path.parent.name}`", str(len(steps)), *(f"{100 * v:.1f}" for v in values), f"{loss:.3f}"])
    return table(["run", "steps", "attention skipped, %", "FFN skipped, %", "loss, steps 151 to 200"], rows)


SHOWN = (  # form, S, run: what the project's README shows of them
    ("regrouped, compensated, G = 128", "first", "distill-fast-compensation-lr4e-3"),
    ("the same, another seed", "second", "seed1"),
    ("the same, then LoRA", "second", "lora2"),
    ("regrouped, compensated, G = 128, a quarter", "second", "s25"),
)


def short(folder: Path, paper: dict[str, Any]) -> str:
    """For the project's README: dense, the paper's form, and runs of ours."""
    rows = [_short_row("the paper's form, G = 64", "s50", paper)]
    for form, which, name in SHOWN:
        place = folder if which == "first" else folder / which
        rows.append(_short_row(form, name, json.loads((place / f"eval-{name}" / "summary.json").read_text())))
    head = ["form", "run", "prunable FLOPs skipped, gross, %", "net, %", "perplexity", "dense"]
    return table(head, rows)


def _short_row(form: str, name: str, found: dict[str, Any]) -> list[str]:
    gross, net = gross_and_net(found["flops_skipped"])
    key = "wikitext2@60/token_ppl"
    dense = (found.get("dense") or {}).get("perplexity", {}).get(key)
    shares = ["" if value is None else f"{100 * value:.1f}" for value in (gross, net)]
    return [form, f"`{name}`", *shares, f"{found['perplexity'][key]:.2f}", "" if dense is None else f"{dense:.2f}"]

"""What the project's README shows of the sweeps and of training on several cards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from render_kernels import table

from widecli.model.backbone import resolve_dtype
from widecli.recipe.load import load_text
from widecli.report.find import find_runs
from widecli.report.flops import gross_and_net
from widecli.report.scaling import TENTH, ScalingPoint, on_one_card, scaling_points
from widecli.train.scaling import LAYOUTS, estimated

GIB = 2**30
GROUP_SIZE = 64
Summary = Mapping[str, Any]


def _kept(found: Summary) -> str:
    limit = found["protocol"]["limit"]
    return f"{100 * found['retention']:.1f} ({'all' if limit is None else limit})"


def _figures(found: Summary | None) -> list[str]:
    if found is None:
        return [""] * 3
    gross, _ = gross_and_net(found["flops_skipped"])
    skipped = "" if gross is None else f"{100 * gross:.1f}"
    return [skipped, f"{found['perplexity']['wikitext2/token_ppl']:.2f}", _kept(found)]


def sweep(folder: Path) -> str:
    """Groups and whole parts over sparsity, and the groups' second stage; then groups over their size at S = 0.5.

    The other runs of a sweep, a second stage of whole parts or another mode, are in what `wide report` makes of it.
    """
    wide: dict[tuple[float, int], Summary] = {}
    token: dict[float, Summary] = {}
    adapted: dict[float, Summary] = {}
    dense: list[Summary] = []
    for path in sorted(folder.glob("eval-*/summary.json")):
        found = json.loads(path.read_text())
        if found["plan"] is None:
            dense.append(found)
            continue
        # what the run was asked for stands in the recipe of the training behind its checkpoint
        sparsity = _sparsity(folder / Path(found["checkpoint"]).parts[1])
        mode = found["plan"]["mode"]
        if found["adapter"] or found["merged"]:
            if mode == "wide":
                adapted[sparsity] = found
        elif mode == "token":
            token[sparsity] = found
        elif mode == "wide":
            key = (sparsity, found["plan"]["ffn_group_size"])
            wide[key] = min(found, wide.get(key, found), key=lambda f: f["protocol"]["limit"] or 0)  # all items first
    shares = sorted({s for s, g in wide if g == GROUP_SIZE} | token.keys())
    rows = [
        [
            f"{100 * s:g}",
            *_figures(wide.get((s, GROUP_SIZE))),
            *_figures(token.get(s)),
            *_figures(adapted.get(s))[1:],
        ]
        for s in shares
    ]
    figures = ["FLOPs skipped, %", "WikiText-2", "kept, % (items a task)"]
    head = ["S, %", *(f"groups: {x}" for x in figures), *(f"whole parts: {x}" for x in figures)]
    first = table([*head, *(f"groups + LoRA: {x}" for x in figures[1:])], rows)
    sizes = sorted(g for s, g in wide if s == 0.5)
    second = table(
        ["S = 50 %, by G", *map(str, sizes)],
        [[name, *(_figures(wide[0.5, g])[i] for g in sizes)] for i, name in enumerate(figures)],
    )
    perplexity = dense[0]["perplexity"]["wikitext2/token_ppl"]
    return f"{first}\nDense: {perplexity:.2f}.\n\n{second}"


def _sparsity(run: Path) -> float:
    import yaml

    return float(yaml.safe_load((run / "recipe.yaml").read_text())["budget"]["sparsity"])


def scaling(folder: Path) -> str:
    """Layouts on one and more cards; the estimate is that of the code as it is now, for the recorded recipe."""
    measured = scaling_points(find_runs([folder]).documents)
    rows = []
    for point in measured:
        one = on_one_card(point, measured)
        ratio = f"{point.tokens_per_second / one.tokens_per_second:.2f}x" if one and point.cards > 1 else ""
        peak, expected = (point.peak_bytes or 0) / GIB, _expected(folder, point) / GIB
        hours = [f"{point.hours(share):.1f}" for share in (1.0, TENTH)] if point.cards > 1 else ["", ""]
        rows.append(
            [
                *(point.layout, str(point.cards), f"{point.tokens_per_second:,.0f}", ratio),
                *(f"{peak:.1f}", f"{expected:.1f}", *hours),
            ]
        )
    head = ["backbone", "cards", "tokens/s", "against one", "peak, GiB a card", "estimated, GiB"]
    return table([*head, "hours for the paper's 10 000 steps", "for a tenth of them"], rows)


def _expected(folder: Path, point: ScalingPoint) -> float:
    """Bytes of a card, as `--dry-run` estimates them."""
    document = json.loads((folder / Path(point.document).name).read_text())
    recipe = load_text(json.dumps(document["recipe"]), point.document)
    layout = next(layout for layout in LAYOUTS if layout.name == point.layout)
    dtype = resolve_dtype(recipe.model.dtype, torch.device("cuda"))
    return estimated(recipe, layout, dtype, point.cards).memory_bytes

"""Writes run directories in the documented form, so that report tests read runs that they made themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from widecli.evaluate.protocol import PAPER_TASKS
from widecli.ranks import Ranks
from widecli.recipe.dialect import dump_yaml, parse_yaml
from widecli.recipe.load import dump, recipe_hash, resolve
from widecli.recipe.retired import PATTERN_KEYS
from widecli.track.summary import completed
from widecli.train.speed import document_of

PLAN = {
    "attention_group_size": 3,
    "ffn_group_size": 64,
    "rank": 32,
    "mode": "wide",
    "parts": "all",
    "tap": "residual",
    "overrides": {},
}


AS_BEFORE = ("routing.grouping=contiguous", "compensation.mean=false", "compensation.rank=0")
"""What a recipe without these keys says."""


def write_run(folder: Path, command: str, name: str, recipe: str, values: dict[str, Any]) -> Path:
    """One finished run below `folder`."""
    path = folder / f"{command}-{name}"
    path.mkdir(parents=True)
    summary = completed(command, {**values, "run_dir": f"runs/{command}-{name}"})
    (path / "summary.json").write_text(json.dumps(summary))
    (path / "recipe.yaml").write_text(recipe)
    environment = {"date": "2026-01-02T03:04:05+00:00", "command_line": ["wide", command], "cpu": "a CPU", "gpus": []}
    (path / "environment.json").write_text(json.dumps(environment))
    return path


def backbone(model: str) -> dict[str, Any]:
    return {"id": model, "revision": None, "config_hash": "c" * 16, "weights_hash": f"{model}-weights"}


def settings(
    sparsity: float,
    group_size: int,
    mode: str,
    seed: int,
    changes: tuple[str, ...] = (),
    patterns: int | None = None,
    old: bool = False,
) -> dict[str, Any]:
    """The parts of a summary and the recipe that one configuration has; patterns as versions until 0.1 stored them.

    `old`: as stored before channels were regrouped and skipped groups compensated.
    """
    old = old or patterns is not None
    runs = "wide" if mode == "patterns" else mode
    keys = [f"routing.ffn_group_size={group_size}", f"routing.mode={runs}", f"budget.sparsity={sparsity}"]
    recipe = resolve(None, [*keys, f"train.seed={seed}", *(AS_BEFORE if old else ()), *changes]).recipe
    text = without_later_keys(dump(recipe)) if old else dump(recipe)
    plan = {**PLAN, "ffn_group_size": group_size, "mode": mode}
    if patterns:
        plan["patterns"] = {"count": patterns, "segments": 1, "parts": "ffn"}
    if recipe.routing.grouping == "clustered":
        plan["grouping"] = "clustered"
    if recipe.compensation.mean or recipe.compensation.rank:
        plan["compensation"] = {"mean": recipe.compensation.mean, "rank": recipe.compensation.rank}
    return {
        "recipe": text if mode == runs else with_pattern_keys(text.replace("mode: wide", f"mode: {mode}")),
        "hash": recipe_hash(recipe),
        "plan": plan,
        "steps": recipe.train.steps,
    }


def without_later_keys(recipe: str) -> str:
    """The text of a stored recipe as it was before there were grouping, compensation and a share of distillation."""
    tree = parse_yaml(recipe)
    for section, key in ((tree["routing"], "grouping"), (tree, "compensation"), (tree["train"], "distill")):
        section.pop(key, None)
    return dump_yaml(tree)


def with_pattern_keys(recipe: str) -> str:
    """The text of a stored recipe as versions until 0.1 wrote it."""
    lines = [f"  {key.removeprefix('routing.')}: {value}\n" for key, value in PATTERN_KEYS.items()]
    return recipe.replace("  layers:", f"{''.join(lines)}  layers:", 1)


def skipped(sparsity: float, old: bool = False) -> dict[str, Any]:
    """Rates and FLOPs; old records have the gross share alone, under the name of the net one."""
    prunable = {"prunable": 0.9 * sparsity} if old else {"prunable": 0.8 * sparsity, "prunable_gross": 0.9 * sparsity}
    return {
        "skip_rate": {"attention": sparsity + 0.1, "ffn": sparsity - 0.1, "mean": sparsity},
        "flops_skipped": {**prunable, "total": 0.7 * sparsity, "context_tokens": 2048},
    }


def write_calibration(
    folder: Path,
    name: str,
    *,
    sparsity: float = 0.5,
    group_size: int = 64,
    mode: str = "wide",
    seed: int = 0,
    model: str = "tiny",
    command: str = "calibrate",
    changes: tuple[str, ...] = (),
    patterns: int | None = None,
    began_with: str = "other",
    old: bool = False,
) -> Path:
    """`began_with`: the name of the calibration that a second stage started from; `old` as for `settings`."""
    made = settings(sparsity, group_size, mode, seed, changes, patterns, old)
    start = {"checkpoint": f"runs/calibrate-{began_with}/checkpoints/step-000300", "step": made["steps"]}
    second = {"adapter": {"rank": 16}, "objective": "lm", "routers": "trained", "origin": start}
    return write_run(
        folder,
        command,
        name,
        made["recipe"],
        {
            **(second if command == "lora" else {}),
            "model": model,
            "backbone": backbone(model),
            "plan": made["plan"],
            **skipped(sparsity, old),
            "steps": made["steps"],
            "tokens_per_second": 1000.0,
            "checkpoint": f"runs/{command}-{name}/checkpoints/step-000300",
            "recipe_hash": made["hash"],
            "validation": None,
        },
    )


def protocol(limit: int | None, tasks: bool, text: str = "wikitext2") -> dict[str, Any]:
    return {
        "tasks": list(PAPER_TASKS) if tasks else [],
        "limit": limit,
        "max_length": 2048,
        "perplexity": [text],
        "perplexity_windows": None,
        "perplexity_window": 2048,
        "data": "hub",
        "lm_eval": "0.4.13",
        "transformers": "5",
        "scoring": 1,
    }


def measured(perplexity: float, accuracy: float | None, text: str = "wikitext2") -> dict[str, Any]:
    tasks = {} if accuracy is None else {task: {"acc,none": accuracy, "n": 400.0} for task in PAPER_TASKS}
    return {
        "perplexity": {f"{text.partition(':')[0]}/token_ppl": perplexity},
        "tasks": tasks,
        "average": accuracy,
        "average_of": list(tasks),
        "partial_average": accuracy,
    }


def write_evaluation(
    folder: Path,
    name: str,
    *,
    of: str | None = None,
    perplexity: float = 30.0,
    accuracy: float | None = 0.4,
    dense: tuple[float, float] | None = (20.0, 0.5),
    limit: int | None = None,
    sparsity: float = 0.5,
    group_size: int = 64,
    mode: str = "wide",
    seed: int = 0,
    model: str = "tiny",
    command: str = "calibrate",
    changes: tuple[str, ...] = (),
    patterns: int | None = None,
    old: bool = False,
    text: str = "wikitext2",
    skips: float | None = None,
) -> Path:
    """An evaluation of the checkpoint of `<command>-<of>`, or of the dense model when `of` is None.

    `text` is what the protocol says, `held-out:<hash>` for a file; `skips` what was skipped, if not the sparsity.
    """
    made = settings(sparsity, group_size, mode, seed, changes, patterns, old)
    routed = of is not None
    beside = None
    if routed and dense is not None:
        beside = measured(dense[0], dense[1] if accuracy is not None else None, text)
    retention = accuracy / dense[1] if dense and accuracy is not None and routed else (None if routed else 1.0)
    rates = skipped(sparsity if skips is None else skips, old)
    return write_run(
        folder,
        "eval",
        name,
        made["recipe"],
        {
            "model": model,
            "backbone": backbone(model),
            "plan": made["plan"] if routed else None,
            **(rates if routed else {"skip_rate": None, "flops_skipped": None}),
            "steps": made["steps"] if routed else None,
            "tokens_per_second": None,
            "checkpoint": f"runs/{command}-{of}/checkpoints/step-000300" if routed else None,
            "recipe_hash": made["hash"] if routed else None,
            **measured(perplexity, accuracy, text),
            "retention": retention,
            "dense": beside,
            "skip_by_text": {text: skipped(sparsity + 0.02, old), "tasks": rates} if routed else None,
            "protocol": protocol(limit, accuracy is not None, text),
        },
    )


def write_pair(folder: Path, name: str, *, perplexity: float, accuracy: float | None = 0.4, **options: Any) -> None:
    """A calibration and its evaluation."""
    shared = {
        k: options[k]
        for k in ("sparsity", "group_size", "mode", "seed", "model", "changes", "patterns", "old")
        if k in options
    }
    write_calibration(folder, name, **shared)
    write_evaluation(folder, name, of=name, perplexity=perplexity, accuracy=accuracy, **options)


def write_profile(
    folder: Path, name: str, *, of: str | None, points: list[dict[str, Any]], model: str = "tiny"
) -> Path:
    """A profile run as `wide profile` documents it."""
    values = {
        "model": model,
        "backbone": backbone(model) if of else None,
        "plan": None,
        "checkpoint": f"runs/calibrate-{of}/checkpoints/step-000300" if of else None,
        "points": points,
    }
    return write_run(folder, "profile", name, dump(resolve(None).recipe), values)


def speed_point(
    phase: str,
    speedup: float,
    *,
    batch: int = 1,
    prompt: int = 1024,
    masks: str = "learned",
    sparsity: float = 0.5,
    group_size: int = 64,
) -> dict[str, Any]:
    def times(p50: float) -> dict[str, Any]:
        return {"p50_ms": p50, "p90_ms": 1.1 * p50, "p99_ms": 1.2 * p50, "min_ms": 0.9 * p50, "n": 50}

    return {
        "phase": phase,
        "batch": batch,
        "prompt": prompt,
        "gen": 128,
        "sparsity": sparsity,
        "group_size": group_size,
        "masks": masks,
        "dense": times(10.0 * speedup),
        "routed": times(10.0),
        "speedup": speedup,
        "run": None,
    }


def layout_result(
    layout: str, cards: int, speed: float, *, peak: float | None = 40.0, estimated: float = 44.0
) -> dict[str, Any]:
    """What `widecli.train.scaling.measure` says of a layout; memory in GiB."""
    return {
        "layout": layout,
        "ranks": cards,
        "micro_batch_size": 1,
        "tokens_per_second": speed,
        "peak_memory_bytes": None if peak is None else peak * 2**30,
        "estimated_memory_bytes": estimated * 2**30,
        "first_loss": 12.0,
    }


def write_training_speed(
    path: Path, cards: int, results: list[dict[str, Any]], *, batch: int = 8, changes: tuple[str, ...] = ()
) -> Path:
    """A document of `python -m widecli.train.speed --random` on so many cards, for Llama-3.1-8B."""
    keys = ["model.name=meta-llama/Llama-3.1-8B", "data.sequence_length=4096", f"train.batch_size={batch}"]
    recipe = resolve(None, [*keys, *changes]).recipe
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document_of(recipe, 4, results, Ranks(size=cards)), indent=2))
    return path

"""Runs -> one DataFrame: a row for each run that trained or measured something, columns of one kind of figure each.

Columns that say what a row is: `run`, `path`, `command`, `origin` (the run that made the checkpoint; a dense model's
rows share one), `model`, `stage` (dense, calibrate, lora, ...), `mode`, `budget`, `sparsity`, `group_size`, `steps`,
`seed`, `configuration` (equal exactly when two runs differ in nothing but the seed), `began_with` (the configuration
that a second stage started from), `items` (documents a task).

Columns with figures have names that say under which protocol they hold: `skip attention`, `flops net`,
`perplexity wikitext2`, `flops net at wikitext2`, `average [400]`, `retention [all]`, `task piqa [all]`,
`ttft b1 p1024`. Fractions are in [0, 1]; figures with different names are never compared.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from widecli.recipe.files import as_stored
from widecli.recipe.retired import PATTERN_KEYS
from widecli.recipe.schema import NO_COMPENSATION, Recipe
from widecli.report.find import StoredRun
from widecli.report.flops import gross_and_net
from widecli.report.lineage import began_with, converted, producer_of, producers
from widecli.storage import printable

if TYPE_CHECKING:
    import pandas as pd

DENSE = "dense"
FIGURES = ("skip ", "flops ", "perplexity ", "average ", "retention ", "task ", "ttft ", "tpot ", "validation ")
"""How the name of a column with figures begins."""

IDENTITY = (
    *("run", "path", "command", "origin", "model", "stage", "mode", "budget", "sparsity", "group_size", "steps"),
    *("seed", "configuration", "began_with", "items", "fullness"),
)

# What tells two configurations apart is everything in the recipe but these: the seed, how it is measured and recorded,
# and what changes speed or memory alone.
_NOT_CONFIGURATION = frozenset(
    {"train.seed", "train.save_every", "train.compile", "train.activation_checkpointing", "train.micro_batch_size"}
    | {"data.validation"}
)
_NOT_CONFIGURATION_SECTIONS = ("model", "eval", "track", "distributed", "sweep")
FLOPS = ("net", "gross")
"""The prunable FLOPs skipped, less what routers and compensation cost, and without that: older records have no net."""
# lm-eval results do not depend on these beyond noise, but a reader wants to know that they differ.
_WORTH_A_NOTE = ("data", "lm_eval", "transformers", "max_length", "scoring")
_USUAL_WINDOW = 2048
_WINDOWS = re.compile(r"@\d+$")
_HASHED = re.compile(r":([0-9a-f]{16})(?:@\d+)?$")  # a text file in a protocol


@dataclass(frozen=True)
class Results:
    """The frame, and what a reader of it must know."""

    frame: pd.DataFrame
    notes: tuple[str, ...]


def load(runs: Sequence[StoredRun]) -> Results:
    """All figures of `runs` as one frame, one row a run (and one for each dense model measured beside a checkpoint)."""
    import pandas as pd

    made = producers(runs)
    names = _model_names(runs)
    alike = _called_alike(runs)
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for run in runs:
        model = names.get(_model_key(run.summary), str(run.summary.get("model") or "unknown model"))
        if run in made:
            rows.append(_identity(run, run, model) | _skipped(run.summary) | _validation(run.summary))
        elif run.command == "eval":
            producer = producer_of(run, made)
            if producer is None and run.summary.get("checkpoint"):
                notes.append(f"{run.label}: the run behind its checkpoint is not here; its own recipe describes it")
            rows.append(_identity(run, producer, model) | _skipped(run.summary) | _quality(run.summary, alike))
            if isinstance(dense := run.summary.get("dense"), dict):
                rows.append(_dense_beside(run, dense, model, alike))
        elif run.command == "profile":
            rows.append(_identity(run, producer_of(run, made), model) | speedups(run.summary))
    began = {run.label: configuration for run in made if (configuration := _beginning(run, made))}
    for row in rows:
        row["began_with"] = began.get(str(row.get("producer")))
    columns = [*IDENTITY, *sorted({key for row in rows for key in row} - set(IDENTITY) - {"producer"})]
    frame = pd.DataFrame(rows, columns=columns)
    _fill_retention(frame)
    notes += _protocol_notes(runs)
    return Results(frame, tuple(notes))


def figure_columns(frame: pd.DataFrame) -> list[str]:
    """The columns that hold figures."""
    return [str(column) for column in frame.columns if str(column).startswith(FIGURES)]


_ABSENT = object()
_PATTERN_SIZES = ("routing.pattern_count", "routing.pattern_segments", "routing.pattern_parts")


def _identity(run: StoredRun, producer: StoredRun | None, model: str) -> dict[str, Any]:
    """What a row is. The producer's recipe describes it; a stored evaluation may have had another one."""
    summary, recipe = run.summary, (producer or run).recipe
    plan = summary.get("plan") or (producer.summary.get("plan") if producer else None) or {}
    row: dict[str, Any] = {"run": run.label, "path": printable(str(run.path)), "command": run.command, "model": model}
    row |= _protocol(summary)
    if not plan and run.command == "profile":  # of a bare shape
        return row | {"origin": run.label, "stage": run.command, "mode": "shape", "configuration": run.label}
    if not plan:
        return row | {"origin": f"{DENSE} {model}", "stage": DENSE, "mode": DENSE, "configuration": DENSE}
    mode = str(plan.get("mode", "wide"))
    steps = _steps(summary, producer)
    if producer is None and not _describes(recipe, plan, steps):
        recipe = {}
    if recipe:
        recipe = as_stored(dict(recipe))  # a key that came later did not say what its default says now
    budget = _section(recipe, "budget")
    group_size = number(plan.get("ffn_group_size")) if mode not in ("token", "layer") else None
    settings = {
        key: value
        for key, value in {**(_defaults() if recipe else {}), **flat(recipe)}.items()
        if key not in _NOT_CONFIGURATION and key.split(".")[0] not in _NOT_CONFIGURATION_SECTIONS
        if PATTERN_KEYS.get(key, _ABSENT) != value  # later recipes do without them
    }
    stage = producer.command if producer else "patterns" if converted(run) else "calibrate"
    if plan.get("patterns"):  # the plan says how many there are
        settings = {key: value for key, value in settings.items() if key not in _PATTERN_SIZES}
    if stage == "patterns":  # its recipe is that of a second stage
        settings = {key: value for key, value in settings.items() if not key.startswith("routing.pattern_")}
    if not plan.get("compensation"):  # then nothing learns at that rate
        settings.pop("compensation.learning_rate", None)
    settings |= {f"plan.{key}": value for key, value in flat(plan).items()} | {"steps": steps, "stage": stage}
    if not recipe:  # nothing says that two such runs are of one kind
        settings["run"] = summary.get("checkpoint") or run.label
    origin = producer.label if producer else str(summary.get("checkpoint") or run.label)
    return row | {
        "producer": producer.label if producer else None,
        "origin": f"{origin} at step {steps:.0f}" if steps is not None else origin,
        "stage": stage,
        "mode": mode,
        "budget": budget.get("kind"),
        "sparsity": _sparsity(budget),
        "group_size": group_size,
        "steps": steps,
        "seed": number(_section(recipe, "train").get("seed")),
        "configuration": json.dumps(settings, sort_keys=True, default=str),
    }


@cache
def _defaults() -> Mapping[str, Any]:
    """What a key says that a recipe lacks, because it was stored before the key existed."""
    return flat(Recipe().model_dump(mode="json"))


def _beginning(run: StoredRun, made: Sequence[StoredRun]) -> str | None:
    """The configuration of the checkpoint that a second stage began with."""
    found = began_with(run, made)
    if found is None:
        return None
    producer, there = found
    return str(_identity(there, producer, "")["configuration"])


def _steps(summary: Mapping[str, Any], producer: StoredRun | None) -> float | None:
    """The checkpoint's steps: as recorded, by its folder's name, or all of its training's."""
    if (recorded := number(summary.get("steps"))) is not None:
        return recorded
    name = PurePath(str(summary.get("checkpoint"))).name.removeprefix("step-")
    return float(name) if name.isdecimal() else number(producer.summary.get("steps") if producer else None)


def _describes(recipe: Mapping[str, Any], plan: Mapping[str, Any], steps: float | None) -> bool:
    """Whether an evaluation's recipe can be its checkpoint's: the same routing, compensation and steps."""
    stored = as_stored(dict(recipe))
    routing, train, asked = (_section(stored, name) for name in ("routing", "train", "compensation"))
    same = all(routing.get(key) == plan.get(key) for key in ("mode", "ffn_group_size", "rank", "parts"))
    same = same and routing.get("grouping") == plan.get("grouping", "contiguous")
    held = plan.get("compensation") or NO_COMPENSATION
    same = same and all(asked.get(key) == held.get(key) for key in NO_COMPENSATION)
    return same and number(train.get("steps")) == steps


def _sparsity(budget: Mapping[str, Any]) -> float | None:
    if budget.get("kind") != "parts":
        return number(budget.get("sparsity"))
    targets = [t for part in ("attention", "ffn") if (t := number(budget.get(part))) is not None]
    return sum(targets) / len(targets) if targets else None


def _protocol(summary: Mapping[str, Any]) -> dict[str, Any]:
    """`items`: what stands in brackets behind task figures; `fullness` orders evaluations of one checkpoint."""
    protocol, tasks = summary.get("protocol") or {}, summary.get("tasks") or {}
    if not tasks:
        return {"items": None, "fullness": -1.0}
    limit = number(protocol.get("limit"))
    items = "all" if limit is None else f"{limit:.0f}"
    named = summary.get("average_of") or []
    if summary.get("average") is None:
        items = f"{'+'.join(map(str, named)) or 'no average'}, {items}"
    return {"items": items, "fullness": len(tasks) + (1.0 if limit is None else 1 - 1 / (1 + limit))}


def _skipped(summary: Mapping[str, Any]) -> dict[str, Any]:
    rate, flops = summary.get("skip_rate") or {}, summary.get("flops_skipped") or {}
    figures = {f"skip {part}": number(rate.get(part)) for part in ("attention", "ffn", "mean")}
    return figures | _flops(flops) | {"flops total": number(flops.get("total"))}


def _validation(summary: Mapping[str, Any]) -> dict[str, Any]:
    validation = summary.get("validation")
    if not isinstance(validation, dict):
        return {}
    text = validation.get("text") or "text"
    return {f"validation {text}": number(validation.get("final"))}


def _quality(summary: Mapping[str, Any], alike: frozenset[str]) -> dict[str, Any]:
    """Perplexities, tasks, and the FLOPs skipped while each was measured."""
    items = _protocol(summary)["items"]
    by_text = dict(summary.get("skip_by_text") or {})
    found: dict[str, Any] = {}
    at_tasks = by_text.pop("tasks", None)
    texts = summary.get("perplexity") or {}
    # recorded in the order of the perplexities, under the recipe's name for the text
    at_text = [*by_text.values(), *([None] * len(texts))]
    for (key, value), rates in zip(texts.items(), at_text, strict=False):
        name = _text_name(key, summary, alike)
        found[f"perplexity {name}"] = number(value)
        found |= _flops_behind(rates, summary, name)
    if items is None:
        return found
    average = summary.get("average")
    found[f"average [{items}]"] = number(summary.get("partial_average") if average is None else average)
    found[f"retention [{items}]"] = number(summary.get("retention"))
    found |= _flops_behind(at_tasks, summary, f"tasks [{items}]")
    for task, metrics in (summary.get("tasks") or {}).items():
        if isinstance(metrics, dict):
            found[f"task {task} [{items}]"] = number(metrics.get("acc_norm,none", metrics.get("acc,none")))
    return found


def _flops_behind(rates: object, summary: Mapping[str, Any], what: str) -> dict[str, float | None]:
    """What was skipped while something was measured: `flops net at wikitext2` and `flops gross at wikitext2`."""
    if not summary.get("plan"):
        return {f"flops {kind} at {what}": 0.0 for kind in FLOPS}
    flops = rates.get("flops_skipped") if isinstance(rates, dict) else None
    return _flops(flops if isinstance(flops, dict) else summary.get("flops_skipped") or {}, f" at {what}")


def _flops(flops: Mapping[str, Any], where: str = "") -> dict[str, float | None]:
    gross, net = gross_and_net(flops)
    return {f"flops net{where}": net, f"flops gross{where}": gross}


def _called_alike(runs: Iterable[StoredRun]) -> frozenset[str]:
    """The names of perplexities under which evaluations measured files of different contents."""
    contents: dict[str, set[str]] = {}
    for run in runs:
        for key in run.summary.get("perplexity") or {}:
            name = perplexity_name(key, run.summary.get("protocol") or {})
            contents.setdefault(name, set()).add(_content(key, run.summary))
    return frozenset(name for name, found in contents.items() if len(found) > 1)


def _text_name(key: str, summary: Mapping[str, Any], alike: frozenset[str]) -> str:
    """`perplexity_name`, with what tells the text from others of that name."""
    name = perplexity_name(key, summary.get("protocol") or {})
    return f"{name} #{_content(key, summary)}" if name in alike else name


def _content(key: str, summary: Mapping[str, Any]) -> str:
    """The beginning of the hash of a text file that was measured, as the protocol records it; nothing for others."""
    texts, keys = (summary.get("protocol") or {}).get("perplexity"), list(summary.get("perplexity") or {})
    if not isinstance(texts, list) or len(texts) != len(keys):
        return ""
    found = _HASHED.search(str(texts[keys.index(key)]))
    return found[1][:6] if found else ""


def perplexity_name(key: str, protocol: Mapping[str, Any]) -> str:
    """`wikitext2/token_ppl` -> `wikitext2`, with what is unusual about how the text was cut."""
    text, _, metric = key.rpartition("/")
    name = text if text and metric == "token_ppl" else key
    window, windows = number(protocol.get("perplexity_window")), number(protocol.get("perplexity_windows"))
    if windows is not None and not _WINDOWS.search(name):
        name += f"@{windows:.0f}"
    return name if window in (None, _USUAL_WINDOW) else f"{name} (window {window:.0f})"


def speedups(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Speed-ups of a checkpoint's own decisions in one profile run: `ttft b1 p1024`, `tpot b1 p1024 g128`.

    Points with random masks describe no checkpoint; they stand in the throughput table alone.
    """
    found = {}
    for point in summary.get("points") or []:
        phase, speedup = str(point.get("phase", "")).lower(), number(point.get("speedup"))
        if phase not in ("ttft", "tpot") or speedup is None or point.get("masks", "learned") != "learned":
            continue
        sizes = [f"b{point.get('batch')}", f"p{point.get('prompt')}"]
        if phase == "tpot":
            sizes.append(f"g{point.get('gen')}")
        found[f"{phase} {' '.join(sizes)}"] = speedup
    return found


def _dense_beside(run: StoredRun, dense: Mapping[str, Any], model: str, alike: frozenset[str]) -> dict[str, Any]:
    """The dense model as an evaluation measured it beside its checkpoint."""
    alone = {**dense, "plan": None, "protocol": run.summary.get("protocol"), "retention": 1.0, "skip_by_text": None}
    row = {"run": run.label, "path": printable(str(run.path)), "command": "eval", "model": model}
    row |= {"origin": f"{DENSE} {model}", "stage": DENSE, "mode": DENSE, "configuration": DENSE}
    protocol = _protocol(alone)
    protocol["fullness"] -= 0.5  # a dense run of its own goes first
    return row | protocol | _quality(alone, alike)


def _fill_retention(frame: pd.DataFrame) -> None:
    """Evaluations without their dense model: the ratio to the dense model as another run measured it, same protocol."""
    for column in [c for c in frame.columns if c.startswith("average ")]:
        kept = column.replace("average", "retention", 1)
        for model, rows in frame.groupby("model"):
            dense = rows.loc[rows["stage"] == DENSE, column].dropna()
            missing = (frame["model"] == model) & frame[kept].isna() & frame[column].notna()
            if len(dense) and missing.any():
                frame.loc[missing, kept] = frame.loc[missing, column] / dense.iloc[0]


def _model_key(summary: Mapping[str, Any]) -> tuple[str, ...]:
    """Same weights = same model, whatever its folder is called; without hashes, its name."""
    backbone = summary.get("backbone") or {}
    if backbone.get("weights_hash"):
        return (str(backbone.get("config_hash")), str(backbone["weights_hash"]))
    return (str(summary.get("model") or "unknown model"),)


def _model_names(runs: Iterable[StoredRun]) -> dict[tuple[str, ...], str]:
    """A name for each model; two models of one name get their weights' hash behind it."""
    names: dict[tuple[str, ...], str] = {}
    for run in runs:
        name = str(run.summary.get("model") or "unknown model").rstrip("/")
        names.setdefault(_model_key(run.summary), name.rsplit("/", 1)[-1] if name.startswith(("/", ".")) else name)
    # one known by name only (a profile of a bare shape) belongs to the model of that name
    counts = Counter(name for key, name in names.items() if len(key) > 1)
    for key, name in names.items():
        if counts[name] > 1 and len(key) > 1:
            names[key] = f"{name} ({key[1][:8]})"
    return names


def _protocol_notes(runs: Iterable[StoredRun]) -> list[str]:
    values: dict[str, dict[str, str]] = {}
    for run in runs:
        protocol = run.summary.get("protocol") or {}
        for key in _WORTH_A_NOTE:
            if run.command == "eval" and key in protocol:
                values.setdefault(key, {}).setdefault(str(protocol[key]), run.label)
    return [
        f"evaluations differ in {key}: " + ", ".join(f"{value} ({label})" for value, label in seen.items())
        for key, seen in values.items()
        if len(seen) > 1
    ]


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _section(recipe: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = recipe.get(name)
    return section if isinstance(section, dict) else {}


def number(value: object) -> float | None:
    """A finite number, or None for anything else a summary may hold there."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)

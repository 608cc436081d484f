"""The model card of an export: what it is, how to use it, and what the runs behind it measured. Each figure names its
run; what was not measured is not there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from widecli.cli.cost_card import compensation_words
from widecli.report.flops import gross_and_net

if TYPE_CHECKING:
    from widecli.model.checkpoint import CheckpointConfig
    from widecli.model.export import MergeCheck

USAGE = (
    "from transformers import AutoModelForCausalLM as Model, AutoTokenizer as Tokenizer",
    'model, tokenizer = (kind.from_pretrained("FOLDER", trust_remote_code=True) for kind in (Model, Tokenizer))',
    'print(tokenizer.decode(model.generate(**tokenizer("The river", return_tensors="pt"), max_new_tokens=20)[0]))',
)


def card(source: Path, config: CheckpointConfig, *, merged: bool, check: MergeCheck | None = None) -> str:
    """Markdown with the Hub's front matter, for an export of the checkpoint `source`."""
    base = config.backbone.id
    lines = ["---", front_matter(source, base), "---", ""]
    lines += [f"# {base}, routed" + (", with a LoRA adapter" if config.adapter else ""), ""]
    lines += [
        "Every token chooses, layer by layer, which attention-head groups and FFN-channel groups to run (token-level "
        "dynamic width pruning, arXiv 2607.28418).",
        "",
        *_contents(config, merged),
        "",
        *_facts(config),
        "",
        *_measured(source, config),
    ]
    if check is not None:
        lines += ["", "## Merged beside unmerged", "", _compared(check)]
    return "\n".join(lines) + "\n"


def front_matter(source: Path, base: str) -> str:
    """What the Hub reads of a card, as YAML: tags, the base model, and the newest figure of each evaluation."""
    import yaml

    facts: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["wide", "dynamic-width-pruning"],
    }
    if not Path(base).exists() and "/" in base:
        facts["base_model"] = base
    if results := _index(source):
        facts["model-index"] = [{"name": f"{Path(base).name}-wide", "results": results}]
    return yaml.safe_dump(facts, sort_keys=False, width=1000).rstrip()


def _index(source: Path) -> list[dict[str, Any]]:
    """The evaluations' figures in the Hub's `model-index` format; shares lie between 0 and 1."""
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for run, summary in _evaluations(source):
        measured = {*summary["tasks"], *(name.partition("/")[0] for name in summary["perplexity"])}
        for row in _rows(summary):
            if row["name"] not in measured:
                continue  # an average over several
            kind = "perplexity" if "ppl" in row["metric"] else row["metric"]
            metric = {"type": kind, "value": row["value"], "name": f"{row['metric']}, routed, run {run}"}
            if row["higher_is_better"] and (limit := summary["protocol"].get("limit")):
                metric["args"] = {"limit": limit}
            newest[row["name"], row["metric"]] = {
                "task": {"type": "text-generation"},
                "dataset": {"name": row["name"], "type": row["name"]},
                "metrics": [metric],
            }
    return list(newest.values())


def _contents(config: CheckpointConfig, merged: bool) -> Iterator[str]:
    routing = _routing_parts(config)
    if not merged:
        adapter = ["a plain PEFT adapter (`adapter/`)"] if config.adapter else []
        yield f"Here are {_listed([*routing, *adapter])}."
        yield f"They need their base model, {config.backbone.id}: `wide eval FOLDER` loads it from there."
        yield "transformers alone cannot load them; `wide export --merge` writes a whole model that it can."
        if config.adapter and config.plan.grouping == "clustered":
            yield "The adapter's channels are in the base model's own order: PEFT loads it onto that model as it is."
        return
    merged_in = " with the adapter merged into its weights" if config.adapter else ""
    yield f"Here are a whole model{merged_in} and its routing: {_listed(routing)}. `wide eval FOLDER` measures both."
    yield ""
    if config.plan.grouping == "clustered":
        yield (
            "The model's FFN channels are regrouped: rows of gate and up and columns of down stand in another order "
            "than in the base model, which changes nothing of what it computes but the order of sums."
        )
        yield ""
    yield "transformers alone loads and routes it, by the code in `modeling_wide.py`:"
    yield ""
    yield "```python"
    yield from USAGE
    yield "```"
    yield ""
    yield (
        "Without `trust_remote_code=True` it refuses, rather than run the model dense. So does lm-eval: "
        "`lm_eval --model hf --model_args pretrained=FOLDER,trust_remote_code=True --tasks piqa`."
    )
    yield (
        "It computes what is skipped, too, and masks it: figures are those of routing, times are not. "
        "`wide generate FOLDER` and `wide profile FOLDER` skip in earnest."
    )


def _routing_parts(config: CheckpointConfig) -> list[str]:
    """What decides and what stands in, with the files that hold it."""
    plan = config.plan
    parts = ["the routers (`router.safetensors`)"]
    if plan.compensation:
        parts.append("what skipped groups leave (`compensation.safetensors`)")
    if plan.grouping == "clustered":
        parts.append("the order of FFN channels (`channels.safetensors`)")
    return parts


def _listed(parts: list[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last


def _facts(config: CheckpointConfig) -> Iterator[str]:
    plan = config.plan
    yield "| | |"
    yield "|---|---|"
    yield f"| base model | {config.backbone.id}" + (
        f" @ {config.backbone.revision} |" if config.backbone.revision else " |"
    )
    yield f"| mode | {plan.mode}, parts {plan.parts}, tap {plan.tap} |"
    yield f"| group sizes | {plan.attention_group_size} query heads, {plan.ffn_group_size} FFN channels |"
    yield f"| router rank | {plan.rank} |"
    if plan.grouping == "clustered":
        yield "| FFN channels | regrouped: those that tokens need together share a group |"
    if left := compensation_words(plan.to_json()):
        yield f"| a skipped group leaves | {left} |"
    if config.adapter:
        yield f"| adapter | LoRA, rank {config.adapter['rank']}, alpha {config.adapter['alpha']} |"
    yield f"| steps | {config.step} |"


def _measured(source: Path, config: CheckpointConfig) -> Iterator[str]:
    yield "## Measured"
    yield ""
    training = [found for found in (_training(source, config.step), _first_stage(config)) if found]
    evaluations = list(_evaluations(source))
    if not training and not evaluations:
        yield "The runs of this checkpoint were not at hand when the card was written."
        return
    yield "| what | dense | routed | attention / FFN skipped | prunable FLOPs skipped, gross | net | run |"
    yield "|---|---:|---:|---:|---:|---:|---|"
    for run, summary in evaluations:
        yield from _evaluation_rows(run, summary)
    for run, summary in training:
        validation = summary.get("validation")
        if validation and validation.get("final") is not None:
            dense = "" if validation["dense"] is None else f"{validation['dense']:.2f}"
            what = f"token perplexity, {Path(validation['text']).name}, after {summary['command']}"
            yield f"| {what} | {dense} | {validation['final']:.2f} | {_skipped(summary)} | `{run}` |"
    yield ""
    yield "Net: less what routers and compensation cost."


def _evaluation_rows(run: str, summary: dict[str, Any]) -> Iterator[str]:
    limit = summary["protocol"].get("limit")
    for row in _rows(summary):
        percent = row["higher_is_better"]
        figures = ["" if v is None else (f"{v:.1%}" if percent else f"{v:.2f}") for v in (row["dense"], row["value"])]
        what = f"{row['name']}, {row['metric']}" + (f", {limit} items a task" if percent and limit else "")
        yield f"| {what} | {figures[0]} | {figures[1]} | {_skipped(summary)} | `{run}` |"


def _rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    from widecli.evaluate.results import rows

    dense = summary.get("dense") or {}
    return rows(
        summary["tasks"],
        summary["perplexity"],
        dense_tasks=dense.get("tasks"),
        dense_perplexity=dense.get("perplexity"),
    )


def _skipped(summary: dict[str, Any]) -> str:
    rate = summary["skip_rate"]
    parts = " / ".join("" if rate[p] is None else f"{rate[p]:.1%}" for p in ("attention", "ffn"))
    gross, net = gross_and_net(summary["flops_skipped"])
    return f"{parts} | {gross:.1%} | {'' if net is None else f'{net:.1%}'}"


def _compared(check: MergeCheck) -> str:
    from widecli.cli.export import describe

    return f"{describe(check).capitalize()}."


def _training(source: Path, step: int) -> tuple[str, dict[str, Any]] | None:
    """The run that a checkpoint lies in, if it ended with that checkpoint."""
    run = source.parent.parent
    summary = _summary(run)
    return (run.name, summary) if summary and summary.get("steps") == step else None


def _first_stage(config: CheckpointConfig) -> tuple[str, dict[str, Any]] | None:
    origin = config.origin
    return _training(Path(origin["checkpoint"]), origin["step"]) if origin else None


def _evaluations(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Evaluations of this checkpoint among the runs beside its own and below runs/, oldest first."""
    wanted = source.resolve().parts[-3:]  # run, checkpoints, step: whatever folder the evaluation was started in
    folders = {path.resolve() for path in (source.resolve().parent.parent.parent, Path("runs")) if path.is_dir()}
    runs = [run for folder in folders for run in folder.glob("*/") if os.access(run / "summary.json", os.R_OK)]
    for run in sorted(runs, key=lambda path: (path / "summary.json").stat().st_mtime):
        summary = _summary(run)
        if not summary or summary.get("command") != "eval" or not summary.get("checkpoint"):
            continue
        if Path(summary["checkpoint"]).resolve().parts[-3:] == wanted:
            yield run.name, summary


def _summary(run: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("schema") == "wide.summary/1" else None

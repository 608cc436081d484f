"""`wide demo`: the whole way once, on this machine, with a verdict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from widecli.cli import options
from widecli.cli.console import emit_json, note, stdout_for_document, warn
from widecli.errors import WideError

if TYPE_CHECKING:
    from widecli.recipe.load import ResolvedRecipe

WORST_RATIO_TO_DENSE = 2.5
WORST_RATIO_TO_RANDOM = 0.5
MOST_UNDERSHOOT = 0.05
_WHAT: Mapping[str, str] = defaultdict(lambda: "of the groups", flops="of the prunable FLOPs (net)")

Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the demo recipe.", show_default=False),
]


def demo(
    arguments: Arguments = None,
    data_root: options.DataRoot = None,
    limit: Annotated[int, typer.Option("--limit", help="Documents a task, where their data is reachable.")] = 4,
    overwrite: options.Overwrite = False,
    offline: options.Offline = False,
    json: options.Json = False,
) -> None:
    """Calibrate the embedded SmolLM2-135M, evaluate it beside the dense model, and judge the result.

    Fails unless the routed perplexity is below 2.5 times the dense one and below half of what random routers reach at
    the same sparsity, with at least the promised share skipped (less five points).
    """
    offline = options.go_offline(offline)
    with stdout_for_document(json):
        document = run_demo(arguments, data_root=data_root, limit=limit, overwrite=overwrite, offline=offline)
        if json:
            emit_json(document)


def run_demo(
    arguments: list[str] | None, *, data_root: str | None, limit: int, overwrite: bool, offline: bool
) -> dict[str, Any]:
    """Calibrate, evaluate, judge; returns both summaries and the verdict. Raises WideError when the verdict is bad."""
    from widecli.cli.calibrate import run_calibration
    from widecli.cli.eval import prepare, run_evaluation

    # the evaluation below measures the same text, beside the dense model
    resolved = options.recipe_from([*(arguments or []), "data.validation=null"], base="demo")
    calibration = run_calibration(resolved, resume=not overwrite, overwrite=overwrite, offline=offline)
    random = random_start(resolved, calibration["run_dir"], offline)
    tasks = reachable_tasks(data_root, offline)
    flags = {"tasks": tasks, "limit": limit if tasks else None, "data_root": data_root}
    job, evaluated = prepare([calibration["checkpoint"]], flags, offline=offline)
    evaluation = run_evaluation(job, evaluated, overwrite=True)
    verdict = judge(evaluation, calibration, random)
    note("")
    ratio, skipped, of = verdict["ratio_to_dense"], verdict["skipped"], _WHAT[verdict["counted"]]
    note(f"dense perplexity {verdict['dense']:.2f}")
    note(f"routed perplexity {verdict['routed']:.2f}, {ratio:.2f} times dense, with {skipped:.1%} {of} skipped")
    note(f"random routers for comparison {random['perplexity']:.2f}, with {random['skipped']:.1%} {of} skipped")
    if not tasks:
        note("the seven tasks were left out: their data is neither in --data-root nor on a reachable Hub")
    note(f"everything lies in {calibration['run_dir']} and {evaluation['run_dir']}")
    if not verdict["good"]:
        raise WideError(f"the demo's result is not good enough: {'; '.join(verdict['failures'])}")
    return {"schema": "wide.demo/1", "calibrate": calibration, "eval": evaluation, "verdict": verdict}


def reachable_tasks(data_root: str | None, offline: bool) -> str | None:
    """`paper` when the seven tasks' data can be had, else None."""
    from widecli.evaluate.tasks import check_tasks
    from widecli.profiling.checkup import hub_is_reachable

    if data_root is None and not offline and not hub_is_reachable():
        return None
    try:
        check_tasks(("paper",), data_root=data_root, offline=offline or data_root is not None)
    except WideError as error:
        if data_root is not None:
            warn(str(error))
        return None
    return "paper"


def random_start(resolved: ResolvedRecipe, run_dir: str, offline: bool) -> dict[str, float]:
    """Held-out perplexity of random routers, shifted to skip what the budget asks for: what no training would give."""
    from widecli.evaluate.perplexity import measure_perplexity
    from widecli.model.thresholds import meet_budget
    from widecli.track.run import Run
    from widecli.train.calibrate import prepare, warm_start_batches

    recipe = resolved.recipe
    note("for comparison: random routers, shifted to the same budget")
    job = prepare(recipe, resolved.hash8, Run.open(run_dir), lambda _: None, offline)
    batches = warm_start_batches(job)
    meet_budget(job.routed, batches[:1], job.budget, passes=2)
    with job.routed.tracing() as trace:
        result = measure_perplexity(
            job.backbone.model,
            job.backbone.tokenizer,
            recipe.eval.perplexity[0],
            window=recipe.eval.perplexity_window,
            max_windows=recipe.eval.perplexity_windows,
            offline=offline,
        )
    job.routed.detach()
    seen = trace.summary(recipe.eval.max_length)  # as the evaluation counts
    return {"perplexity": float(result.value), "skipped": _skipped(seen, recipe.budget.kind)}


def _skipped(seen: dict[str, Any], kind: str) -> float:
    """What was skipped, counted as a budget of that kind counts."""
    return float(seen["flops_skipped"]["prunable"] if kind == "flops" else seen["skip_rate"]["mean"])


def judge(evaluation: dict[str, Any], calibration: dict[str, Any], random: dict[str, float]) -> dict[str, Any]:
    """Compare the routed perplexity with the dense one and random routers', and what was skipped with its target."""
    key = next(iter(evaluation["perplexity"]))
    routed, dense = evaluation["perplexity"][key], evaluation["dense"]["perplexity"][key]
    kind, target = calibration["budget"]["kind"], calibration["budget"]["sparsity"]
    skipped = _skipped(evaluation["skip_by_text"][key.split("/")[0]], kind)
    failures = []
    if not routed < WORST_RATIO_TO_DENSE * dense:
        failures.append(f"routed perplexity {routed:.2f} is not below {WORST_RATIO_TO_DENSE} x dense ({dense:.2f})")
    if not routed < WORST_RATIO_TO_RANDOM * random["perplexity"]:
        failures.append(
            f"routed perplexity {routed:.2f} is not below half of random routers' {random['perplexity']:.2f}"
        )
    if not skipped > target - MOST_UNDERSHOOT:
        failures.append(f"only {skipped:.1%} is skipped instead of {target:.1%}")
    return {
        "text": key,
        "routed": routed,
        "dense": dense,
        "ratio_to_dense": routed / dense,
        "skipped": skipped,
        "counted": kind,
        "sparsity": target,
        "random": random,
        "failures": failures,
        "good": not failures,
    }

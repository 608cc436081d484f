"""`wide demo`: the whole way once, on this machine, with a verdict."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from widecli.cli import options
from widecli.cli.console import emit_json, note, stdout_for_document, warn
from widecli.errors import WideError

WORST_RATIO_TO_DENSE = 2.5
WORST_RATIO_TO_RANDOM = 0.5

Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the demo recipe.", show_default=False),
]


def demo(
    arguments: Arguments = None,
    data_root: options.DataRoot = None,
    limit: Annotated[int, typer.Option("--limit", help="Documents a task, where their data is reachable.")] = 8,
    overwrite: options.Overwrite = False,
    offline: options.Offline = False,
    json: options.Json = False,
) -> None:
    """Calibrate the embedded SmolLM2-135M, evaluate it beside the dense model, and judge the result.

    Fails when the routed perplexity is not below 2.5 times the dense one, below half of what untrained random routers
    reach at the same sparsity, and below the closed form's own start.
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

    resolved = options.recipe_from(arguments, base="demo")
    calibration = run_calibration(resolved, resume=not overwrite, overwrite=overwrite, offline=offline)
    random = random_start_perplexity(resolved, calibration, offline)
    tasks = reachable_tasks(data_root, offline)
    flags = {"tasks": tasks, "limit": limit if tasks else None, "data_root": data_root}
    job, evaluated = prepare([calibration["checkpoint"]], flags, offline=offline)
    evaluation = run_evaluation(job, evaluated, overwrite=True)
    verdict = judge(evaluation, calibration, random)
    note("")
    note(f"routed {verdict['routed']:.2f}, dense {verdict['dense']:.2f}: {verdict['ratio_to_dense']:.2f} times dense")
    note(f"closed-form start {verdict['start']:.2f}, random routers {verdict['random']:.2f}, both before any step")
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


def random_start_perplexity(resolved: Any, calibration: dict[str, Any], offline: bool) -> float:
    """Held-out perplexity of random routers, shifted so that they skip the target share: what training starts from
    without the closed form."""
    import torch

    from widecli.evaluate.perplexity import measure_perplexity
    from widecli.model.backbone import load_backbone
    from widecli.model.plan import RoutingPlan
    from widecli.model.routed import RoutedModel

    recipe = resolved.recipe
    note("for comparison: random routers before any step")
    backbone = load_backbone(recipe.model)
    routed = RoutedModel.attach(
        backbone.model, RoutingPlan.from_section(recipe.routing, backbone.shape), seed=recipe.train.seed
    )
    _, result = measure_perplexity(
        backbone.model,
        backbone.tokenizer,
        recipe.data.validation,
        window=recipe.eval.perplexity_window,
        max_windows=recipe.eval.perplexity_windows,
        offline=offline,
    )
    routed.detach()
    torch.manual_seed(0)
    return float(result.value)


def judge(evaluation: dict[str, Any], calibration: dict[str, Any], random: float) -> dict[str, Any]:
    """Compare the routed perplexity with dense, with the closed-form start and with random routers."""
    key = next(iter(evaluation["perplexity"]))
    routed, dense = evaluation["perplexity"][key], evaluation["dense"]["perplexity"][key]
    start = calibration["validation"]["start"]
    failures = []
    if not routed < WORST_RATIO_TO_DENSE * dense:
        failures.append(f"routed perplexity {routed:.2f} is not below {WORST_RATIO_TO_DENSE} x dense ({dense:.2f})")
    if not routed < WORST_RATIO_TO_RANDOM * random:
        failures.append(f"routed perplexity {routed:.2f} is not below half of random routers' ({random:.2f})")
    if not routed < start:
        failures.append(f"routed perplexity {routed:.2f} is not below its own start ({start:.2f})")
    return {
        "text": key,
        "routed": routed,
        "dense": dense,
        "start": start,
        "random": random,
        "ratio_to_dense": routed / dense,
        "failures": failures,
        "good": not failures,
    }

"""Run lm-eval tasks on a model and hand back lm-eval's results as they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from widecli.errors import UsageError, WideError
from widecli.evaluate.quiet import quiet_harness
from widecli.evaluate.tasks import load_tasks, templates_compiled_once
from widecli.ranks import current

if TYPE_CHECKING:
    from torch import nn

# lm-eval resamples only metrics without a closed-form standard error, none of which the seven tasks have; means are
# free.
_BOOTSTRAP_ITERATIONS = 1000


def run_tasks(
    model: nn.Module,
    tokenizer: Any,
    *,
    tasks: Sequence[str] | Sequence[Any],
    limit: int | None = None,
    batch_size: int | str = "auto",
    max_length: int = 2048,
    data_root: str | None = None,
    offline: bool = False,
    seed: int | None = None,
    name: str = "model",
    beyond_positions: bool = False,
) -> dict[str, Any]:
    """lm-eval's results, its schema untouched, for `tasks` (names, `paper`, or what `load_tasks` returned).

    `limit` is a number of documents a task. `batch_size` "auto" fills the device and halves on out-of-memory; results
    do not depend on it. Sequences longer than `max_length` lose their beginning; what is left must fit
    the positions that the model is made for, unless `beyond_positions`. `seed` goes to every seed of lm-eval
    (few-shot choice, sampling); None keeps its defaults. `name` stands for the model in the record. No request cache is
    used. Progress and messages go to stderr. Several ranks build the same requests, score a part each and get all
    results.
    """
    if not isinstance(batch_size, int) and batch_size != "auto":
        raise UsageError(f"eval.batch_size={batch_size} must be a number of sequences or auto.")
    if not tasks:
        raise UsageError("There is nothing to run: name tasks with eval.tasks (paper = the paper's seven).")
    import torch

    was_training = model.training
    with quiet_harness(), templates_compiled_once(), torch.no_grad():
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import handle_non_serializable

        from widecli.evaluate.language_model import ScoringModel

        loaded = _loaded(tasks, data_root=data_root, offline=offline)
        try:
            scoring = ScoringModel(
                model,
                tokenizer,
                batch_size=batch_size,
                max_length=max_length,
                name=name,
                beyond_positions=beyond_positions,
            )
            results = simple_evaluate(
                model=scoring,
                tasks=loaded,
                task_manager=TaskManager(include_defaults=False),
                batch_size=batch_size,
                device=str(scoring.device),
                limit=limit,
                bootstrap_iters=_BOOTSTRAP_ITERATIONS,
                log_samples=False,
                use_cache=None,
                cache_requests=False,
                **_seeds(seed),
            )
        finally:
            model.train(was_training)
    # task configurations hold functions: plain JSON, as lm-eval itself writes them
    text = None if results is None else json.dumps(results, default=handle_non_serializable)
    text = current().from_first(text)  # lm-eval gives none where LOCAL_RANK is not 0
    if text is None:
        raise WideError("lm-eval gave no results; run it in one process, or start the ranks with torchrun or --nproc")
    plain: dict[str, Any] = json.loads(text)
    return plain


def _loaded(tasks: Sequence[Any], *, data_root: str | None, offline: bool) -> list[Any]:
    names = [task for task in tasks if isinstance(task, str)]
    if not names:
        return list(tasks)
    if len(names) != len(tasks):
        raise UsageError("Give run_tasks either task names or loaded tasks, not both.")
    return load_tasks(names, data_root=data_root, offline=offline)


def _seeds(seed: int | None) -> dict[str, int]:
    if seed is None:
        return {}
    return dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), seed)

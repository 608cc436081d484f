"""From lm-eval's results to the few figures people compare: metrics a task, the average, what was kept of the dense
model.

The average is over the paper's seven tasks, `acc_norm` where the task has it and `acc` otherwise. With fewer than seven
there is no average, only a partial one that names its tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from widecli.evaluate.protocol import PAPER_TASKS
from widecli.evaluate.texts import METRIC

Tasks = Mapping[str, Mapping[str, float]]
"""Task name -> lm-eval metric key (`acc_norm,none`) -> value."""

_HEADLINES = ("acc_norm,none", "acc,none")


@dataclass(frozen=True)
class Average:
    """The mean headline metric. `value` is None unless all seven tasks are there; `partial` is over `tasks` alone."""

    value: float | None
    partial: float | None
    tasks: tuple[str, ...]
    metrics: tuple[str, ...]

    @property
    def label(self) -> str:
        """What the figure is an average of, for a table's heading."""
        if self.value is not None:
            return "average of 7"
        return f"partial average of {len(self.tasks)} ({', '.join(self.tasks)})" if self.tasks else "no average"


def summarise(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The numeric metrics of each task under lm-eval's own keys (`acc,none`, `acc_stderr,none`), documents counted.

    Takes what `run_tasks` returns. `n` is the number of documents scored. A standard error that lm-eval did not compute
    ("N/A") is left out.
    """
    counts = results.get("n-samples", {})
    tasks: dict[str, dict[str, float]] = {}
    for name, metrics in results.get("results", {}).items():
        tasks[name] = {
            key: float(value)
            for key, value in metrics.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool) and "," in key
        }
        if name in counts:
            tasks[name]["n"] = float(counts[name]["effective"])
    return tasks


def headline(metrics: Mapping[str, float]) -> str | None:
    """The metric a task is judged by: `acc_norm,none` where it has it, else `acc,none`, else its first value."""
    for key in _HEADLINES:
        if key in metrics:
            return key
    return next((key for key in metrics if "," in key and "_stderr" not in key), None)


def average(tasks: Tasks) -> Average:
    """Mean over the paper's tasks among `tasks` (from `summarise`); other tasks are ignored."""
    there = tuple(name for name in PAPER_TASKS if name in tasks and any(key in tasks[name] for key in _HEADLINES))
    chosen = tuple(next(key for key in _HEADLINES if key in tasks[name]) for name in there)
    values = [tasks[name][key] for name, key in zip(there, chosen, strict=True)]
    partial = sum(values) / len(values) if values else None
    return Average(partial if there == PAPER_TASKS else None, partial, there, chosen)


def retention(routed: Average, dense: Average) -> float | None:
    """Share of the dense average that is kept; None unless both are over the same tasks and metrics.

    With fewer than seven tasks it is the ratio of the partial averages: show `routed.label` with it.
    """
    same = routed.tasks == dense.tasks and routed.metrics == dense.metrics
    if not same or routed.partial is None or not dense.partial:
        return None
    return routed.partial / dense.partial


def rows(
    tasks: Tasks,
    perplexity: Mapping[str, float],
    *,
    dense_tasks: Tasks | None = None,
    dense_perplexity: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """A table as plain data: perplexities, tasks by their headline metric, the average and the retention.

    Each row is {name, metric, value, stderr, dense, ratio, higher_is_better}; `ratio` is value / dense and absent
    figures are None.
    """
    table = [
        _row(
            name.rpartition("/")[0] or name,
            name.rpartition("/")[2] if "/" in name else METRIC,
            value,
            (dense_perplexity or {}).get(name),
            False,
        )
        for name, value in perplexity.items()
    ]
    for name in _in_order(tasks):
        key = headline(tasks[name])
        if key is None:
            continue
        metric, _, suffix = key.partition(",")
        dense = (dense_tasks or {}).get(name, {}).get(key)
        row = _row(name, metric, tasks[name][key], dense, "perplexity" not in metric and "bits" not in metric)
        row["stderr"] = tasks[name].get(f"{metric}_stderr,{suffix}")
        table.append(row)
    mean = average(tasks)
    if mean.partial is not None:
        dense_mean = average(dense_tasks or {})
        comparable = retention(mean, dense_mean) is not None
        table.append(_row(mean.label, "acc", mean.partial, dense_mean.partial if comparable else None, True))
    return table


def _in_order(tasks: Tasks) -> Sequence[str]:
    """The paper's tasks in the paper's order, then the others as they come."""
    return [*(name for name in PAPER_TASKS if name in tasks), *(name for name in tasks if name not in PAPER_TASKS)]


def _row(name: str, metric: str, value: float, dense: float | None, higher_is_better: bool) -> dict[str, Any]:
    return {
        "name": name,
        "metric": metric,
        "value": value,
        "stderr": None,
        "dense": dense,
        "ratio": value / dense if dense else None,
        "higher_is_better": higher_is_better,
    }

from __future__ import annotations

from typing import Any

import pytest

from widecli.evaluate.protocol import PAPER_TASKS
from widecli.evaluate.results import average, headline, retention, rows, summarise

RESULTS: dict[str, Any] = {
    "results": {
        "arc_easy": {
            "name": "arc_easy",
            "alias": "arc_easy",
            "sample_len": 4,
            "acc,none": 0.5,
            "acc_stderr,none": 0.1,
            "acc_norm,none": 0.25,
            "acc_norm_stderr,none": "N/A",
        },
        "boolq": {"alias": "boolq", "acc,none": 1.0, "acc_stderr,none": 0.0},
    },
    "n-samples": {"arc_easy": {"original": 9, "effective": 4}},
}


def full(value: float) -> dict[str, dict[str, float]]:
    return {name: {"acc,none": value, "acc_norm,none": value / 2} for name in PAPER_TASKS}


def test_summary_keeps_lm_evals_keys_and_numbers_only() -> None:
    assert summarise(RESULTS) == {
        "arc_easy": {"acc,none": 0.5, "acc_stderr,none": 0.1, "acc_norm,none": 0.25, "n": 4.0},
        "boolq": {"acc,none": 1.0, "acc_stderr,none": 0.0},
    }


def test_acc_norm_is_preferred_where_the_task_has_it() -> None:
    tasks = summarise(RESULTS)
    assert headline(tasks["arc_easy"]) == "acc_norm,none"
    assert headline(tasks["boolq"]) == "acc,none"
    assert headline({"word_perplexity,none": 9.0}) == "word_perplexity,none"


def test_fewer_than_seven_tasks_have_a_labelled_partial_average_only() -> None:
    mean = average(summarise(RESULTS))
    assert mean.value is None
    assert mean.partial == pytest.approx(0.625)
    assert mean.label == "partial average of 2 (arc_easy, boolq)"
    assert average({}).partial is None


def test_seven_tasks_average_acc_norm_and_ignore_the_rest() -> None:
    tasks = full(0.8)
    del tasks["boolq"]["acc_norm,none"]
    tasks["sciq"] = {"acc,none": 0.0}
    mean = average(tasks)
    assert mean.value == pytest.approx((6 * 0.4 + 0.8) / 7)
    assert mean.label == "average of 7"


def test_retention_compares_like_with_like_only() -> None:
    assert retention(average(full(0.4)), average(full(0.5))) == pytest.approx(0.8)
    assert retention(average(summarise(RESULTS)), average(full(0.5))) is None
    assert retention(average({}), average({})) is None
    assert retention(average(full(0.4)), average(full(0.0))) is None


def test_rows_hold_perplexity_tasks_and_average_beside_dense() -> None:
    table = rows(
        full(0.4),
        {"wikitext2/token_ppl": 30.0},
        dense_tasks=full(0.5),
        dense_perplexity={"wikitext2/token_ppl": 20.0},
    )
    assert [row["name"] for row in table] == ["wikitext2", *PAPER_TASKS, "average of 7"]
    assert table[0] == {
        "name": "wikitext2",
        "metric": "token_ppl",
        "value": 30.0,
        "stderr": None,
        "dense": 20.0,
        "ratio": 1.5,
        "higher_is_better": False,
    }
    assert table[-1]["ratio"] == pytest.approx(0.8)
    assert table[1]["metric"] == "acc_norm"


def test_rows_without_a_dense_run_have_no_ratio() -> None:
    assert all(row["dense"] is None and row["ratio"] is None for row in rows(full(0.4), {"x/token_ppl": 2.0}))
    assert rows(summarise(RESULTS), {}, dense_tasks=full(0.5))[-1]["dense"] is None

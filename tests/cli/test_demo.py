"""The verdict of `wide demo`; the whole command takes minutes and is the README's other one."""

from __future__ import annotations

from typing import Any

import pytest

from widecli.cli.demo import judge


def verdict(kind: str = "flops", *, routed: float = 20.0, net: float = 0.2, rate: float = 0.25) -> dict[str, Any]:
    seen = {"flops_skipped": {"prunable": net}, "skip_rate": {"mean": rate}}
    evaluation = {
        "perplexity": {"pydoc-topics/token_ppl": routed},
        "dense": {"perplexity": {"pydoc-topics/token_ppl": 10.0}},
        "skip_by_text": {"pydoc-topics": seen},
    }
    calibration = {"budget": {"kind": kind, "sparsity": 0.22}}
    return judge(evaluation, calibration, {"perplexity": 100.0, "skipped": 0.2})


def test_a_budget_of_flops_is_held_against_net_flops_and_the_others_against_rates() -> None:
    assert verdict("flops", net=0.18)["good"] and verdict("flops", net=0.18)["skipped"] == 0.18
    assert verdict("flops", net=0.16)["failures"] == ["only 16.0% is skipped instead of 22.0%"]
    assert verdict("rate", net=0.0, rate=0.21)["good"]
    assert not verdict("rate", net=0.5, rate=0.1)["good"]


@pytest.mark.parametrize(("routed", "words"), [(26.0, "is not below 2.5 x dense"), (60.0, "half of random routers'")])
def test_a_bad_perplexity_is_said(routed: float, words: str) -> None:
    assert any(words in failure for failure in verdict(routed=routed)["failures"])

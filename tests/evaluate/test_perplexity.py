from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from widecli.errors import UsageError, WideError
from widecli.evaluate import perplexity
from widecli.evaluate.perplexity import cut_windows, measure_perplexity, token_perplexity

IDS = torch.randint(2, 400, (53,), generator=torch.Generator().manual_seed(1))


def nll_one_by_one(model: Any, ids: torch.Tensor, positions: list[tuple[int, int]], bos: bool = False) -> float:
    """Sum of -log p(ids[i] | ids[start:i]) for (start, i), each from a forward pass of its own."""
    total = 0.0
    for start, i in positions:
        context = ids[start:i]
        if bos:
            context = torch.cat([torch.tensor([0]), context])
        with torch.no_grad():
            logits = model(input_ids=context[None]).logits[0, -1].double()
        total -= float(logits.log_softmax(-1)[ids[i]])
    return total


def test_disjoint_windows_score_all_but_their_first_token(tiny_model: Any) -> None:
    result = token_perplexity(tiny_model, IDS, window=16)
    positions = [(i // 16 * 16, i) for i in range(53) if i % 16]
    assert (result.tokens, result.windows, result.window, result.stride) == (49, 4, 16, 16)
    assert result.nll_sum == pytest.approx(nll_one_by_one(tiny_model, IDS, positions), rel=1e-5)
    assert result.value == pytest.approx(math.exp(result.nll_sum / 49), rel=1e-9)


def test_sliding_windows_score_every_token_but_the_first_once(tiny_model: Any) -> None:
    result = token_perplexity(tiny_model, IDS, window=16, stride=6)
    # Window k starts at 6k and covers up to 6k+16: a token belongs to the first window that holds it.
    positions = [(max(0, -(-(i - 15) // 6)) * 6, i) for i in range(1, 53)]
    assert result.tokens == 52
    assert result.nll_sum == pytest.approx(nll_one_by_one(tiny_model, IDS, positions), rel=1e-5)


def test_bos_makes_every_text_token_scored(tiny_model: Any) -> None:
    result = token_perplexity(tiny_model, IDS, window=16, add_bos=True)
    positions = [(i // 15 * 15, i) for i in range(53)]
    assert (result.tokens, result.bos) == (53, True)
    assert result.nll_sum == pytest.approx(nll_one_by_one(tiny_model, IDS, positions, bos=True), rel=1e-5)


def test_max_windows_reads_only_the_first(tiny_model: Any) -> None:
    result = token_perplexity(tiny_model, IDS, window=16, max_windows=2)
    assert (result.windows, result.tokens) == (2, 30)
    assert result.nll_sum == pytest.approx(token_perplexity(tiny_model, IDS[:32], window=16).nll_sum, rel=1e-6)


def test_a_last_window_of_one_token_is_left_out(tiny_model: Any) -> None:
    assert token_perplexity(tiny_model, IDS[:33], window=16).windows == 2


@pytest.mark.parametrize("batch_size", [2, 3, 50])
def test_batching_does_not_change_the_value(tiny_model: Any, batch_size: int) -> None:
    alone = token_perplexity(tiny_model, IDS, window=8)
    together = token_perplexity(tiny_model, IDS, window=8, batch_size=batch_size)
    assert together.tokens == alone.tokens
    assert together.nll_sum == pytest.approx(alone.nll_sum, rel=1e-6)


def test_small_fp32_chunks_do_not_change_the_value(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = token_perplexity(tiny_model, IDS, window=32)
    monkeypatch.setattr(perplexity, "FP32_LOGITS_BYTES", 3 * 4 * 400)
    assert token_perplexity(tiny_model, IDS, window=32).nll_sum == pytest.approx(whole.nll_sum, rel=1e-6)


def test_out_of_memory_halves_the_batch(model_that_runs_out: Callable[[int], Any]) -> None:
    model = model_that_runs_out(2)
    result = token_perplexity(model, IDS[:48], window=8, batch_size=6)
    assert model.rows == [6, 3, 1, 1, 1, 1, 1, 1]
    assert result.windows == 6


def test_one_window_that_does_not_fit_is_an_error_with_advice(model_that_runs_out: Callable[[int], Any]) -> None:
    with pytest.raises(WideError, match="shorter window"):
        token_perplexity(model_that_runs_out(0), IDS, window=8)


def test_other_runtime_errors_are_not_taken_for_out_of_memory(tiny_model: Any) -> None:
    with pytest.raises((RuntimeError, IndexError)) as error:
        token_perplexity(tiny_model, torch.tensor([1, 2, 9999]), window=8)
    assert not isinstance(error.value, WideError)


def test_training_mode_is_restored(tiny_model: Any) -> None:
    tiny_model.train()
    token_perplexity(tiny_model, IDS, window=32)
    assert tiny_model.training


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (IDS[:1], {}, "1 tokens is too short"),
        (IDS, {"window": 1}, "window of 1"),
        (IDS, {"window": 8, "stride": 9}, "stride=9"),
        (IDS, {"window": 8, "stride": 0}, "stride=0"),
        (IDS[None], {}, "shape"),
    ],
)
def test_unusable_input_is_a_usage_error(tiny_model: Any, ids: Any, options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        token_perplexity(tiny_model, ids, **options)


def test_add_bos_without_a_bos_token_is_a_usage_error(tiny_model: Any) -> None:
    tiny_model.config.bos_token_id = None
    with pytest.raises(UsageError, match="bos_token_id"):
        token_perplexity(tiny_model, IDS, add_bos=True)


@given(st.integers(0, 300), st.integers(2, 40), st.data(), st.booleans())
def test_windows_score_each_token_at_most_once_and_in_order(tokens: int, width: int, data: Any, bos: bool) -> None:
    stride = data.draw(st.integers(1, width))
    cuts = list(cut_windows(tokens, width, stride, first_is_predicted=bos))
    scored = [i for cut in cuts for i in range(cut.first, cut.end)]
    assert scored == sorted(set(scored))
    assert all(cut.start <= cut.first < cut.end <= cut.start + width for cut in cuts)
    missed = set(range(tokens)) - set(scored)
    if bos:
        assert not missed
    else:
        # Sliding loses the text's first token only; disjoint windows lose each one's first.
        assert missed == ({0} if stride < width else set(range(0, tokens, width))) & set(range(tokens))


def test_a_named_text_is_measured(tiny_model: Any, tokenizer: Any, hub_folder: Path) -> None:
    result = measure_perplexity(tiny_model, tokenizer, "wikitext2", window=32, data_root=str(hub_folder))
    assert result.label == "WikiText-2 raw test"
    assert result.as_dict()["value"] == result.value > 1


def test_pydoc_topics_are_capped_and_the_label_says_so(tiny_model: Any, tokenizer: Any) -> None:
    result = measure_perplexity(tiny_model, tokenizer, "pydoc-topics", window=1024)
    assert (result.windows, result.tokens) == (4, 4092)
    assert "first 4096 tokens" in result.label
    more = measure_perplexity(tiny_model, tokenizer, "pydoc-topics", window=1024, max_windows=5)
    assert more.windows == 5 and "first 5 windows" in more.label

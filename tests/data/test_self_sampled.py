from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from widecli.data.self_sampled import BATCH_SIZE, SelfSampled
from widecli.data.sources import SamplingModel, open_source
from widecli.data.tokens import prepare_tokens
from widecli.errors import WideError
from widecli.recipe.schema import DataSection


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval()


class Counting:
    """Counts what is sampled; everything else is the model's."""

    def __init__(self, model: Any) -> None:
        self.model, self.calls = model, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, **inputs: Any) -> Any:
        self.calls += 1
        return self.model(**inputs)


def sampler(model: Any, tokenizer: Any, cache: Path, *, seed: int = 0, length: int = 12) -> SelfSampled:
    sampling = SamplingModel(model, tokenizer, identity="tiny", seed=seed)
    return SelfSampled(sampling, max_length=length, cache_dir=cache)


def test_text_depends_on_the_seed_alone(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    first = list(islice(sampler(model, tokenizer, tmp_path / "a").documents(), 40))
    torch.manual_seed(2)
    assert list(islice(sampler(model, tokenizer, tmp_path / "b").documents(), 40)) == first
    assert list(islice(sampler(model, tokenizer, tmp_path / "b", seed=1).documents(), 40)) != first
    assert len(set(first)) > 35


def test_sampling_leaves_the_callers_random_numbers_and_mode_alone(model: Any, tokenizer: Any, cache: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model.train()
    next(sampler(model, tokenizer, cache).documents())
    assert model.training
    model.eval()
    assert (torch.rand(3) == expected).all()


def test_what_was_sampled_is_read_back_and_a_stopped_run_goes_on(model: Any, tokenizer: Any, cache: Path) -> None:
    counting = Counting(model)
    first = list(islice(sampler(counting, tokenizer, cache).documents(), BATCH_SIZE))
    calls = counting.calls
    again = list(islice(sampler(counting, tokenizer, cache).documents(), BATCH_SIZE))
    assert again == first
    assert counting.calls == calls
    list(islice(sampler(counting, tokenizer, cache).documents(), 3 * BATCH_SIZE))
    assert counting.calls > calls


def test_a_damaged_batch_is_sampled_again(model: Any, tokenizer: Any, cache: Path) -> None:
    source = sampler(model, tokenizer, cache)
    first = list(islice(source.documents(), 5))
    (source.folder / "000000.json").write_text("[1, 2")
    assert list(islice(sampler(model, tokenizer, cache).documents(), 5)) == first


def test_texts_are_no_longer_than_a_sequence_or_the_models_positions(model: Any, tokenizer: Any, cache: Path) -> None:
    assert sampler(model, tokenizer, cache, length=10**6).max_length == 64
    for text in islice(sampler(model, tokenizer, cache, length=5).documents(), 20):
        assert len(tokenizer(text)["input_ids"]) <= 5 * 3  # broken UTF-8 decodes to three bytes


def test_sampling_is_not_bent_by_the_models_generation_defaults(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    plain = list(islice(sampler(model, tokenizer, tmp_path / "a").documents(), 16))
    before = model.generation_config
    try:
        model.generation_config = type(before)(
            temperature=0.1, top_p=0.1, top_k=1, repetition_penalty=2.0, min_p=0.9, do_sample=True
        )
        bent = list(islice(sampler(model, tokenizer, tmp_path / "b").documents(), 16))
    finally:
        model.generation_config = before
    assert bent == plain


def test_a_tokenizer_that_adds_bos_starts_from_it(make_tokenizer: Callable[..., Any], model: Any, cache: Path) -> None:
    with_bos = make_tokenizer(bos=True, eos=False, adds_bos=True)
    starts = sampler(model, with_bos, cache)._start_tokens(0)
    assert (starts == with_bos.bos_token_id).all()
    random_starts = sampler(model, make_tokenizer(), cache)._start_tokens(0)
    assert len(set(random_starts[:, 0].tolist())) > 8
    assert not set(random_starts[:, 0].tolist()) & set(make_tokenizer().all_special_ids)


def test_a_model_that_says_nothing_is_refused(tokenizer: Any, model: Any, cache: Path) -> None:
    class Silent(Counting):
        def __call__(self, **inputs: Any) -> Any:
            result = self.model(**inputs)
            result.logits[..., tokenizer.eos_token_id] = 1e4
            return result

    source = sampler(Silent(model), tokenizer, cache)
    assert all(len(text) <= 1 for text in source._sample(0))  # only the random first token
    space = tokenizer.convert_tokens_to_ids("\u0120")
    source._start_tokens = lambda _: torch.full((BATCH_SIZE, 1), space).numpy()  # type: ignore[method-assign]
    with pytest.raises(WideError, match="nothing but empty text"):
        next(source.documents())


def test_nothing_after_the_end_of_a_text_is_kept(model: Any, tokenizer: Any, cache: Path) -> None:
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "ab"]

    class Scripted(Counting):
        """Says a, then the end in even rows, then b for ever."""

        def __call__(self, **inputs: Any) -> Any:
            result = super().__call__(**inputs)
            result.logits[:] = -1e4
            says = [letters[0], tokenizer.eos_token_id, letters[1]][min(self.calls, 3) - 1]
            result.logits[0::2, :, says] = 0
            result.logits[1::2, :, letters[min(self.calls, 2) - 1]] = 0
            return result

    texts = sampler(Scripted(model), tokenizer, cache, length=6)._sample(0)
    assert {text[-1] for text in texts[0::2]} == {"a"}
    assert {text[-5:] for text in texts[1::2]} == {"abbbb"}


def test_sampling_follows_the_models_probabilities(model: Any, tokenizer: Any, cache: Path) -> None:
    """A slow way to the same text: no cache, one row at a time, the same random numbers."""
    source = sampler(model, tokenizer, cache, length=6)
    from widecli.data.self_sampled import _mixed_seed

    generator = torch.Generator().manual_seed(_mixed_seed(0, 0))
    rows = torch.from_numpy(source._start_tokens(0))
    for _ in range(5):
        with torch.no_grad():
            logits = torch.cat([model(input_ids=row[None]).logits[:, -1] for row in rows])
        rows = torch.cat([rows, torch.multinomial(logits.float().softmax(-1), 1, generator=generator)], dim=1)
    expected = []
    for row in rows.tolist():
        end = row.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in row else len(row)
        expected.append(tokenizer.decode(row[:end]))
    assert source._sample(0) == expected


def test_it_becomes_tokens_like_any_source(model: Any, tokenizer: Any, cache: Path) -> None:
    section = DataSection(source="self", sequence_length=16)
    sampling = SamplingModel(model, tokenizer, identity="tiny")
    source = open_source("self", section=section, sampling=sampling, cache_dir=cache)
    tokens = prepare_tokens(source, tokenizer, section, tokens_needed=500, cache_dir=cache / "tokens")
    assert len(tokens) == 32
    assert not tokens.exhausted

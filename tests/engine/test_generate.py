"""Continuing prompts: greedy as Hugging Face's, sampled from a seed, ragged batches, stop tokens, limits."""

from __future__ import annotations

import pytest
import torch
from engine_pairs import Pair, make_pair
from torch import Tensor

from tiny_models import random_ids, tiny_model
from widecli.engine.generate import Generation, generate, open_session
from widecli.engine.model import InferenceModel
from widecli.engine.sampling import Sampler, Sampling
from widecli.errors import UsageError

PROMPTS = [random_ids(1, length, seed=length)[0].tolist() for length in (5, 12, 1)]


def hugging_face_greedy(pair: Pair, prompt: list[int], new: int) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
    pair.model.generation_config.eos_token_id = None
    out: Tensor = pair.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return [int(t) for t in out[0, len(prompt) :]]


def run(pair: Pair, prompts: list[list[int]], new: int, **options: object) -> Generation:
    return generate(open_session(pair.engine, prompts, new), prompts, new, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("routed", [False, True], ids=["dense", "routed"])
def test_greedy_is_hugging_faces_greedy(routed: bool) -> None:
    pair = make_pair(routed=routed)
    done = run(pair, PROMPTS, 10)
    for found, prompt in zip(done.tokens, PROMPTS, strict=True):
        assert list(found) == hugging_face_greedy(pair, prompt, 10)
    assert done.finish == ("length",) * 3
    assert done.prompt_tokens == 18 and done.decode_steps == 9
    assert done.prefill_tokens_per_second > 0 and (done.decode_tokens_per_second or 0) > 0


def test_a_stop_token_ends_its_sequence_alone_and_is_not_text() -> None:
    pair = make_pair(routed=True)
    free = run(pair, PROMPTS, 10)
    stop = free.tokens[0][4]
    before = [list(t[: t.index(stop)]) if stop in t else list(t) for t in free.tokens]
    heard: list[tuple[int, int]] = []
    done = run(pair, PROMPTS, 10, stop=[stop, 95], on_token=lambda sequence, token: heard.append((sequence, token)))
    assert [list(t) for t in done.tokens] == before
    assert done.finish == tuple("stop" if stop in t else "length" for t in free.tokens)
    assert [[t for s, t in heard if s == row] for row in range(3)] == before


def test_when_all_have_stopped_no_step_is_wasted() -> None:
    pair = make_pair(routed=True)
    (free,) = run(pair, PROMPTS[:1], 10).tokens
    stop = next(t for i, t in enumerate(free) if i >= 3 and t not in free[:i])
    done = run(pair, PROMPTS[:1], 10, stop=[stop])
    assert done.finish == ("stop",) and done.decode_steps == free.index(stop) == len(done.tokens[0])
    assert done.skipped is not None and done.skipped.tokens == len(PROMPTS[0]) + done.decode_steps
    at_once = run(pair, PROMPTS[:1], 10, stop=[free[0]])
    assert at_once.tokens == ((),) and at_once.decode_steps == 0 and at_once.decode_tokens_per_second is None


def test_draws_repeat_with_their_seed_and_change_with_it() -> None:
    pair = make_pair(routed=True)
    results = [run(pair, PROMPTS, 12, sampling=Sampling(1.0, 0.9, seed)).tokens for seed in (1, 1, 2)]
    assert results[0] == results[1] != results[2]
    assert run(pair, PROMPTS, 12, sampling=Sampling(1.0, 1e-6, 5)).tokens == run(pair, PROMPTS, 12).tokens


def test_draws_follow_the_temperature_and_stay_within_top_p() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = probabilities.log().expand(20_000, 4)
    drawn = Sampler(Sampling(1.0, 0.75), torch.device("cpu"))(logits).bincount(minlength=4) / 20_000
    torch.testing.assert_close(drawn, torch.tensor([0.625, 0.375, 0, 0]), rtol=0, atol=0.015)
    hot = probabilities.sqrt() / probabilities.sqrt().sum()
    drawn = Sampler(Sampling(2.0), torch.device("cpu"))(logits).bincount(minlength=4) / 20_000
    torch.testing.assert_close(drawn, hot, rtol=0, atol=0.015)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": -0.1}, "temperature must be 0"),
        ({"temperature": float("nan")}, "got nan"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.5}, "got 1.5"),
        ({"seed": -1}, "seed must be 0 or more"),
    ],
)
def test_impossible_sampling_is_refused(settings: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Sampling(**settings)  # type: ignore[arg-type]


def test_what_cannot_fit_is_refused_before_anything_runs() -> None:
    model = InferenceModel.from_dense(tiny_model())
    with pytest.raises(UsageError, match=r"12 prompt tokens and 117 new ones.*128.*at most 116 new tokens"):
        open_session(model, PROMPTS, 117)
    with pytest.raises(UsageError, match=r"prompt has 200 tokens.*at most 128"):
        open_session(model, [[5] * 200], 1)
    with pytest.raises(UsageError, match=r"every prompt needs at least one token"):
        open_session(model, [[5], []], 1)
    with pytest.raises(UsageError, match=r"at least one new token"):
        open_session(model, [[5]], 0)
    with pytest.raises(UsageError, match=r"12 prompt tokens and 9 new ones overflow a cache of 20.*fits is 8 new"):
        generate(model.session(3, 20), PROMPTS, 9)
    assert len(generate(model.session(3, 20), PROMPTS, 8).tokens[0]) == 8


@pytest.mark.slow
def test_the_embedded_model_says_what_it_says_through_hugging_face() -> None:
    from widecli.engine.text import encode
    from widecli.model.backbone import embedded_file, load_backbone
    from widecli.recipe.schema import ModelSection

    if embedded_file() is None:
        pytest.skip("the embedded model is not installed")
    backbone = load_backbone(ModelSection(name="smollm2-135m"))
    prompt = encode(backbone, "The capital of France is")
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": 12, "repetition_penalty": 1.0}
    out = backbone.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    model = InferenceModel.from_dense(backbone)
    done = generate(open_session(model, [prompt], 12), [prompt], 12)
    assert list(done.tokens[0]) == out[0, len(prompt) :].tolist()

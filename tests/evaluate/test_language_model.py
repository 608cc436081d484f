from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval.models.huggingface import HFLM

from widecli.errors import UsageError, WideError
from widecli.evaluate.language_model import ScoringModel

PAIRS = [
    ("the fog sits on a", " marsh"),
    ("the fog sits on a", " desert plain"),
    ("the fog sits on a", " jar"),
    ("save money ", "and eat"),  # the space that ends the context belongs to the continuation
    ("save money  \n", "lunch"),
    ("", "people eat lunch"),
    ("", "<s>people"),
    ("<s>the fog", " sits"),  # brings its own BOS
    ("water", " in the cold desert plain near water in the cold desert plain"),
    ("people save money and eat lunch out of a jar near water in the cold desert " * 3, "plain"),
    ("the fog", " sits"),
    ("the fog", " sits on a marsh"),
]
REQUESTS = [SimpleNamespace(args=pair, task_name=None) for pair in PAIRS]


def score(
    model: Any, tokenizer: Any, batch_size: int | str = "auto", max_length: int = 128
) -> list[tuple[float, bool]]:
    lm = ScoringModel(model, tokenizer, batch_size=batch_size, max_length=max_length, name="tiny")
    return lm.loglikelihood(REQUESTS, disable_tqdm=True)


def assert_same(found: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> None:
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], rel=1e-4, abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def joining_tokenizer(*, add_bos: bool) -> Any:
    """A BPE that knows no words: `: no` is one token, and so is ` no` alone."""
    from tokenizers import Tokenizer, models, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator([": no", ": no way", "is it so, yes"] * 9, trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("add_bos", [False, True])
def test_every_choice_is_scored_whole_after_the_same_context(tiny_model: Any, add_bos: bool) -> None:
    tokenizer = joining_tokenizer(add_bos=add_bos)
    assert len(tokenizer(": no", add_special_tokens=False)["input_ids"]) == 1
    lm = ScoringModel(tiny_model, tokenizer, batch_size=2, max_length=128, name="tiny")
    choices = [" no", " yes", " no way"]
    encoded = lm.encode_pairs([("is it so:", choice) for choice in choices] + [("is it so: ", "no")])
    contexts, continuations = zip(*encoded, strict=True)
    assert all(context == contexts[0] == lm.tok_encode("is it so:") for context in contexts)
    written = ["".join(tokenizer.convert_ids_to_tokens(tokens)) for tokens in continuations]
    assert written == [*choices, " no"]
    requests = [SimpleNamespace(args=("is it so:", choice), task_name=None) for choice in choices]
    assert all(value < 0 for value, _ in lm.loglikelihood(requests, disable_tqdm=True))


@pytest.mark.parametrize("name", ["tokenizer", "bos_tokenizer"])
@pytest.mark.parametrize("max_length", [128, 24])
def test_scores_are_those_of_lm_eval(
    tiny_model: Any, name: str, max_length: int, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(name)
    plain = HFLM(
        pretrained=tiny_model,
        tokenizer=copy.deepcopy(tokenizer),
        batch_size=4,
        max_length=max_length,
        logits_cache=False,  # its sharing of rows misplaces a short continuation that shares its row with a longer one
    )
    expected = plain.loglikelihood(REQUESTS, disable_tqdm=True)
    assert_same(score(tiny_model, tokenizer, max_length=max_length), expected)


@pytest.mark.parametrize("name", ["tokenizer", "bos_tokenizer"])
def test_bulk_tokens_are_those_of_lm_eval(tiny_model: Any, name: str, request: pytest.FixtureRequest) -> None:
    lm = ScoringModel(tiny_model, request.getfixturevalue(name), batch_size=1, max_length=128, name="tiny")
    pairs = [pair for pair in PAIRS if pair[0]]
    assert lm.encode_pairs(pairs) == [lm._encode_pair(*pair) for pair in pairs]


@pytest.mark.parametrize("batch_size", [1, 2, 5, "auto"])
def test_batched_equals_one_by_one_with_routing(tiny_model: Any, tokenizer: Any, batch_size: int | str) -> None:
    from widecli.model.plan import RoutingPlan
    from widecli.model.routed import RoutedModel

    routed = RoutedModel.attach(tiny_model, RoutingPlan(attention_group_size=2, ffn_group_size=16, rank=4), seed=3)
    for parameter in routed.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
    alone: list[tuple[float, bool]] = []
    tokens = 0
    for request in REQUESTS:
        lm = ScoringModel(tiny_model, tokenizer, batch_size=1, max_length=128, name="tiny")
        with routed.tracing() as trace:
            alone += lm.loglikelihood([request], disable_tqdm=True)
        tokens += trace.tokens
    with routed.tracing() as trace:
        together = score(tiny_model, tokenizer, batch_size)
    assert_same(together, alone)
    assert 0.05 < trace.skip_rate().mean < 0.95
    # Shared rows are fed once, and no padding is counted.
    lm = ScoringModel(tiny_model, tokenizer, batch_size=1, max_length=128, name="tiny")
    distinct = {tuple((*context, *continuation)[:-1]) for context, continuation in lm.encode_pairs(PAIRS)}
    assert trace.tokens == sum(map(len, distinct)) < tokens


def test_the_attention_mask_marks_exactly_the_padding(tiny_model: Any, tokenizer: Any) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    tiny_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((kwargs["input_ids"], kwargs["attention_mask"])), with_kwargs=True
    )
    score(tiny_model, tokenizer)
    lm = ScoringModel(tiny_model, tokenizer, batch_size=1, max_length=128, name="tiny")
    expected = {tuple((*context, *continuation)[:-1]) for context, continuation in lm.encode_pairs(PAIRS)}
    fed = {tuple(row[mask.bool()].tolist()) for ids, masks in seen for row, mask in zip(ids, masks, strict=True)}
    assert fed == expected
    assert any(not mask.all() for _, mask in seen)


def test_only_scored_positions_get_logits(tiny_model: Any, tokenizer: Any) -> None:
    shapes: list[tuple[int, int]] = []
    tiny_model.lm_head.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape[:2])))
    score(tiny_model, tokenizer, batch_size=1)
    lengths = [length for _, length in shapes]
    lm = ScoringModel(tiny_model, tokenizer, batch_size=1, max_length=128, name="tiny")
    assert max(lengths) == max(len(continuation) for _, continuation in lm.encode_pairs(PAIRS))


def test_a_model_without_logits_to_keep_scores_the_same(tiny_model: Any, tokenizer: Any) -> None:
    expected = score(tiny_model, tokenizer)
    inner = tiny_model.forward
    tiny_model.forward = lambda input_ids, attention_mask, use_cache: inner(
        input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache
    )
    assert_same(score(tiny_model, tokenizer), expected)


def test_out_of_memory_halves_the_batch_and_changes_nothing(
    model_that_runs_out: Callable[[int], Any], make_model: Callable[[int], Any], tokenizer: Any
) -> None:
    expected = score(make_model(400), tokenizer)
    limited = model_that_runs_out(2)
    assert_same(score(limited, tokenizer), expected)
    assert limited.rows[:3] == [10, 5, 2]
    assert max(limited.rows[3:]) <= 2


def test_one_sequence_that_does_not_fit_is_an_error_with_advice(
    model_that_runs_out: Callable[[int], Any], tokenizer: Any
) -> None:
    with pytest.raises(WideError, match="max_length"):
        score(model_that_runs_out(0), tokenizer)


def test_a_continuation_longer_than_max_length_is_refused(tiny_model: Any, tokenizer: Any) -> None:
    with pytest.raises(UsageError, match=r"eval\.max_length=4"):
        score(tiny_model, tokenizer, max_length=4)


def test_the_callers_tokenizer_is_left_alone(tiny_model: Any, tokenizer: Any) -> None:
    before = (tokenizer.pad_token, tokenizer.backend_tokenizer.to_str())
    score(tiny_model, tokenizer)
    assert (tokenizer.pad_token, tokenizer.backend_tokenizer.to_str()) == before
    assert before[0] is None


@pytest.mark.parametrize(("name", "adds"), [("tokenizer", False), ("bos_tokenizer", True)])
def test_the_record_states_protocol_and_bos(
    tiny_model: Any, name: str, adds: bool, request: pytest.FixtureRequest
) -> None:
    lm = ScoringModel(tiny_model, request.getfixturevalue(name), batch_size=1, max_length=64, name="tiny")
    info = lm.get_model_info()
    assert (info["model"], info["max_length"], info["adds_bos"], info["model_dtype"]) == ("tiny", 64, adds, "float32")


def test_generation_starts_over_with_half_the_batch(tiny_model: Any, tokenizer: Any) -> None:
    lm = ScoringModel(tiny_model, tokenizer, batch_size=4, max_length=64, name="tiny")
    wanted = {"until": ["zzz"], "max_gen_toks": 3}
    requests = [SimpleNamespace(args=(pair[0], dict(wanted)), task_name=None) for pair in PAIRS[:5]]
    expected = lm.generate_until(requests, disable_tqdm=True)

    def refuse(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].shape[0] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    tiny_model.register_forward_pre_hook(refuse, with_kwargs=True)
    assert lm.generate_until(requests, disable_tqdm=True) == expected
    assert lm.batch_size == 2

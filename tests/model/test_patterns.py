from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiny_models import random_ids, tiny_model, tiny_plan, tiny_routed
from widecli.errors import UsageError
from widecli.model import patterns
from widecli.model.gate import gumbel_gate, logistic_noise, margins
from widecli.model.patterns import Codebook, every_pattern
from widecli.model.plan import CodebookSize, PatternPlan
from widecli.model.routed import RoutedModel

CPU = torch.device("cpu")


def codebook(segments: int, count: int, width: int, seed: int = 0) -> Codebook:
    made = Codebook(CodebookSize(segments, count, width))
    made.reset(torch.Generator().manual_seed(seed))
    return made


def some_margins(tokens: int, groups: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, groups, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 3), st.integers(1, 8), st.integers(3, 5), st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_scores_are_the_linear_form_and_the_best_pattern_is_taken(
    segments: int, count: int, width: int, seed: int
) -> None:
    book = codebook(segments, count, width, seed)
    z = some_margins(6, segments * width, seed)
    decided = book.decide(z)
    for token in range(6):
        for segment in range(segments):
            part = slice(segment * width, (segment + 1) * width)
            scores = [
                sum(float(v) * (1 if bit else -1) for v, bit in zip(z[token, part], p, strict=True))
                for p in book.bits[segment].tolist()
            ]
            assert book.scores(z)[token, segment].tolist() == pytest.approx(scores, abs=1e-5)
            assert decided[token, part].tolist() == book.bits[segment, scores.index(max(scores))].tolist()


def test_with_every_pattern_it_decides_like_bits_ties_included() -> None:
    book = codebook(2, 8, 3)
    z = some_margins(50, 6)
    z[0] = 0
    assert torch.equal(book.decide(z), z >= 0)
    assert every_pattern(2).tolist() == [[True, True], [True, False], [False, True], [False, False]]


def test_with_every_pattern_samples_are_distributed_like_those_of_bits() -> None:
    draws = 40_000
    book = codebook(1, 8, 3)
    z = torch.tensor([0.8, -0.3, 0.1])
    noise = logistic_noise(0, 0, [0], draws, 8, CPU)[0]
    picked = book.sample(z.expand(draws, 3), torch.tensor(0.7), noise)
    bits = gumbel_gate(z.expand(draws, 3), torch.tensor(0.7), logistic_noise(1, 0, [0], draws, 3, CPU)[0])
    for found in (picked, bits):
        assert found.mean(0).tolist() == pytest.approx(torch.sigmoid(z).tolist(), abs=0.012)
    assert book.probability(z).tolist() == pytest.approx(torch.sigmoid(z).tolist(), abs=1e-5)
    together = [float((found[:, 0] * found[:, 1]).mean()) for found in (picked, bits)]
    assert together[0] == pytest.approx(together[1], abs=0.015)


def test_samples_are_patterns_and_their_gradient_is_that_of_the_relaxation() -> None:
    book = codebook(2, 3, 4)
    z = some_margins(5, 8).requires_grad_()
    noise = logistic_noise(0, 0, [0], 5, 6, CPU)[0]
    upstream = some_margins(5, 8, seed=2)
    mask = book.sample(z, torch.tensor(0.8), noise)
    for segment in range(2):
        own = book.bits[segment].float().tolist()
        assert all(row in own for row in mask[:, 4 * segment : 4 * segment + 4].tolist())
    (mask * upstream).sum().backward()
    gumbel = -torch.log(torch.log1p(torch.exp(-noise))).view(5, 2, 3)
    again = z.detach().clone().requires_grad_()
    p = book.bits.float()
    scores = torch.stack([again[:, 4 * s : 4 * s + 4] @ (2 * p[s] - 1).T for s in range(2)], 1)
    soft = torch.softmax((scores / 2 + gumbel) / 0.8, -1)
    relaxed = torch.cat([soft[:, s] @ p[s] for s in range(2)], 1)
    (relaxed * upstream).sum().backward()
    assert z.grad is not None and again.grad is not None
    assert torch.allclose(z.grad, again.grad, atol=1e-5)


def test_a_probability_stays_one_whatever_rounding_does() -> None:
    book = codebook(1, 64, 8)
    book.set_bits(torch.ones_like(book.bits))
    chances = book.probability(some_margins(500, 8))
    assert float(chances.max()) <= 1 and float(chances.min()) > 0.9999


def test_noise_scale_tries_other_patterns_more_often() -> None:
    book = codebook(1, 4, 6)
    z = 2 * some_margins(4000, 6)
    noise = logistic_noise(0, 0, [0], 4000, 4, CPU)[0]
    changed = []
    for scale in (1.0, 4.0):
        book.noise_scale = scale
        changed.append(float((book.sample(z, torch.tensor(1.0), noise).bool() != book.decide(z)).float().mean()))
    assert changed[1] > 1.5 * changed[0]


def test_learned_patterns_get_a_gradient_and_their_sign_decides() -> None:
    book = codebook(1, 4, 6)
    before = book.bits.clone()
    book.learn()
    assert book.latent is not None and torch.equal(book.bits, before)
    mask = book.sample(some_margins(64, 6), torch.tensor(1.0), logistic_noise(0, 0, [0], 64, 4, CPU)[0])
    assert set(mask.unique().tolist()) <= {0.0, 1.0}
    (mask * some_margins(64, 6, 1)).sum().backward()
    assert book.latent.grad is not None and bool((book.latent.grad != 0).all())
    with torch.no_grad():
        book.latent[0, 1, 2] *= -1
    assert int((book.bits != before).sum()) == 1
    complete = codebook(1, 8, 3)
    complete.learn()
    assert complete.latent is None


PATTERNS = PatternPlan(4, 1, "all")


@pytest.mark.parametrize("plan", [PATTERNS, PatternPlan(3, 2, "ffn")])
def test_ids_are_a_function_of_the_token_alone(plan: PatternPlan) -> None:
    """The same masks alone, in a batch, and behind padding."""
    routed = tiny_routed(mode="patterns", patterns=plan)
    ids = random_ids(3, 12)

    def masks(batch: Tensor, valid: Tensor | None = None) -> dict[object, Tensor]:
        with torch.no_grad(), routed.tracing(keep_masks=True) as trace:
            routed.backbone(input_ids=batch, attention_mask=valid)
        assert trace.masks is not None
        return {key: torch.cat(found) for key, found in trace.masks.items()}

    together = masks(ids)
    for row in range(3):
        alone = masks(ids[row : row + 1])
        padded = torch.cat([torch.zeros(1, 5, dtype=torch.int64), ids[row : row + 1]], 1)
        behind = masks(padded, (torch.arange(17) >= 5).long()[None])
        for key, found in together.items():
            assert torch.equal(alone[key], found[12 * row : 12 * row + 12])
            assert torch.equal(behind[key], alone[key])
    assert any(0 < float(mask.float().mean()) < 1 for mask in together.values())


def test_masks_are_patterns_of_their_layer_and_bits_without_the_codebook() -> None:
    routed = tiny_routed(mode="patterns", patterns=PATTERNS)
    seen: dict[object, Tensor] = {}
    for key, decision in routed.decisions.items():
        decision.router.register_forward_hook(
            lambda _, __, logits, key=key: seen.__setitem__(key, margins(logits).flatten(0, 1))
        )
    with torch.no_grad(), routed.tracing(keep_masks=True) as trace:
        routed.backbone(input_ids=random_ids(2, 9))
    assert trace.masks is not None
    (book,) = [routed.decisions[1, "ffn"].codebook]
    assert book is not None
    assert torch.equal(trace.masks[1, "ffn"][0], book.decide(seen[1, "ffn"]))
    with torch.no_grad(), routed.bits(), routed.tracing(keep_masks=True) as trace:
        routed.backbone(input_ids=random_ids(2, 9))
    assert trace.masks is not None
    assert torch.equal(trace.masks[1, "ffn"][0], seen[1, "ffn"] >= 0)
    assert routed.noise_width == 2 * (4 + 4)  # every layer: the 4 patterns of 2 attention groups, and 4 of the FFN


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (PatternPlan(17), "4 groups have 16 patterns, and 17 are asked for"),
        (PatternPlan(5, 2), "2 groups have 4 patterns"),
        (PatternPlan(2, 3), "3 pattern segments do not divide the 4 ffn groups .* 1, 2, 4"),
    ],
)
def test_a_codebook_that_does_not_fit_is_refused(plan: PatternPlan, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        RoutedModel.attach(tiny_model(), tiny_plan(mode="patterns", patterns=plan))


def test_patterns_of_a_part_that_is_not_routed_are_refused() -> None:
    with pytest.raises(UsageError, match="nothing by patterns"):
        RoutedModel.attach(tiny_model(), tiny_plan(mode="patterns", parts="attention", patterns=PatternPlan(4)))
    with pytest.raises(UsageError, match="do not go together"):
        RoutedModel.attach(tiny_model(), tiny_plan(patterns=PatternPlan(4)))


def test_a_file_is_taken_over_exactly_or_refused_by_name() -> None:
    routed = tiny_routed(mode="patterns", patterns=PatternPlan(4))
    stored = patterns.tensors(routed.codebooks)
    other = RoutedModel.attach(tiny_model(), routed.plan, seed=9).codebooks
    assert any(not torch.equal(v, stored[k]) for k, v in patterns.tensors(other).items())
    patterns.fill(other, stored, Path("p"))
    assert all(torch.equal(v, stored[k]) for k, v in patterns.tensors(other).items())
    for broken, word in (
        ({k: v for k, v in stored.items() if k != "1.ffn.bits"}, "missing 1.ffn.bits"),
        ({**stored, "7.ffn.bits": stored["1.ffn.bits"]}, "unexpected 7.ffn.bits"),
        ({**stored, "0.ffn.bits": stored["1.ffn.bits"][:, :3]}, "0.ffn.bits is torch.bool .1, 3, 4. instead of"),
        ({**stored, "0.ffn.bits": stored["1.ffn.bits"].float()}, "0.ffn.bits is torch.float32"),
    ):
        with pytest.raises(UsageError, match=word):
            patterns.fill(other, broken, Path("p"))

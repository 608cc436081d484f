from __future__ import annotations

from itertools import combinations

import pytest
import torch

from tiny_models import random_ids, tiny_routed
from widecli.errors import UsageError
from widecli.model.pattern_fit import (
    Conversion,
    Match,
    best_of_restarts,
    codebooks_of,
    convert,
    fit_codebooks,
    lloyd,
    observe,
    total_score,
)
from widecli.model.patterns import every_pattern
from widecli.model.plan import PatternPlan
from widecli.model.thresholds import Batch, collect_margins


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("seed", range(6))
def test_tokens_around_two_patterns_give_what_brute_force_finds(seed: int) -> None:
    centres = torch.tensor([[1.0, 1.0, -1.0, 1.0], [-1.0, 1.0, 1.0, -1.0]])
    z = centres[torch.arange(12) % 2] + 0.4 * torch.randn(12, 4, generator=generator(seed))
    best = max(combinations(range(16), 2), key=lambda pair: total_score(z, every_pattern(4)[list(pair)]))
    found = lloyd(z, 2, generator(seed))
    assert total_score(z, found) == pytest.approx(total_score(z, every_pattern(4)[list(best)]), rel=1e-6)
    assert sorted(found.tolist()) == sorted(every_pattern(4)[list(best)].tolist())


@pytest.mark.parametrize("seed", range(4))
def test_without_clusters_it_is_near_brute_force_and_nothing_single_is_better(seed: int) -> None:
    z = torch.randn(40, 4, generator=generator(seed))
    found = lloyd(z, 3, generator(seed))
    best = max(total_score(z, every_pattern(4)[list(three)]) for three in combinations(range(16), 3))
    assert total_score(z, found) > 0.75 * best, "a local optimum, but no bad one"
    taken = (z @ (2.0 * found - 1).T).argmax(-1)
    for index in range(3):
        members = z[taken == index].sum(0)
        own = float(members @ (2.0 * found[index] - 1))
        assert own == pytest.approx(float((every_pattern(4) * 2.0 - 1).mv(members).max()), rel=1e-5)


def test_restarts_end_no_worse_than_the_first_of_them_and_somewhere_better() -> None:
    gained = []
    for seed in range(8):
        z = torch.randn(60, 6, generator=generator(seed))
        once, best = lloyd(z, 5, generator(seed)), best_of_restarts(z, 5, generator(seed))
        gained.append(total_score(z, best) - total_score(z, once))
    assert min(gained) >= 0
    assert max(gained) > 0


def test_empty_patterns_are_seeded_from_the_worst_served_tokens() -> None:
    """A start of three equal patterns: two must move, and to the tokens that lose most."""
    z = torch.cat([torch.ones(20, 3), torch.tensor([[-5.0, -5.0, 5.0], [5.0, -5.0, -5.0], [-0.1, 1.0, 1.0]])])
    found = lloyd(z, 3, generator(0), start=torch.ones(3, 3, dtype=torch.bool))
    assert sorted(found.tolist()) == [[False, False, True], [True, False, False], [True, True, True]]


def test_dense_and_empty_patterns_are_found_where_tokens_want_them() -> None:
    z = torch.cat([torch.rand(9, 5) + 0.1, -torch.rand(9, 5) - 0.1])
    assert sorted(lloyd(z, 2, generator(0)).tolist()) == [[False] * 5, [True] * 5]


def test_a_pattern_that_a_massive_token_takes_runs_its_group() -> None:
    """Among a hundred tokens that skip group 1 one that runs it is outvoted, unless it cannot do without it."""
    z = torch.tensor([[3.0, -1.0, 2.0]]).repeat(101, 1)
    z[7, 1] = 0.5
    assert lloyd(z, 1, generator(0)).tolist() == [[True, False, True]]
    kept = lloyd(z, 1, generator(0), massive=torch.tensor([[7, 1]]))
    assert kept.tolist() == [[True, True, True]]


@pytest.mark.parametrize("segments", [1, 2])
def test_massive_contributions_are_found_and_every_pattern_taken_runs_them(segments: int) -> None:
    routed = tiny_routed(mode="patterns", patterns=PatternPlan(2, segments, "ffn"))
    decision = routed.decisions[1, "ffn"]
    _, down = routed.part_modules(routed.decoder_layers()[1], "ffn")
    width = down.weight.shape[1] // decision.router.groups
    with routed.bits():
        assert not len(observe(routed, text())[decision].massive)
        with torch.no_grad():
            down.weight[:, 2 * width : 3 * width] *= 1e4
        observed = observe(routed, text())[decision]
    assert len(observed.massive) > 0
    assert observed.massive[:, 1].unique().tolist() == [2]
    fit_codebooks(routed, dict.fromkeys(codebooks_of(routed), observed), seed=0)
    assert decision.codebook is not None
    assert decision.codebook.decide(observed.z)[observed.massive[:, 0], 2].all()


def test_padding_is_not_observed_and_tokens_are_counted_on_over_the_batches() -> None:
    """Three sequences padded on the right and two whole ones are what the five alone are, one behind the other."""
    routed = tiny_routed(mode="patterns", patterns=PatternPlan(2, 1, "ffn"))
    decision = routed.decisions[1, "ffn"]
    _, down = routed.part_modules(routed.decoder_layers()[1], "ffn")
    width = down.weight.shape[1] // decision.router.groups
    with torch.no_grad():
        down.weight[:, 2 * width : 3 * width] *= 1e4
    prompts = [random_ids(1, length, seed=length) for length in (20, 9, 14, 12)]
    prompts.append(random_ids(1, 12, seed=99))
    lengths = torch.tensor([prompt.shape[1] for prompt in prompts[:3]])
    ragged = torch.cat([torch.nn.functional.pad(prompt, (0, 20 - prompt.shape[1]), value=7) for prompt in prompts[:3]])
    together = [(ragged, torch.arange(20) < lengths[:, None]), (torch.cat(prompts[3:]), None)]
    with routed.bits():
        found = observe(routed, together)[decision]
        expected = observe(routed, [(prompt, None) for prompt in prompts])[decision]
    torch.testing.assert_close(found.z, expected.z, rtol=1e-4, atol=1e-4)
    assert len(found.z) == 20 + 9 + 14 + 12 + 12
    assert torch.equal(found.massive, expected.massive)
    assert {int(token) // 43 for token in found.massive[:, 0]} == {0, 1}, "both batches have massive tokens"


def test_more_patterns_than_tokens_are_refused() -> None:
    with pytest.raises(UsageError, match="9 patterns cannot be found in 8 tokens"):
        lloyd(torch.randn(8, 6), 9, generator(0))


def text() -> list[Batch]:
    return [(random_ids(4, 32, seed=i), None) for i in range(4)]


def converted(match: Match, count: int = 3, segments: int = 1) -> Conversion:
    routed = tiny_routed(mode="patterns", patterns=PatternPlan(count, segments, "ffn"))
    return convert(routed, text(), match=match)


def test_the_budget_is_matched_on_the_sample() -> None:
    off, globally = converted("none"), converted("global")
    assert off.after == pytest.approx(off.unmatched) and {u.shift for u in off.uses} == {0.0}
    assert abs(off.after["ffn"] - off.before["ffn"]) > 0.02, "a case without anything to match"
    assert globally.after["ffn"] == pytest.approx(globally.before["ffn"], abs=0.01)
    assert len({u.shift for u in globally.uses if u.part == "ffn"}) == 1


def test_each_layer_is_matched_if_asked() -> None:
    found = converted("layer")
    for use in found.uses:  # one of three patterns more or less is a large step
        assert use.skipped == pytest.approx(use.bits_skipped, abs=0.05)
        assert abs(use.skipped - use.bits_skipped) <= abs(use.skipped_before - use.bits_skipped)
    assert len({use.shift for use in found.uses if use.part == "ffn"}) == 2


def test_agreement_histogram_and_rates_are_those_of_the_masks() -> None:
    routed = tiny_routed(mode="patterns", patterns=PatternPlan(3, 1, "all"))
    with routed.bits():
        z = collect_margins(routed, text())
    found = convert(routed, text(), match="none")
    assert (found.tokens, found.measured_tokens) == (4 * 4 * 32, 2 * 4 * 32)
    for use in found.uses:
        decision = routed.decisions[use.layer, use.part]
        assert decision.codebook is not None
        agree = (decision.codebook.decide(z[decision]) == (z[decision] >= 0)).float().mean()
        assert use.agreement == pytest.approx(float(agree))
        assert sum(use.counts[0]) == found.measured_tokens
        run = sum(n * size for n, size in zip(use.counts[0], use.sizes[0], strict=True))
        assert use.skipped == pytest.approx(1 - run / (found.measured_tokens * decision.router.groups), abs=1e-5)
    assert found.achieved["skip_rate"]["ffn"] == pytest.approx(found.after["ffn"], abs=1e-5)


def test_more_patterns_agree_more_and_all_of_them_fully() -> None:
    def agreement(count: int, segments: int = 1) -> float:
        uses = converted("none", count, segments).uses
        return sum(u.agreement for u in uses if u.part == "ffn")

    two, eight = agreement(2), agreement(8)
    assert two < eight < agreement(16) == 2.0
    assert agreement(2) < agreement(2, segments=2)


def test_a_refit_goes_on_from_the_patterns_it_has() -> None:
    routed = tiny_routed(mode="patterns", patterns=PatternPlan(3, 2, "ffn"))
    with routed.bits():
        observed = observe(routed, text())
    fit_codebooks(routed, observed, seed=0, rounds=50)
    before = {d: book.bits.clone() for d, book in codebooks_of(routed).items()}
    fit_codebooks(routed, observed, seed=5, refit=True)
    assert all(torch.equal(book.bits, before[d]) for d, book in codebooks_of(routed).items())

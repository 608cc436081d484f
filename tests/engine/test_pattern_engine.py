"""Patterns in the engine: the choices and logits of the Hugging Face path, whatever the numbering and the segments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_pairs import Pair, make_pair, padded

from tiny_models import random_ids
from widecli.engine.fused import normalise
from widecli.engine.model import InferenceModel
from widecli.engine.patterns import PatternRouter, numbered
from widecli.engine.routing import RandomMasks
from widecli.engine.weights import Norm
from widecli.model.patterns import Codebook
from widecli.model.plan import PARTS, CodebookSize, PatternPlan
from widecli.model.router import Router

TOLERANCE = {"rtol": 0.0, "atol": 1e-4}
ONE, THREE = PatternPlan(5), PatternPlan(3, 2)


def pattern_pair(patterns: PatternPlan = ONE, plan: dict[str, Any] | None = None, **changes: Any) -> Pair:
    """8 FFN groups of 16 channels."""
    settings = {"mode": "patterns", "patterns": patterns, **(plan or {})}
    return make_pair(routed=True, plan=settings, **{"intermediate_size": 128, **changes})


@pytest.mark.parametrize(
    ("patterns", "plan", "changes"),
    [
        (ONE, {}, {}),
        (THREE, {}, {}),
        (PatternPlan(4, 8 // 2), {}, {}),  # all patterns of every segment
        (PatternPlan(4, parts="all"), {}, {}),  # attention with all of its patterns
        (PatternPlan(7, parts="all"), {"attention_group_size": 1}, {}),
        (PatternPlan(2, 2, "all"), {"attention_group_size": 1}, {}),
        (PatternPlan(3, parts="attention"), {"parts": "attention"}, {}),
        (ONE, {"tap": "normalised"}, {}),
        (THREE, {}, {"mlp_bias": True, "attention_bias": True}),
        (ONE, {}, {"family": "qwen3"}),
    ],
    ids=str,
)
def test_logits_are_those_of_the_hugging_face_path(
    patterns: PatternPlan, plan: dict[str, Any], changes: dict[str, Any]
) -> None:
    pair = pattern_pair(patterns, plan, **changes)
    ids = random_ids(2, 13)
    expected = pair.reference(ids)
    session = pair.engine.session(2, 13)
    torch.testing.assert_close(session.prefill(ids), expected[:, -1], **TOLERANCE)
    torch.testing.assert_close(session.prefill(ids, chunk=5), expected[:, -1], **TOLERANCE)
    found = [session.prefill(ids[:, :3])]
    found += [session.decode(ids[:, t]) for t in range(3, 13)]
    torch.testing.assert_close(torch.stack(found, 1), expected[:, 2:], **TOLERANCE)


def test_more_rows_than_a_tile_pick_their_own_patterns() -> None:
    pair = pattern_pair(THREE, max_position_embeddings=300)
    ids = random_ids(1, 290)
    expected = pair.reference(ids)[:, -1]
    torch.testing.assert_close(pair.engine.session(1, 290).prefill(ids), expected, **TOLERANCE)


@pytest.mark.parametrize("patterns", [ONE, THREE], ids=str)
def test_a_ragged_batch_runs_and_counts_its_own_tokens_alone(patterns: PatternPlan) -> None:
    pair = pattern_pair(patterns)
    prompts = [random_ids(1, length, seed=length)[0] for length in (4, 11)]
    assert pair.routed is not None
    with pair.routed.tracing() as trace:
        expected = torch.cat([pair.reference(prompt[None])[:, -1] for prompt in prompts])
    session = pair.engine.session(2, 20)
    ids, lengths = padded(prompts)
    for chunk in (None, 3):
        session.reset_skipped()
        torch.testing.assert_close(session.prefill(ids, lengths, chunk=chunk), expected, **TOLERANCE)
        found = session.skipped()
        assert found is not None and found.tokens == trace.tokens == 15
        for part in PARTS:
            assert found.group_rates(part) == trace.group_rates(part)
    session.reset_skipped()
    session.prefill(ids[:, :1])
    for t in range(1, 11):
        session.active[0] = t < 4
        session.decode(ids[:, t])
    found = session.skipped()
    assert found is not None and found.summary(64) == trace.summary(64)


@pytest.mark.parametrize("patterns", [ONE, THREE], ids=str)
def test_weights_of_groups_that_no_pattern_runs_are_not_used(patterns: PatternPlan) -> None:
    pair = pattern_pair(patterns)
    assert pair.routed is not None
    for made in pair.routed.codebooks.values():
        bits = made["ffn"].bits.clone()
        bits[0, :, 0] = False  # group 0 of the layer
        made["ffn"].set_bits(bits)
    for layer in pair.model.model.layers:
        layer.mlp.gate_proj.weight.data[:16] = torch.nan
        layer.mlp.up_proj.weight.data[:16] = torch.nan
    engine = InferenceModel.from_routed(
        pair.model, pair.routed.plan, pair.routed.routers, codebooks=pair.routed.codebooks
    )
    session = engine.session(2, 12)
    assert session.prefill(random_ids(2, 9)).isfinite().all() and session.decode().isfinite().all()


@pytest.mark.parametrize("size", [CodebookSize(1, 9, 6), CodebookSize(3, 4, 4)], ids=str)
def test_a_row_picks_the_pattern_that_its_codebook_picks(size: CodebookSize) -> None:
    generator = torch.Generator().manual_seed(3)
    codebook, router = Codebook(size), Router(32, size.segments * size.width, 4)
    codebook.reset(generator)
    for parameter in router.parameters():
        parameter.data.normal_(generator=generator)
    router.rescale(torch.rand(32, generator=generator) + 0.5)
    x = torch.randn(200, 32, generator=generator)
    norm = Norm(torch.rand(32, generator=generator), 1e-5)
    logits = router(x)
    expected = codebook.decide(logits[..., 0] - logits[..., 1])
    for masked in (False, True):
        normalised, choice = PatternRouter(router, codebook, norm).choose(x, masked)
        torch.testing.assert_close(normalised, normalise(x, norm))
        assert (choice.made is not None) == masked
        assert torch.equal(choice.mask, expected)
        assert choice.ids.dtype is torch.int32 and len(choice.ids.unique()) > 2
    assert choice.patterns.shape == (size.segments, size.count + 1, size.width) and not choice.patterns[:, -1].any()
    # neighbours are nearer to each other than in the codebook's own order
    bits, order = numbered(codebook.bits)
    assert torch.equal(bits[:, :-1], torch.stack([b[o] for b, o in zip(codebook.bits, order, strict=True)]))

    def steps(patterns: torch.Tensor) -> int:
        return int((patterns[:, 1:] != patterns[:, :-1]).sum())

    assert steps(bits[:, :-1]) < steps(codebook.bits)


def test_where_all_scores_are_equal_the_pattern_that_the_codebook_has_first_runs() -> None:
    codebook, router = Codebook(CodebookSize(2, 7, 5)), Router(32, 10, 4)
    codebook.reset(torch.Generator().manual_seed(5))
    codebook.set_bits(codebook.bits[:, [3, 0, 1, 2, 4, 5, 6]])
    for parameter in router.parameters():
        parameter.data.zero_()
    x = torch.randn(9, 32)
    logits = router(x)
    _, choice = PatternRouter(router, codebook, Norm(torch.ones(32), 1e-5)).choose(x, masked=False)
    assert torch.equal(choice.mask, codebook.decide(logits[..., 0] - logits[..., 1]))
    assert torch.equal(choice.mask, codebook.bits[:, 0].flatten().expand(9, -1))


def test_random_patterns_skip_their_share_whatever_the_routers_say() -> None:
    pair = pattern_pair(PatternPlan(40), plan={"ffn_group_size": 16}, intermediate_size=256)
    assert pair.routed is not None
    masks = RandomMasks(0.75, seed=3)
    routed = pair.routed
    engine = InferenceModel.from_routed(pair.model, routed.plan, routed.routers, masks, routed.codebooks)
    session = engine.session(8, 64)
    first = session.prefill(random_ids(8, 60)).clone()
    trace = session.skipped()
    assert trace is not None and trace.skip_rate().ffn == pytest.approx(0.75, abs=0.04)
    assert torch.equal(session.prefill(random_ids(8, 60)), first), "the same patterns again"
    masks.skip(0.25)
    session.reset_skipped()
    assert not torch.equal(session.prefill(random_ids(8, 60)), first)
    trace = session.skipped()
    assert trace is not None and trace.skip_rate().ffn == pytest.approx(0.25, abs=0.04)
    masks.skip(0.75)
    assert torch.equal(session.prefill(random_ids(8, 60)), first)
    session.decode()
    session.reset_skipped()
    masks.skip(0.25)  # seen by the masks of a decode step too
    assert session.decode().isfinite().all()
    trace = session.skipped()
    assert trace is not None and trace.skip_rate().ffn == pytest.approx(0.25, abs=0.1)

"""What a run takes of a card, by how the backbone is held and how many cards there are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_models import tiny_routed
from widecli.model.backbone import load_shape
from widecli.model.plan import PARTS, CompensationPlan, RoutingPlan
from widecli.model.shapes import SHAPES
from widecli.recipe.load import load_text, resolve
from widecli.recipe.schema import Recipe
from widecli.train.estimate import (
    USABLE,
    Estimate,
    compensation_parameters,
    efficiency,
    estimate,
    fitting_micro_batch,
    remedies,
)
from widecli.train.scaling import LAYOUTS, estimated

GIB = 2**30
SHAPE = SHAPES["llama-3.1-8b"]
LAYER = 218_103_808 * 2  # bytes of one layer's weights in bf16
OUTSIDE = 2 * 128256 * 4096 * 2  # embedding and head


def recipe(*changes: str) -> Recipe:
    return resolve("llama-3.1-8b_s50_g64", changes).recipe


def figures(*changes: str, **how: Any) -> Estimate:
    made = recipe(*changes)
    plan = RoutingPlan.from_section(made.routing, SHAPE)
    return estimate(made, SHAPE, plan, value_bytes=2, **how)


def changes_to_fit(made: Recipe, gib: float, ranks: int) -> list[str] | None:
    plan = RoutingPlan.from_section(made.routing, SHAPE)
    return remedies(made, SHAPE, plan, gib * GIB, value_bytes=2, ranks=ranks)


def test_a_dealt_backbone_takes_its_share_the_ends_and_three_layers() -> None:
    whole, dealt = figures(ranks=4), figures("distributed.shard=full", ranks=4)
    assert whole.weights_bytes == 32 * LAYER + OUTSIDE
    assert dealt.weights_bytes == 32 * LAYER / 4 + OUTSIDE + 3 * LAYER
    assert dealt.host_bytes == 0 and dealt.activations_bytes == whole.activations_bytes


def test_an_offloaded_backbone_lies_beside_the_card() -> None:
    alone, four = (figures("distributed.offload=true", ranks=n) for n in (1, 4))
    assert alone.weights_bytes == four.weights_bytes == OUTSIDE + 3 * LAYER
    assert alone.host_bytes == 32 * LAYER and four.host_bytes == 8 * LAYER


def test_auto_deals_what_takes_more_than_its_part_of_a_card() -> None:
    large, small = (figures(ranks=2, card_bytes=gib * GIB) for gib in (80, 24))
    assert large.weights_bytes == 32 * LAYER + OUTSIDE > small.weights_bytes


def test_ranks_share_the_batch_and_the_time() -> None:
    one, two = figures(), figures(ranks=2)
    assert two.flops == one.flops and two.seconds(1e15) == one.seconds(1e15) / 2
    assert two.activations_bytes < 0.6 * one.activations_bytes


def test_nothing_is_to_change_where_it_fits() -> None:
    assert changes_to_fit(recipe(), 139, 1) == []


@pytest.mark.parametrize(("gib", "ranks"), [(80, 1), (40, 1), (24, 1), (40, 4), (16, 8)])
def test_the_changes_named_do_make_it_fit(gib: float, ranks: int) -> None:
    without = recipe("train.activation_checkpointing=false")
    changes = changes_to_fit(without, gib, ranks)
    assert changes
    assert figures("train.activation_checkpointing=false", ranks=ranks, card_bytes=gib * GIB).memory_bytes > gib * GIB
    tried = figures(*changes, ranks=ranks, card_bytes=gib * GIB) if changes else None
    named = {c.split("=")[0] for c in changes}
    if "train.activation_checkpointing" not in named:
        tried = figures("train.activation_checkpointing=false", *changes, ranks=ranks, card_bytes=gib * GIB)
    assert tried is not None and tried.memory_bytes <= USABLE * gib * GIB


def test_the_cheapest_change_comes_first() -> None:
    assert changes_to_fit(recipe("train.activation_checkpointing=false"), 139, 1) == ["train.micro_batch_size=8"]
    offloaded = changes_to_fit(recipe(), 12, 1)
    assert offloaded is not None and "distributed.offload=true" in offloaded


def test_what_no_change_makes_fit_is_said() -> None:
    assert changes_to_fit(recipe(), 4, 8) is None


def test_a_rank_takes_the_largest_micro_batch_that_fits() -> None:
    made = recipe("train.activation_checkpointing=false")
    plan = RoutingPlan.from_section(made.routing, SHAPE)
    sizes = [
        fitting_micro_batch(made, SHAPE, plan, gib * GIB, value_bytes=2, ranks=2) for gib in (20, 60, 80, 139, 1000)
    ]
    assert sizes == sorted(sizes) and sizes[0] == 1 and sizes[-1] == 8


@pytest.mark.parametrize(
    ("mode", "held"),
    [
        ("wide", CompensationPlan()),
        ("wide", CompensationPlan(mean=True, rank=0)),
        ("wide", CompensationPlan(mean=False, rank=5)),
        ("token", CompensationPlan(rank=4)),
        ("layer", CompensationPlan(rank=4)),
        ("wide", None),
    ],
)
def test_compensation_has_the_parameters_of_the_model_that_is_made(mode: str, held: CompensationPlan | None) -> None:
    routed = tiny_routed(mode=mode, compensation=held)
    counted = sum(p.numel() for p in routed.compensations.parameters())
    assert compensation_parameters(routed.shape, routed.plan) == counted
    assert (counted > 0) == (held is not None)
    made = estimate(Recipe(), routed.shape, routed.plan, value_bytes=2)
    assert made.compensation_parameters == counted
    assert made.router_parameters == sum(p.numel() for p in routed.routers.parameters())


def compensated(held: CompensationPlan | None, *changes: str, **how: Any) -> Estimate:
    made = recipe(*changes)
    return estimate(made, SHAPE, RoutingPlan.from_section(made.routing, SHAPE, held), value_bytes=2, **how)


def test_compensation_takes_optimiser_copies_flops_and_activations() -> None:
    rank, width, held = 32, SHAPE.hidden_size, CompensationPlan()
    bare, whole = compensated(None), compensated(held)
    plan = RoutingPlan.from_section(recipe().routing, SHAPE)
    groups = sum(layer.groups(part) for layer in plan.layers(SHAPE) for part in PARTS)
    parts = 2 * SHAPE.num_hidden_layers
    parameters = (groups + 2 * rank * parts) * width
    assert whole.trainable_bytes - bare.trainable_bytes == 4 * 4 * parameters
    passes = 3 if recipe().train.activation_checkpointing else 2
    assert whole.flops - bare.flops == pytest.approx(2 * parameters * passes * whole.tokens)
    assert whole.activations_bytes > bare.activations_bytes and whole.weights_bytes == bare.weights_bytes
    messages = [compensated(held, ranks=n).trainable_bytes for n in (1, 2)]
    assert messages[1] == 1.5 * messages[0]


def test_frozen_routers_freeze_compensation_too() -> None:
    frozen = [compensated(held, "lora.freeze_routers=true", lora=True) for held in (None, CompensationPlan())]
    assert frozen[0].trainable_bytes == frozen[1].trainable_bytes > 0


def test_a_teacher_adds_a_dense_pass_in_both_stages_and_only_one() -> None:
    def flops(*changes: str, lora: bool = False) -> float:
        return compensated(None, *changes, lora=lora).flops

    one_pass = flops("train.distill=0.3") - flops()
    assert flops() / 4 < one_pass < flops() / 2
    assert flops("train.distill=0.3", lora=True) - flops(lora=True) == one_pass
    both = flops("train.distill=0.3", "lora.objective=distill", lora=True)
    assert both == flops("lora.objective=distill", lora=True) == flops(lora=True) + one_pass


RECORDS = sorted((Path(__file__).parents[2] / "reports" / "scaling").glob("*.json"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_the_measured_peaks_and_speeds_of_an_8b_model_on_one_and_two_cards_are_met(record: Path) -> None:
    document = json.loads(record.read_text())
    layouts = {layout.name: layout for layout in LAYOUTS}
    assert document["results"]
    for measured in document["results"]:
        recipe = load_text(json.dumps(document["recipe"]))
        found = estimated(recipe, layouts[measured["layout"]], torch.bfloat16, measured["ranks"])
        assert found.memory_bytes == pytest.approx(measured["peak_memory_bytes"], rel=0.15), measured["layout"]
        if "offloaded" not in measured["layout"]:  # there the weights' way to the card takes the time
            seconds = found.seconds(790e12 * efficiency(load_shape(recipe.model), "cuda", compiled=True))
            assert found.tokens / seconds == pytest.approx(measured["tokens_per_second"], rel=0.15), measured["layout"]


def test_there_are_records_of_one_and_of_two_cards() -> None:
    assert {json.loads(path.read_text())["results"][0]["ranks"] for path in RECORDS} == {1, 2}


def test_a_step_of_a_wider_model_reaches_more_of_the_peak() -> None:
    narrow, middle, wide = (
        efficiency(replace(SHAPE, hidden_size=width), "cuda", compiled=True) for width in (256, 2048, 8192)
    )
    assert 0.2 < narrow < middle < wide < 0.75
    assert efficiency(SHAPE, "cuda", compiled=False) < wide
    assert efficiency(SHAPE, "cpu", compiled=True) == efficiency(SHAPE, "cpu", compiled=False)

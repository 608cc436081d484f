from __future__ import annotations

import json
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tiny_models import tiny_config
from widecli.errors import UsageError
from widecli.model.plan import LayerOverride, LayerPlan, ModelShape, RoutingPlan
from widecli.recipe.schema import LayerSection, RoutingSection

SMOLLM2 = ModelShape(30, 576, 1536, 9, 3, 64, 49152)
LLAMA_8B = ModelShape(32, 4096, 14336, 32, 8, 128, 128256)


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    kv_heads = draw(st.integers(1, 8))
    heads = kv_heads * draw(st.integers(1, 12))
    width = 16 * draw(st.integers(1, 200))
    return ModelShape(draw(st.integers(1, 6)), 64, width, heads, kv_heads, 16, 100)


@given(shapes())
@settings(deadline=None)
def test_valid_attention_sizes_are_exactly_those_that_divide_the_heads_and_respect_gqa(shape: ModelShape) -> None:
    heads, ratio = shape.num_attention_heads, shape.query_heads_per_kv_head
    valid = shape.valid_attention_group_sizes()
    for size in range(1, heads + 2):
        starts = range(0, heads, size)
        whole = heads % size == 0
        # respects GQA: no group starts or ends inside a KV group unless it lies inside one altogether
        inside = all(start // ratio == (start + size - 1) // ratio for start in starts)
        covers = all(start % ratio == 0 and (start + size) % ratio == 0 for start in starts)
        assert (size in valid) == (whole and (inside or covers))
    assert ratio in valid and heads in valid


@given(shapes(), st.integers(1, 4000))
@settings(deadline=None)
def test_an_ffn_group_size_is_valid_when_it_is_a_multiple_of_16_that_divides_the_width(
    shape: ModelShape, size: int
) -> None:
    fits = size % 16 == 0 and shape.intermediate_size % size == 0
    plan = RoutingPlan(attention_group_size=shape.query_heads_per_kv_head, ffn_group_size=size)
    if fits:
        plan.validate(shape)
        assert plan.layer(shape, 0).ffn_groups * size == shape.intermediate_size
    else:
        with pytest.raises(UsageError, match=f"FFN group size {size} must be a multiple of 16"):
            plan.validate(shape)


@given(shapes(), st.data())
@settings(deadline=None)
def test_groups_of_a_valid_plan_cover_every_head_and_channel_once(shape: ModelShape, data: st.DataObject) -> None:
    attention = data.draw(st.sampled_from(shape.valid_attention_group_sizes()))
    ffn = data.draw(st.sampled_from(shape.valid_ffn_group_sizes()))
    plan = RoutingPlan(attention, ffn)
    plan.validate(shape)
    assert len(plan.layers(shape)) == shape.num_hidden_layers
    for layer in plan.layers(shape):
        assert layer.attention_groups * attention == shape.num_attention_heads
        assert layer.ffn_groups * ffn == shape.intermediate_size


OVERRIDES = st.builds(
    LayerOverride,
    parts=st.sampled_from([None, "all", "attention", "ffn", "none"]),
    attention_group_size=st.sampled_from([None, 1, 3, 9]),
    ffn_group_size=st.sampled_from([None, 16, 96, 1536]),
)


@given(
    st.dictionaries(st.integers(0, 29), OVERRIDES, max_size=5),
    st.sampled_from(["wide", "token", "layer"]),
    st.sampled_from(["all", "attention", "ffn"]),
)
@settings(deadline=None)
def test_a_plan_survives_json_and_overrides_reach_their_layer_alone(overrides, mode, parts) -> None:  # type: ignore[no-untyped-def]
    assume(mode != "layer" or parts == "all")
    plan = RoutingPlan(3, 64, mode=mode, parts=parts, overrides=overrides)
    plan.validate(SMOLLM2)
    again = RoutingPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    plain = RoutingPlan(3, 64, mode=mode, parts=parts).layer(SMOLLM2, 0)
    for index in range(30):
        layer = plan.layer(SMOLLM2, index)
        if index not in overrides:
            assert layer == plain
            continue
        override = overrides[index]
        routed = override.parts or parts
        assert (layer.attention_groups > 0) == (routed in ("all", "attention"))
        assert (layer.ffn_groups > 0) == (routed in ("all", "ffn"))
        if mode == "wide" and layer.ffn_groups:
            assert layer.ffn_groups == 1536 // (override.ffn_group_size or 64)
        if mode == "wide" and layer.attention_groups:
            assert layer.attention_groups == 9 // (override.attention_group_size or 3)


def test_the_default_attention_group_is_one_gqa_group() -> None:
    assert RoutingPlan.from_section(RoutingSection(), SMOLLM2).attention_group_size == 3
    assert RoutingPlan.from_section(RoutingSection(), LLAMA_8B).attention_group_size == 4


def test_token_mode_has_one_group_a_part_and_layer_mode_one_decision() -> None:
    token = RoutingPlan.from_section(RoutingSection(mode="token"), SMOLLM2).layer(SMOLLM2, 0)
    layer = RoutingPlan.from_section(RoutingSection(mode="layer"), SMOLLM2).layer(SMOLLM2, 0)
    assert token == LayerPlan(1, 1, shared=False)
    assert layer == LayerPlan(1, 1, shared=True)


def test_token_mode_does_not_ask_the_group_size_to_fit() -> None:
    RoutingPlan(4, 60, mode="token").validate(LLAMA_8B)


@pytest.mark.parametrize("parts", ["attention", "ffn"])
def test_layer_mode_with_one_part_is_refused(parts: str) -> None:
    with pytest.raises(UsageError, match=f"routing.mode=layer .* routing.parts={parts}"):
        RoutingPlan.from_section(RoutingSection(mode="layer", parts=parts), SMOLLM2)  # type: ignore[arg-type]


def test_a_bad_attention_group_size_lists_the_valid_ones() -> None:
    with pytest.raises(UsageError, match=r"attention group size 2 .* 9 query heads with 3 KV heads; .*: 1, 3, 9$"):
        RoutingPlan.from_section(RoutingSection(attention_group_size=2), SMOLLM2)


def test_a_bad_ffn_group_size_lists_the_valid_ones() -> None:
    with pytest.raises(UsageError, match=r"size 80 .* 1536; valid sizes: 16, 32, 48, 64, 96, 128, 192, 256, 384"):
        RoutingPlan.from_section(RoutingSection(ffn_group_size=80), SMOLLM2)


def test_a_group_size_of_a_part_that_is_not_routed_need_not_fit() -> None:
    odd = ModelShape(2, 64, 200, 4, 2, 16, 100)  # no multiple of 16 divides 200
    RoutingPlan.from_section(RoutingSection(parts="attention"), odd)
    RoutingPlan.from_section(RoutingSection(layers={i: LayerSection(parts="none") for i in range(2)}), odd)
    with pytest.raises(UsageError, match="FFN group size 64"):
        RoutingPlan.from_section(RoutingSection(layers={0: LayerSection(parts="none")}), odd)


def test_an_override_of_a_layer_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="names layer 30, but the model has layers 0 to 29"):
        RoutingPlan.from_section(RoutingSection(layers={30: LayerSection(parts="none")}), SMOLLM2)


def test_an_override_with_a_size_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="FFN group size 100"):
        RoutingPlan.from_section(RoutingSection(layers={3: LayerSection(ffn_group_size=100)}), SMOLLM2)


def test_head_dim_comes_from_the_config_when_it_is_there() -> None:
    assert ModelShape.from_config(tiny_config("qwen3")).head_dim == 16  # D / heads would be 8
    assert ModelShape.from_config(tiny_config("llama")).head_dim == 8


def test_a_config_without_kv_heads_is_plain_multi_head() -> None:
    config = tiny_config("llama", num_key_value_heads=None)
    shape = ModelShape.from_config(config)
    assert shape.num_key_value_heads == shape.num_attention_heads
    assert math.prod((shape.query_heads_per_kv_head, shape.num_key_value_heads)) == shape.num_attention_heads

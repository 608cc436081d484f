"""Shapes become configs of their family, and random weights that compute."""

from __future__ import annotations

import pytest
import torch

from widecli.engine.model import InferenceModel
from widecli.engine.weights import take_weights
from widecli.errors import UsageError
from widecli.model.plan import ModelShape
from widecli.model.shapes import SHAPES
from widecli.profiling.shapes import config_of_shape, random_model


@pytest.mark.parametrize("name", SHAPES)
def test_every_known_shape_has_its_config(name: str) -> None:
    config = config_of_shape(name)
    assert ModelShape.from_config(config) == SHAPES[name]
    assert config.max_position_embeddings >= 8192


def test_a_hub_id_and_sizes_by_hand_are_understood() -> None:
    assert ModelShape.from_config(config_of_shape("meta-llama/Llama-3.1-8B-Instruct")) == SHAPES["llama-3.1-8b"]
    assert ModelShape.from_config(config_of_shape("1024x4096x3")) == ModelShape(3, 1024, 4096, 8, 2, 128, 32000)
    assert config_of_shape("256x512").num_hidden_layers == 32


@pytest.mark.parametrize(
    ("name", "words"),
    [("llama-9", "llama-3.1-8b.*qwen3-8b.*HIDDENx"), ("0x16", "no model shape"), ("100x256", "multiple of 128")],
)
def test_strange_shapes_are_refused(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        config_of_shape(name)


@pytest.mark.parametrize("family", ["llama-3.2-1b", "qwen3-8b", "mistral-7b-v0.3"])
def test_random_weights_are_those_of_the_family(family: str) -> None:
    config = config_of_shape(family)
    config.num_hidden_layers, config.layer_types = 2, ["full_attention"] * 2
    config.hidden_size, config.intermediate_size, config.vocab_size = 64, 96, 100
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 16
    weights = take_weights(random_model(config, torch.device("cpu"), torch.float32))
    tied = weights.lm_head.weight.data_ptr() == weights.embedding.data_ptr()
    assert tied == (family == "llama-3.2-1b")
    assert (weights.layers[0].query_norm is not None) == (family == "qwen3-8b")
    assert weights.layers[1].down.weight.std() == pytest.approx(0.02, rel=0.1)
    assert weights.window is None
    model = InferenceModel.from_dense(weights)
    logits = model.session(1, 12).prefill(torch.arange(10)[None])
    assert logits.isfinite().all() and logits.std() > 0
    positions = torch.arange(4)[None]
    cos, _ = weights.rotary(torch.empty(0), positions)
    assert cos[0, 0].eq(1).all() and cos[0, 3, 0] == pytest.approx(-0.98999, abs=1e-4)  # cos 3

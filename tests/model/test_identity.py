from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from tiny_models import FAMILIES, tiny_config, tiny_model
from widecli.model.identity import BackboneIdentity, config_hash, config_settings, weights_hash


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_loaded_in_fp32_and_in_bf16_are_the_same_model(family: str) -> None:
    model = tiny_model(family)
    in_fp32 = weights_hash(model)
    assert in_fp32 is not None
    assert weights_hash(model.to(torch.bfloat16)) == in_fp32


def test_fp16_weights_have_no_fingerprint() -> None:
    assert weights_hash(tiny_model().to(torch.float16)) is None


def test_other_weights_have_another_fingerprint() -> None:
    assert weights_hash(tiny_model(seed=0)) != weights_hash(tiny_model(seed=1))


def test_one_changed_layer_is_noticed() -> None:
    model = tiny_model()
    before = weights_hash(model)
    model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    assert weights_hash(model) != before


@pytest.mark.parametrize(
    "changes", [{"intermediate_size": 96}, {"num_key_value_heads": 4}, {"rms_norm_eps": 1e-3}, {"hidden_act": "gelu"}]
)
def test_a_config_hash_tells_sizes_and_layer_settings_apart(changes: dict[str, object]) -> None:
    assert config_hash(tiny_config()) != config_hash(tiny_config(**changes))
    assert config_hash(tiny_config()) == config_hash(tiny_config())


def test_families_of_the_same_size_differ() -> None:
    assert config_hash(tiny_config("llama")) != config_hash(tiny_config("mistral"))


def test_mismatch_says_what_differs_and_ignores_where_the_folder_lies() -> None:
    one = BackboneIdentity("a/model", "main", "c" * 16, "w" * 16)
    assert one.mismatch(replace(one, id="/elsewhere", revision=None)) is None
    assert one.mismatch(replace(one, weights_hash=None)) is None
    assert "configuration" in (one.mismatch(replace(one, config_hash="d")) or "")
    assert "weights" in (one.mismatch(replace(one, weights_hash="x")) or "")


ROPE = {"rope_theta": 10000.0, "rope_type": "default"}


def identity(family: str = "llama", **changes: Any) -> BackboneIdentity:
    # as a checkpoint gives it back
    config = json.loads(json.dumps(asdict(BackboneIdentity.of("m", None, tiny_config(family, **changes), "w"))))
    return BackboneIdentity(**config)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("llama", {"rope_parameters": ROPE | {"rope_theta": 100.0}}, "rope_parameters.rope_theta=100.0 instead of 1"),
        ("llama", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 2.0}}, "rope_parameters.rope_type"),
        ("llama", {"rms_norm_eps": 1e-3}, "rms_norm_eps=0.001 instead of 1e-06"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act=gelu instead of silu"),
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ("llama", {"num_attention_heads": 8}, "head_dim=4 instead of 8"),
        ("mistral", {"sliding_window": 64}, "sliding_window=64 instead of 5"),
        ("mistral", {"sliding_window": None}, "sliding_window=None instead of 5"),
        ("qwen3", {"head_dim": 8}, "head_dim=8 instead of 16"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers=[1, 1] instead of [1, 0]"),
    ],
)
def test_a_config_that_computes_something_else_is_another_model(family: str, changes: Any, said: str) -> None:
    one, other = identity(family), identity(family, **changes)
    assert f"its config has {said}" in (one.mismatch(other) or "")
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    "changes",
    [
        {"bos_token_id": 5, "eos_token_id": 7, "pad_token_id": 3},
        {"use_cache": False},
        {"dtype": "bfloat16"},
        {"initializer_range": 0.1},
        {"attention_dropout": 0.5},
        {"max_position_embeddings": 4096},
        {"architectures": ["LlamaForCausalLM"]},
        {"_name_or_path": "elsewhere"},
    ],
)
def test_a_config_that_computes_the_same_is_the_same_model(changes: dict[str, Any]) -> None:
    assert identity().mismatch(identity(**changes)) is None
    assert identity().fingerprint == identity(**changes).fingerprint


def test_the_longest_sequence_counts_where_the_frequencies_depend_on_it() -> None:
    rope = ROPE | {"rope_type": "dynamic", "factor": 2.0}
    long = identity(rope_parameters=rope, max_position_embeddings=4096)
    assert "max_position_embeddings" in (identity(rope_parameters=rope).mismatch(long) or "")


def test_keys_that_only_one_version_of_transformers_knows_are_no_difference() -> None:
    one = identity()
    assert one.settings is not None
    fewer = {key: value for key, value in one.settings.items() if key != "mlp_bias"}
    assert one.mismatch(replace(one, settings=fewer)) is None
    assert replace(one, settings=fewer | {"novelty": 3}).mismatch(one) is None
    assert one.mismatch(replace(one, settings=None)) is None, "checkpoints from before settings were kept"
    assert replace(one, settings=None).mismatch(one) is None


def test_settings_are_plain_values() -> None:
    settings = config_settings(tiny_config())
    assert json.loads(json.dumps(settings)) == settings
    assert settings["rope_parameters"]["rope_theta"] == 10000.0
    assert not {"dtype", "transformers_version", "attention_dropout", "bos_token_id"} & settings.keys()

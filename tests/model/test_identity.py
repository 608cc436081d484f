from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tiny_models import FAMILIES, tiny_config, tiny_model
from widecli.model.identity import BackboneIdentity, config_hash, weights_hash


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

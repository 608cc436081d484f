from __future__ import annotations

import pytest
import torch

from tiny_models import FAMILIES, tiny_model
from widecli.errors import UsageError
from widecli.model.families import family_of


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_the_table_has_the_modules_it_names(family: str) -> None:
    model = tiny_model(family)
    names = family_of(model)
    layer = model.get_submodule(names.layers)[0]
    for path in (names.attention_norm, names.ffn_norm, names.attention_output, names.ffn_output):
        layer.get_submodule(path)


def test_an_unsupported_architecture_is_refused_with_what_is_missing() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=10, n_positions=8))
    with pytest.raises(UsageError, match=r"'gpt2' is not supported yet \(supported: llama, .*missing: its row in"):
        family_of(model)


def test_a_llama_without_a_projection_is_refused_with_its_name() -> None:
    model = tiny_model()
    model.model.layers[0].mlp.down_proj = None
    del model.model.layers[0].mlp._modules["down_proj"]
    with pytest.raises(UsageError, match=r"lacks the modules that routing needs: mlp.down_proj"):
        family_of(model)


def test_something_without_a_config_is_no_model() -> None:
    with pytest.raises(AttributeError):
        family_of(torch.nn.Linear(2, 2))

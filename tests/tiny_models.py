"""Tiny random models of every supported family, and plans that suit them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from widecli.model.plan import RoutingPlan
from widecli.model.routed import RoutedModel

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
VOCABULARY = 96


def tiny_config(family: str = "llama", **changes: Any) -> Any:
    """2 layers, D 32, D' 64, 4 query heads on 2 KV heads; Qwen3 with a head_dim that is not D / heads."""
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,  # far from uniform: a wrong mask gives another number
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    if family == "qwen3":
        settings["head_dim"] = 16
    if family == "mistral":
        settings["sliding_window"] = 5
    if family == "smollm3":
        settings["no_rope_layers"] = [1, 0]
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3"}
    return getattr(transformers, f"{names[family]}Config")(**{**settings, **changes})


def tiny_model(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A frozen random model in evaluation mode; norms and biases are random too."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
    return model.eval().requires_grad_(False)


def tiny_plan(**changes: Any) -> RoutingPlan:
    """2 query heads and 16 channels a group, rank 4: 2 attention and 4 FFN groups a layer."""
    return RoutingPlan(**{"attention_group_size": 2, "ffn_group_size": 16, "rank": 4, **changes})


def tiny_routed(family: str = "llama", seed: int = 0, **changes: Any) -> RoutedModel:
    """A routed tiny model whose routers, biases included, are random: about half of all groups are skipped."""
    model = tiny_model(family, seed)
    routed = RoutedModel.attach(model, tiny_plan(**changes), seed=seed)
    shake_routers(routed, seed)
    return routed


def shake_routers(routed: RoutedModel, seed: int = 0) -> None:
    """Random router weights with biases."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in routed.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)


def random_ids(batch: int, length: int, seed: int = 0, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(2, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def byte_tokenizer() -> Any:
    """One token a byte, after `<s>` and `</s>`; pad is EOS, as in many real models. 258 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *letters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def save_model_folder(folder: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """A model folder as a person would have one: weights, config, tokenizer."""
    model = tiny_model(family, seed, vocab_size=258, tie_word_embeddings=True, **changes)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder

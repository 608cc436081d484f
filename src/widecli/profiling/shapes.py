"""Known models with random weights, made on the device itself: speed needs neither a download nor a checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from widecli.errors import UsageError
from widecli.model.families import family_of
from widecli.model.plan import ModelShape
from widecli.model.shapes import SHAPES, known_shape

HEAD_DIM = 128  # of a shape given by its sizes
VOCABULARY = 32000
LAYERS = 32
_SPREAD = 0.02  # of the random weights: activations stay finite through all layers


@dataclass(frozen=True)
class _Rest:
    """What a config needs beyond the sizes; `rope` as Hugging Face writes it."""

    family: str
    rope: dict[str, Any]
    max_tokens: int
    tied: bool = False


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _plain(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


_REST: dict[str, _Rest] = {
    "smollm2-135m": _Rest("llama", _plain(100000.0), 8192, tied=True),
    "llama-3.2-1b": _Rest("llama", _llama3(32.0), 131072, tied=True),
    "llama-3.2-3b": _Rest("llama", _llama3(32.0), 131072, tied=True),
    "llama-3.1-8b": _Rest("llama", _llama3(8.0), 131072),
    "qwen3-8b": _Rest("qwen3", _plain(1000000.0), 40960),
    "mistral-7b-v0.3": _Rest("mistral", _plain(1000000.0), 32768),
}


def config_of_shape(name: str) -> Any:
    """The Hugging Face config of a known model, or of `HIDDENxINTERMEDIATE[xLAYERS]`. Raises UsageError, listing."""
    import transformers

    shape = known_shape(name)
    rest = _Rest("llama", _plain(10000.0), 131072)
    if shape is not None:
        rest = next(_REST[key] for key, value in SHAPES.items() if value is shape)
    else:
        shape = _by_hand(name)
    kinds = {
        "llama": transformers.LlamaConfig,
        "qwen3": transformers.Qwen3Config,
        "mistral": transformers.MistralConfig,
    }
    more: dict[str, Any] = {"sliding_window": None} if rest.family == "mistral" else {}
    return kinds[rest.family](
        **asdict(shape),  # in a config's own words
        max_position_embeddings=rest.max_tokens,
        rope_parameters=rest.rope,
        tie_word_embeddings=rest.tied,
        **more,
    )


def _by_hand(name: str) -> ModelShape:
    sizes = name.lower().split("x")
    if len(sizes) not in (2, 3) or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise UsageError(
            f"there is no model shape {name!r}; name one of {', '.join(_REST)}, or write "
            "HIDDENxINTERMEDIATE[xLAYERS], as in 4096x14336x32"
        )
    hidden, intermediate = int(sizes[0]), int(sizes[1])
    if hidden % HEAD_DIM:
        raise UsageError(f"the hidden size of a shape must be a multiple of {HEAD_DIM}, the size of a head: {name!r}")
    layers = int(sizes[2]) if len(sizes) == 3 else LAYERS
    heads = hidden // HEAD_DIM
    kv_heads = heads // 4 if heads % 4 == 0 else heads
    return ModelShape(layers, hidden, intermediate, heads, kv_heads, HEAD_DIM, VOCABULARY)


@torch.no_grad()
def random_model(config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Such a Hugging Face model, its weights drawn where they will lie; norms are 1, biases 0."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    family = family_of(model)
    rotary = type(model.get_submodule(family.rotary))
    model = model.to_empty(device=device)
    model.tie_weights()
    model.get_submodule(family.decoder).rotary_emb = rotary(config).to(device)  # its buffer was empty
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=_SPREAD, generator=generator)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return model.eval().requires_grad_(False)

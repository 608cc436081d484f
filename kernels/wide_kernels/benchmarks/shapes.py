"""Sizes of known models."""

from __future__ import annotations

from dataclasses import dataclass

from wide_kernels.errors import UnsupportedError


@dataclass(frozen=True)
class ModelShape:
    """What the operators see of a model."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("llama-3.1-8b", 4096, 14336, 32, 8, 128),
        ModelShape("llama-3.2-3b", 3072, 8192, 24, 8, 128),
        ModelShape("qwen3-8b", 4096, 12288, 32, 8, 128),
        ModelShape("smollm2-135m", 576, 1536, 9, 3, 64),
    )
}


def model_shape(name: str) -> ModelShape:
    """A shape by the model's name, or by hand as `hidden x intermediate`, e.g. 4096x14336."""
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    sizes = name.lower().split("x")
    if len(sizes) == 2 and all(size.isdigit() and int(size) > 0 for size in sizes):
        hidden, intermediate = map(int, sizes)
        return ModelShape(name, hidden, intermediate, max(1, hidden // 128), max(1, hidden // 128), 128)
    raise UnsupportedError(f"there is no model shape {name!r}; name one of {', '.join(MODELS)} or write 4096x14336")

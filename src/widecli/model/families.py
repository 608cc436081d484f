"""Where a decoder family keeps the modules that routing touches: one table of names.

A family qualifies when its layer is pre-norm with a gated MLP: the two norms read the residual stream, one linear
layer projects the heads back and one projects the intermediate channels back. To add one, add a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from widecli.errors import UsageError


@dataclass(frozen=True)
class Family:
    """Attribute paths, relative to the causal LM (the first block) and to a decoder layer (the rest).

    Routing a Hugging Face model needs the two norms and outputs; the inference engine needs the other names too. The
    query and key norms stand only in some families. `linears`: a layer's linear modules, which LoRA adapts.
    """

    decoder: str = "model"
    layers: str = "model.layers"
    lm_head: str = "lm_head"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    rotary: str = "model.rotary_emb"

    attention: str = "self_attn"
    attention_norm: str = "input_layernorm"
    ffn_norm: str = "post_attention_layernorm"
    attention_output: str = "self_attn.o_proj"
    ffn_output: str = "mlp.down_proj"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    linears: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


LLAMA_NAMES = Family()

FAMILIES: dict[str, Family] = {  # keyed by the config's `model_type`; SmolLM and SmolLM2 call themselves llama
    "llama": LLAMA_NAMES,
    "mistral": LLAMA_NAMES,
    "qwen2": LLAMA_NAMES,
    "qwen3": LLAMA_NAMES,
    "smollm3": LLAMA_NAMES,
}


def family_of_config(config: Any) -> Family:
    """The row for a Hugging Face config, by its model type. Raises UsageError when there is none."""
    model_type = str(getattr(config, "model_type", "unknown"))
    family = FAMILIES.get(model_type)
    if family is None:
        raise UsageError(
            f"model type {model_type!r} is not supported yet (supported: {', '.join(FAMILIES)}); "
            f"missing: its row in widecli/model/families.py"
        )
    return family


def family_of(model: nn.Module) -> Family:
    """The row for a Hugging Face causal LM. Raises UsageError naming what is missing when there is none."""
    family = family_of_config(cast(Any, model).config)
    missing = [p for p in (family.decoder, family.layers, family.lm_head) if find(model, p) is None]
    if not missing:
        layer = cast(nn.ModuleList, find(model, family.layers))[0]
        paths = (family.attention_norm, family.ffn_norm, family.attention_output, family.ffn_output)
        missing = [p for p in paths if find(layer, p) is None]
    if missing:
        kind = cast(Any, model).config.model_type
        raise UsageError(f"this {kind} model lacks the modules that routing needs: {', '.join(missing)}")
    return family


def find(module: nn.Module, path: str) -> nn.Module | None:
    """The submodule at a dotted path, or None."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None

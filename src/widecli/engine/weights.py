"""The weights of a Llama-like model as the engine multiplies with them, taken from the Hugging Face modules.

Query, key and value stand under each other in one matrix, gate and up in another: a dense layer multiplies once where
it can, a routed one takes the rows it needs. The modules keep working: their parameters become views of the fused ones,
so that nothing is held twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from widecli.errors import UsageError
from widecli.model.families import Family, family_of, find
from widecli.model.plan import ModelShape
from widecli.model.positions import positions

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}
"""Hugging Face's name of an activation -> that of the operators."""
_UNLIMITED = 2**31 - 1


@dataclass(frozen=True)
class Norm:
    """An RMSNorm: weight [size] and its epsilon."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class Linear:
    """A projection: weight [out, in], bias [out] or None."""

    weight: Tensor
    bias: Tensor | None

    def rows(self, begin: int, end: int) -> Linear:
        """Some of its output channels, as views."""
        return Linear(self.weight[begin:end], None if self.bias is None else self.bias[begin:end])


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. `qkv` [(H_q + 2 H_k) d, D] in this order, `gate_up` [2 D', D]."""

    attention_norm: Norm
    qkv: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    o: Linear
    ffn_norm: Norm
    gate_up: Linear
    down: Linear
    rotates: bool  # False where a layer has no positional encoding


@dataclass(frozen=True)
class ModelWeights:
    """A whole model. `max_tokens`: the longest sequence it is made for; `window`: its sliding window, None = none."""

    shape: ModelShape
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    lm_head: Linear
    rotary: nn.Module
    activation: str
    scale: float
    max_tokens: int
    window: int | None

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self.embedding.dtype


@torch.no_grad()
def take_weights(model: Any, *, beyond_positions: bool = False) -> ModelWeights:
    """The weights of a Hugging Face causal LM. Raises UsageError for what the engine cannot run, naming it.

    `beyond_positions`: sequences may be longer than the model is made for.
    """
    family = family_of(model)
    config = model.config
    shape = ModelShape.from_config(config)
    if config.hidden_act not in ACTIVATIONS:
        raise UsageError(f"the engine knows no activation {config.hidden_act!r}; it has {', '.join(ACTIVATIONS)}")
    layers = list(cast(nn.ModuleList, model.get_submodule(family.layers)))
    attention = layers[0].get_submodule(family.attention)
    lm_head = _linear(model, family.lm_head)
    weights = ModelWeights(
        shape=shape,
        embedding=cast(Tensor, model.get_submodule(family.embedding).weight),
        layers=tuple(_layer(layer, family) for layer in layers),
        final_norm=_norm(model.get_submodule(family.final_norm)),
        lm_head=Linear(lm_head.weight, lm_head.bias),
        rotary=model.get_submodule(family.rotary),
        activation=ACTIVATIONS[config.hidden_act],
        scale=float(cast(Any, attention).scaling),
        max_tokens=_UNLIMITED if beyond_positions else positions(config),
        window=_window(config),
    )
    dtypes = {str(t.dtype).removeprefix("torch.") for t in (weights.embedding, weights.lm_head.weight)}
    dtypes |= {str(w.weight.dtype).removeprefix("torch.") for x in weights.layers for w in (x.qkv, x.o, x.gate_up)}
    if len(dtypes) > 1:
        raise UsageError(f"the engine needs weights of one dtype, this model has {', '.join(sorted(dtypes))}")
    return weights


def _layer(layer: nn.Module, family: Family) -> LayerWeights:
    def norm(path: str) -> Norm | None:
        module = find(layer, path)
        return None if module is None else _norm(module)

    output, down = _linear(layer, family.attention_output), _linear(layer, family.ffn_output)
    return LayerWeights(
        attention_norm=_norm(layer.get_submodule(family.attention_norm)),
        qkv=_fused([_linear(layer, path) for path in (family.query, family.key, family.value)]),
        query_norm=norm(family.query_norm),
        key_norm=norm(family.key_norm),
        o=Linear(output.weight, output.bias),
        ffn_norm=_norm(layer.get_submodule(family.ffn_norm)),
        gate_up=_fused([_linear(layer, path) for path in (family.gate, family.up)]),
        down=Linear(down.weight, down.bias),
        # SmolLM3 leaves the rotation out of every fourth layer
        rotates=bool(getattr(layer.get_submodule(family.attention), "use_rope", True)),
    )


def _linear(parent: nn.Module, path: str) -> nn.Linear:
    module = find(parent, path)
    if type(module) is not nn.Linear:
        raise UsageError(
            f"the engine needs a plain linear layer at {path}, found {type(module).__name__}; "
            "merge adapters and dequantize first"
        )
    return module


def _norm(module: nn.Module) -> Norm:
    return Norm(cast(Tensor, module.weight), float(cast(Any, module).variance_epsilon))


def _fused(parts: list[nn.Linear]) -> Linear:
    """The projections under each other; their parameters become views."""
    weight = torch.cat([part.weight for part in parts])
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    begin = 0
    for part in parts:
        end = begin + part.out_features
        part.weight.data = weight[begin:end]
        if bias is not None:
            part.bias.data = bias[begin:end]
        begin = end
    return Linear(weight, bias)


def _window(config: Any) -> int | None:
    """The sliding window, where at least one layer has one."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    window = getattr(config, "sliding_window", None)
    if window is None or not getattr(config, "use_sliding_window", True):
        return None
    return int(window)

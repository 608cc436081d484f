"""What identifies a backbone, so that routers of one model are never hung on another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from widecli.model.plan import ModelShape

_SAMPLED_VALUES = 16  # values of each parameter that enter the fingerprint
_CONFIG_KEYS = ("model_type", "hidden_act", "rms_norm_eps", "tie_word_embeddings")


@dataclass(frozen=True)
class BackboneIdentity:
    """Names a backbone well enough to refuse another one: where it came from, its sizes, a sample of its weights.

    `weights_hash` samples the weights in bf16, so that loading in fp32 or in bf16 gives the same; None for fp16,
    where the cast rounds differently.
    """

    id: str
    revision: str | None
    config_hash: str
    weights_hash: str | None

    def mismatch(self, other: BackboneIdentity) -> str | None:
        """What differs so that routers of one cannot serve the other, or None. A moved folder is no difference."""
        if self.config_hash != other.config_hash:
            return "its configuration (sizes or layer settings) differs"
        if self.weights_hash and other.weights_hash and self.weights_hash != other.weights_hash:
            return "its weights differ"
        return None


def config_hash(config: Any) -> str:
    """Hash of the sizes and of what changes a layer's result; the same in every transformers version."""
    data = {key: getattr(config, key, None) for key in _CONFIG_KEYS} | asdict(ModelShape.from_config(config))
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]


@torch.no_grad()
def weights_hash(model: nn.Module) -> str | None:
    """Hash of evenly spaced values of every parameter, rounded to bf16; None for fp16 weights."""
    parameters = dict(model.named_parameters())
    if any(p.dtype == torch.float16 for p in parameters.values()):
        return None

    def values(name: str, index: Tensor) -> Tensor:
        flat = parameters[name].detach().reshape(-1)
        return flat[index.to(flat.device)]

    return hash_of_values(((name, p.numel()) for name, p in parameters.items()), values)


def hash_of_values(parameters: Iterable[tuple[str, int]], values: Callable[[str, Tensor], Tensor]) -> str:
    """`weights_hash` for (name, size) of every parameter; `values` reads some of one by their flat indices."""
    digest = hashlib.sha256()
    samples = []
    for name, size in sorted(parameters):
        index = torch.linspace(0, size - 1, min(_SAMPLED_VALUES, size), dtype=torch.float64).long()
        samples.append(values(name, index).to(torch.bfloat16))
        digest.update(name.encode())
    digest.update(torch.cat(samples).cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]

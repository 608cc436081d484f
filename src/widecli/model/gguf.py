"""GGUF files, converted once to a plain Hugging Face folder in the cache.

Reading a GGUF through transformers takes tens of seconds (the vocabulary is parsed token by token); the folder loads in
one or two. Weights are kept in fp32, exactly as de-quantised.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import sys
from pathlib import Path
from typing import Any

from widecli.errors import UsageError
from widecli.storage import atomic_directory, user_cache

_VERSION = 1  # raise when the converted folder changes meaning


def converted(file: Path) -> Path:
    """The Hugging Face folder made from a GGUF file, converting it if need be. Raises UsageError for a corrupt file."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    folder = user_cache() / "models" / f"{file.stem}-{digest}-v{_VERSION}"
    if not (folder / "config.json").is_file():
        # the reader's bars ignore the library's switch; where nobody watches they are noise
        watched = sys.stderr.isatty()
        with contextlib.nullcontext() if watched else contextlib.redirect_stderr(io.StringIO()):
            model, tokenizer = _read(file)
        with atomic_directory(folder) as scratch:
            model.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
    return folder


def _read(file: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    except ImportError as error:
        raise UsageError(f"reading {file.name} needs the gguf package: pip install gguf") from error
    except Exception as error:  # the reader raises anything from ValueError to struct.error on a damaged file
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UsageError(f"{file.name} is not a readable GGUF file of a supported model ({reason})") from error
    _forget_quantization(model)
    return model, tokenizer


def _forget_quantization(model: Any) -> None:
    """Drop the marks of GGUF loading: the weights are plain tensors by now, yet `save_pretrained` would refuse them."""
    if hasattr(model, "hf_quantizer"):
        del model.hf_quantizer
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config

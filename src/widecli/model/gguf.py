"""GGUF files, converted once to a plain Hugging Face folder in the cache.

Reading a GGUF through transformers takes tens of seconds (the vocabulary is parsed token by token); the folder loads in
one or two. Weights are kept in fp32, exactly as de-quantised.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from widecli.errors import UsageError, WideError
from widecli.model.pretrained import read_model, read_tokenizer, refuse_not_finite
from widecli.storage import atomic_directory, changed_file, checksum, user_cache

_VERSION = 2  # raise when the converted folder changes meaning
_RECORD = "wide_conversion.json"


def converted(file: Path, *, weights: bool = True) -> Path:
    """The Hugging Face folder made from a GGUF file, converting it if need be.

    What the cache has is compared with the checksums taken when it was written, the weights only where they are going
    to be read, and made anew where it differs. Raises UsageError for a file that is corrupt or not the whole model.
    """
    folder = user_cache() / "models" / f"{file.stem}-{checksum(file)[:16]}-v{_VERSION}"
    if not _is_sound(folder, weights=weights):
        # the reader's bars ignore the library's switch; where nobody watches they are noise
        watched = sys.stderr.isatty()
        with contextlib.nullcontext() if watched else contextlib.redirect_stderr(io.StringIO()):
            model, tokenizer = _read(file)
        with atomic_directory(folder) as scratch:
            model.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
            record = {path.name: checksum(path) for path in sorted(scratch.iterdir())}
            (scratch / _RECORD).write_text(json.dumps(record, indent=2) + "\n")
    return folder


def _is_sound(folder: Path, *, weights: bool) -> bool:
    """Whether a converted folder is there and holds what was written."""
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        if not isinstance(record, dict) or "config.json" not in record:
            return False
        names = [name for name in record if weights or not name.endswith(".safetensors")]
        return all((folder / name).is_file() for name in record) and changed_file(folder, record, names) is None
    except (OSError, ValueError):
        return False


def _read(file: Path) -> tuple[Any, Any]:
    import torch

    try:
        _refuse_part(file)
        tokenizer = read_tokenizer(file.name, str(file.parent), gguf_file=file.name)
        model = read_model(file.name, str(file.parent), gguf_file=file.name, dtype=torch.float32)
    except ImportError as error:
        raise UsageError(f"reading {file.name} needs the gguf package: pip install gguf") from error
    except Exception as error:  # the reader raises anything from ValueError to struct.error on a damaged file
        if isinstance(error, WideError) and error.__cause__ is None:
            raise
        reason = " ".join(str(error.__cause__ or error).split())[:200] or type(error).__name__
        raise UsageError(f"{file.name} is not a readable GGUF file of a supported model ({reason})") from error
    refuse_not_finite(file.name, model)
    _forget_quantization(model)
    return model, tokenizer


def _refuse_part(file: Path) -> None:
    """Raise UsageError for one file of a model that was split into several."""
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    count = fields["split.count"].contents() if "split.count" in fields else 1
    if count > 1:
        part = int(fields["split.no"].contents()) + 1 if "split.no" in fields else "one"
        raise UsageError(
            f"{file.name} is part {part} of a model split into {count} files: join them (llama-gguf-split --merge "
            "FIRST-PART WHOLE.gguf) and name the whole file"
        )


def _forget_quantization(model: Any) -> None:
    """Drop the marks of GGUF loading: the weights are plain tensors by now, yet `save_pretrained` would refuse them."""
    if hasattr(model, "hf_quantizer"):
        del model.hf_quantizer
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config

"""Config, tokenizer and weights as transformers reads them, refused by name where they are not what they say.

Left to itself, transformers draws missing weights at random and only logs it, applies an adapter that lies beside the
weights, and asks on the terminal whether to run a repository's own code. Everything that reads a model comes through
here. `place` is a folder or a Hub id, `name` what the user called it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from widecli.errors import UsageError, WideError
from widecli.model.finite import first_not_finite
from widecli.model.shapes import EMBEDDED

TRUST_REMOTE_CODE = "WIDE_TRUST_REMOTE_CODE"
"""Environment variable behind `--trust-remote-code`; processes that a command starts inherit it."""
_NAMES_SHOWN = 3
_UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


def trusts_remote_code() -> bool:
    """Whether Python code that comes with a model may run."""
    return os.environ.get(TRUST_REMOTE_CODE) == "1"


def read_config(name: str, place: str, revision: str | None = None) -> Any:
    """The model's config. Raises UsageError, also for a folder with an adapter: see `refuse_adapter`."""
    from widecli.model.standalone import config_of

    with explained(name, place):
        refuse_adapter(name, place, revision)
        config = config_of(place, **_options(revision))
    padding, known = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None)
    if isinstance(padding, int) and isinstance(known, int) and padding >= known:
        config.pad_token_id = None  # an embedding could not be made; nothing here looks up that row
    return config


def read_tokenizer(name: str, place: str, revision: str | None = None, **options: Any) -> Any:
    """The model's tokenizer. Raises UsageError."""
    from transformers import AutoTokenizer

    with explained(name, place):
        return AutoTokenizer.from_pretrained(place, **_options(revision), **options)


def read_model(name: str, place: str, revision: str | None = None, **options: Any) -> Any:
    """The causal language model, with every weight its config asks for and none besides. Raises UsageError.

    `options` go to `from_pretrained`.
    """
    from transformers import AutoModelForCausalLM

    with explained(name, place):
        refuse_adapter(name, place, revision)
        with _report_silenced():
            model, info = AutoModelForCausalLM.from_pretrained(
                place, output_loading_info=True, ignore_mismatched_sizes=True, **_options(revision), **options
            )
        misshaped = [str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"]]
        refuse_misfit(name, info["missing_keys"], info["unexpected_keys"], misshaped)
        if Path(place).is_dir() and "gguf_file" not in options:
            refuse_whole_numbers(name, Path(place), model)
    return model


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold a folder's model, by its index where it has one."""
    with suppress(OSError, ValueError, KeyError):
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return [folder / name for name in sorted(set(index["weight_map"].values()))]
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))


def refuse_whole_numbers(name: str, folder: Path, model: nn.Module) -> None:
    """Raise UsageError naming the first weight of the model that its folder stores as whole numbers.

    Without a quantization config nobody knows their scales, and transformers takes -127 to 127 as the weights.
    """
    from safetensors import safe_open

    if getattr(model.config, "quantization_config", None) is not None:
        return
    weights = {key for key, _ in model.named_parameters()}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for key in sorted(weights & set(tensors.keys())):
                stored = str(tensors.get_slice(key).get_dtype())
                if stored[0] in "IU":
                    raise UsageError(
                        f"the weights of {name} are whole numbers ({key} is {stored}) and its config.json has no "
                        "quantization_config that says what they stand for: take a copy of the model that has one"
                    )


@contextmanager
def _report_silenced() -> Iterator[None]:
    """Without transformers' own table of missing and unexpected weights: here it is a sentence, and the end."""
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_nothing)  # its level decides more there than what is shown
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(_: logging.LogRecord) -> bool:
    return False


def _options(revision: str | None) -> dict[str, Any]:
    # never None: that is when transformers asks on the terminal
    options: dict[str, Any] = {"trust_remote_code": trusts_remote_code()}
    return options | ({"revision": revision} if revision else {})


def refuse_adapter(name: str, place: str, revision: str | None = None) -> None:
    """Raise UsageError where an adapter lies beside the weights, or in their place.

    transformers would put it on top of them; whether it is merged into them already, nobody can tell.
    """
    from transformers.utils import cached_file
    from transformers.utils.peft_utils import find_adapter_config_file

    found = find_adapter_config_file(place, revision=revision)
    if found is None:
        return
    file = Path(found).name
    quietly = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")}
    if name.endswith(".gguf") or cached_file(place, "config.json", revision=revision, **quietly) is not None:
        raise UsageError(
            f"{name} holds a whole model and an adapter beside it ({file}), which may be merged into it already: move "
            "the adapter's files away to use the model, or merge them first if they are not"
        )
    try:
        base = json.loads(Path(found).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    raise UsageError(
        f"{name} holds an adapter ({file}) and no model: merge it into its base model{f', {base},' if base else ''} "
        "and name the merged folder"
    )


def refuse_misfit(
    name: str, missing: Collection[str], unexpected: Collection[str], misshaped: Collection[str] = ()
) -> None:
    """Raise UsageError naming the tensors that are missing, left over or of another shape than the config says."""
    problems = [
        f"{len(keys)} {'tensor is' if len(keys) == 1 else 'tensors are'} {what} ({_shown(keys)})"
        for keys, what in ((missing, "missing"), (unexpected, "left over"), (misshaped, "of another shape"))
        if keys
    ]
    if not problems:
        return
    prefix = _common_prefix(missing, unexpected)
    remedy = f"their names begin with {prefix!r}: save the model without that wrapper" if prefix else None
    raise UsageError(
        f"the weights of {name} are not those of the model in its config.json: {', '.join(problems)}; "
        f"{remedy or 'take a complete copy of the model'}"
    )


def _shown(keys: Collection[str]) -> str:
    more = ", ..." if len(keys) > _NAMES_SHOWN else ""
    return ", ".join(sorted(keys)[:_NAMES_SHOWN]) + more


def _common_prefix(missing: Collection[str], unexpected: Collection[str]) -> str | None:
    """What stands in front of the missing names in the file, as `torch.compile` and `DataParallel` leave it."""
    prefixes = {key[: -len(end)] for key in unexpected for end in missing if key.endswith(f".{end}")}
    return prefixes.pop() if len(prefixes) == 1 else None


def refuse_not_finite(name: str, model: nn.Module) -> None:
    """Raise UsageError naming the first weight of a loaded model that holds NaN or infinity."""
    from torch.distributed.tensor import DTensor

    def held(tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    tensors = {key: held(tensor.detach()) for key, tensor in model.named_parameters()}
    found = first_not_finite(tensors.items())
    if found is None:
        return
    remedy = "take another copy of the model"
    if tensors[found].dtype == torch.float16:
        remedy = f"load it with model.dtype=bfloat16 if it is only too large for float16, else {remedy}"
    raise UsageError(f"the weights of {name} are not finite: {found} holds NaN or infinity; {remedy}")


@contextmanager
def explained(name: str, place: str) -> Iterator[None]:
    """Turn whatever goes wrong while a model is read into one sentence."""
    try:
        yield
    except WideError:
        raise
    except Exception as error:  # the library raises anything from OSError to struct.error here
        raise _explanation(name, place, error) from error


def _explanation(name: str, place: str, error: Exception) -> WideError:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError):
        return WideError(f"{name} does not fit on this device; use a smaller model or model.dtype=bfloat16 ({reason})")
    if "trust_remote_code" in reason or "custom code" in reason:
        return UsageError(
            f"{name} comes with Python code of its own, which does not run unasked: read it, and add "
            "--trust-remote-code if you trust it"
        )
    if elsewhere := _file_elsewhere(error, place):
        return UsageError(
            f"{name} cannot be loaded because {elsewhere} cannot be used ({reason}); it is no file of the model: check "
            "TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR, HF_HOME and TMPDIR"
        )
    if Path(place).exists():
        return UsageError(f"{name} cannot be loaded; the files may be incomplete or corrupt ({reason})")
    return UsageError(
        f"{name} is neither a local folder nor reachable on the Hub; check the name, the network, HF_TOKEN, or use "
        f"model.name={EMBEDDED} ({reason})"
    )


def _file_elsewhere(error: BaseException | None, place: str) -> str | None:
    """The file that an operating system's error names, where that is none of the model's."""
    folder = Path(place).absolute()
    while error is not None:
        if isinstance(error, OSError) and isinstance(error.filename, (str, bytes)):
            file = Path(os.fsdecode(error.filename)).absolute()
            # what the Hub's cache lacks is a model that is not there; what it may not touch is something else
            if folder.exists() or error.errno in _UNUSABLE:
                return None if folder == file or folder in file.parents else str(file)
        error = error.__cause__ or error.__context__
    return None

"""Dense results, kept so that a checkpoint can be compared without measuring its backbone again.

A stored figure stands beside one that is measured now: its key holds everything that the figure depends on, by content.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from widecli.errors import WideError
from widecli.evaluate.texts import NAMED_TEXTS, perplexity_text, split_windows
from widecli.storage import user_cache, write_text

if TYPE_CHECKING:
    from widecli.evaluate.protocol import EvalProtocol
    from widecli.model.backbone import Backbone
    from widecli.recipe.schema import EvalSection

SCHEMA = "wide.dense/2"
_PROBE = "Der Fluß, the 12,400 ducks\n\tand İstanbul: \u00e9 e\u0301 a  b <s></s>"
_VERSIONS = ("torch", "transformers", "tokenizers", "lm-eval", "datasets")

Key = Mapping[str, Any]
"""Plain JSON values; see `dense_key`."""


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/wide/dense`, else `~/.cache/wide/dense`."""
    return user_cache() / "dense"


class DenseCache:
    """JSON results by key, one file each. Anything that does not load counts as absent."""

    def __init__(self, cache_dir: str | Path | None = None) -> None:
        self.folder = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()

    def path(self, key: Key) -> Path:
        """The file that holds (or would hold) this result."""
        return self.folder / f"{_digest(key)[:32]}.json"

    def load(self, key: Key) -> dict[str, Any] | None:
        """The stored result, or None if there is none, it is damaged, or it belongs to another key."""
        try:
            stored = json.loads(self.path(key).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(stored, dict) or stored.get("schema") != SCHEMA or stored.get("key") != _plain(key):
            return None
        result = stored.get("result")
        if not isinstance(result, dict) or stored.get("checksum") != _digest(result):
            return None
        return result

    def store(self, key: Key, result: Mapping[str, Any]) -> Path:
        """Write a result (JSON values only) in one step: readers see the old file or the whole new one.

        Raises WideError where the folder cannot be written.
        """
        plain = _plain(result)
        document = {"schema": SCHEMA, "key": _plain(key), "checksum": _digest(plain), "result": plain}
        path = self.path(key)
        try:
            write_text(path, json.dumps(document, indent=2) + "\n")
        except WideError as error:
            reason = getattr(error.__cause__, "strerror", None) or error
            raise WideError(f"The dense result cannot be stored in {self.folder}: {reason}.") from error
        return path


def dense_key(
    backbone: Backbone, section: EvalSection, protocol: EvalProtocol, tasks: Sequence[Any], *, offline: bool
) -> dict[str, Any]:
    """What a dense result depends on: every weight and setting of the model, what the tokenizer makes of text, the
    protocol, the texts and documents themselves, and the code that measures. Where the model lies is no part of it.

    `tasks`: lm-eval's own, loaded.
    """
    from widecli.model.identity import weights_digest

    model = backbone.model
    return _plain(
        {
            "model": {
                "weights": weights_digest(model),
                "config": _settings(model.config),
                "generation": _settings(model.generation_config),
                "attention": getattr(model.config, "_attn_implementation", None),
                "dtype": str(model.dtype).removeprefix("torch."),
            },
            "tokenizer": _tokenizer(backbone.tokenizer),
            "protocol": protocol.as_dict(),
            "texts": [_named_text(name, section.data_root, offline) for name in section.perplexity],
            "tasks": [_task(task, section.limit) for task in _each_task(tasks)],
            "code": _code(),
        }
    )


def _settings(config: Any) -> dict[str, Any]:
    """All that a config says but where it is from."""
    if config is None:
        return {}
    return {k: v for k, v in config.to_dict().items() if not k.startswith("_") and k != "transformers_version"}


def _tokenizer(tokenizer: Any) -> dict[str, Any]:
    from widecli.data.packing import tokenizer_fingerprint

    return {
        "fingerprint": tokenizer_fingerprint(tokenizer),
        "probe": [tokenizer(_PROBE, add_special_tokens=special)["input_ids"] for special in (False, True)],
    }


def _named_text(name: str, data_root: str | None, offline: bool) -> str | None:
    """SHA-256 of a text that is known by name, which other versions of Python or of a data set have otherwise.

    None for a file: the protocol has its contents.
    """
    text, _ = split_windows(name)
    if text not in NAMED_TEXTS:
        return None
    _, content = perplexity_text(text, data_root, offline)
    return hashlib.sha256("".join(content).encode("utf-8", "surrogatepass")).hexdigest()


def _each_task(tasks: Sequence[Any]) -> Iterator[Any]:
    """lm-eval's tasks, those of groups too."""
    for task in tasks:
        yield from task.get_all_tasks() if hasattr(task, "get_all_tasks") else (task,)


def _task(task: Any, limit: int | None) -> dict[str, Any]:
    """A task by what it asks, of which documents, and with which examples in front."""
    config = task.dump_config()
    digest = hashlib.sha256()
    for row in itertools.islice(task.eval_docs, limit):
        digest.update(json.dumps(row, sort_keys=True, default=repr).encode())
    if config.get("num_fewshot"):
        for row in task.fewshot_docs():
            digest.update(json.dumps(row, sort_keys=True, default=repr).encode())
    # its folders and caches are this machine's, and its documents are here
    asked = {k: v for k, v in config.items() if k not in ("dataset_path", "dataset_kwargs", "metadata")}
    return {"config": asked, "version": getattr(task, "VERSION", None), "documents": digest.hexdigest()}


def _code() -> dict[str, str]:
    """Versions, and a hash of the files that prompt, score and sum up: a checkout changes without a new version."""
    digest = hashlib.sha256()
    ours = sorted(Path(__file__).parent.glob("*.py"))
    theirs: list[Path] = []
    if spec := importlib.util.find_spec("lm_eval"):
        root = Path(next(iter(spec.submodule_search_locations or [])))
        theirs = sorted(p for folder in ("", "api", "filters", "models") for p in (root / folder).glob("*.py"))
    for file in (*ours, *theirs):
        digest.update(f"{file.parent.name}/{file.name}\n".encode() + file.read_bytes())
    versions = {name: _version(name) for name in _VERSIONS}
    return {"files": digest.hexdigest(), **versions}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """Through JSON and back, so that what is compared on loading equals what was stored (tuples become lists)."""
    plain: dict[str, Any] = json.loads(json.dumps(value, sort_keys=True, default=str))
    return plain


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

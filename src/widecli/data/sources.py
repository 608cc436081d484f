"""What a recipe's `data.source` can name, and the one door that opens it.

| name | text |
|---|---|
| `stdlib` | docstrings of Python's standard library |
| `pydoc-topics` | Python's language reference as `help()` shows it; held out from `stdlib` |
| `self` | text sampled from the dense model itself |
| a file, folder or glob (or several) | `.jsonl`, `.txt` (each also `.gz`) and `.parquet` |
| `owner/name` | a data set on the Hugging Face Hub |

A local path that exists wins over a Hub id of the same name; `./self` names a folder called self.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from widecli.errors import UsageError

if TYPE_CHECKING:
    from widecli.recipe.schema import DataSection

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
KEYWORDS = ("stdlib", "pydoc-topics", "self")


class Source(Protocol):
    """Text that tokens can be made of."""

    @property
    def name(self) -> str:
        """How messages call the source: what the recipe says."""

    def identity(self) -> dict[str, str | int]:
        """Everything that decides which documents come out; equal identities give equal documents."""

    def documents(self) -> Iterator[str]:
        """The documents, non-empty, in a fixed order. A prefix of any length is a fair sample of the whole."""


@dataclass(frozen=True)
class SamplingModel:
    """The dense model that the source `self` draws text from; sample before routers are attached.

    `identity` names the weights (id, revision, dtype) in cache keys.
    """

    model: Any
    tokenizer: Any
    identity: str
    seed: int = 0


def open_source(
    source: str | tuple[str, ...],
    *,
    section: DataSection,
    offline: bool = False,
    sampling: SamplingModel | None = None,
    cache_dir: Path | None = None,
) -> Source:
    """Open what `data.source` names; `section` says how to read it (text field, subset, split).

    Local files must exist; nothing is read from them and nothing is asked of the Hub yet. `sampling` is needed by
    `self` alone. `cache_dir` holds sampled text and seen Hub revisions (default: the user's cache).
    Raises UsageError for a source that cannot be what it says.
    """
    from widecli.data.local_files import LocalFiles, is_local

    names = (source,) if isinstance(source, str) else source
    if not names or not all(name.strip() for name in names):
        raise UsageError("data.source is empty: name stdlib, self, local files or a Hub id")
    if len(names) > 1:
        others = [name for name in names if name in KEYWORDS or not is_local(name)]
        if others:
            raise UsageError(
                f"data.source mixes several sources and {others[0]!r} is no local file: several must all be local files"
            )
        return LocalFiles(names, text_field=section.text_field)
    (name,) = names
    if name in ("stdlib", "pydoc-topics"):
        from widecli.data.python_text import PydocTopics, StandardLibrary

        return StandardLibrary() if name == "stdlib" else PydocTopics()
    if name == "self":
        return _open_self(section, sampling, cache_dir)
    if is_local(name):
        return LocalFiles(names, text_field=section.text_field)
    if not HUB_ID.fullmatch(name):
        raise UsageError(
            f"data.source={name!r} is neither a file that exists nor a Hub id such as owner/name; "
            f"or use {', '.join(KEYWORDS)}"
        )
    from widecli.data.hub import HubDataset

    return HubDataset(
        name,
        subset=section.subset,
        split=section.split,
        text_field=section.text_field,
        offline=offline,
        cache_dir=cache_dir,
    )


def _open_self(section: DataSection, sampling: SamplingModel | None, cache_dir: Path | None) -> Source:
    if sampling is None:
        raise UsageError(
            "data.source=self samples text from the dense model, and no model is loaded here: name another"
        )
    from widecli.data.self_sampled import SelfSampled

    return SelfSampled(sampling, max_length=section.sequence_length, cache_dir=cache_dir)


def encodable(text: str) -> str:
    """The text without lone surrogates, which JSON can smuggle in and no tokenizer takes."""
    if text.isascii():
        return text
    return text.encode("utf-8", "replace").decode("utf-8")

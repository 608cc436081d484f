"""A source and a tokenizer in, a memory-mapped `TokenSet` out; prepared once and kept in the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from widecli.data.packing import DocumentEncoder, Tokens, samples, windows
from widecli.data.sources import Source
from widecli.data.token_file import TokenSet, load_token_set, write_token_set
from widecli.errors import UsageError, WideError
from widecli.storage import disk_errors_named, folder_in_one_piece, user_cache

if TYPE_CHECKING:
    from widecli.recipe.schema import DataSection

__all__ = ["CODE_VERSION", "TokenSet", "prepare_tokens", "tokens_to_prepare"]

# Raise it whenever the same text would give other sequences: order of documents, packing, borders.
CODE_VERSION = 2


def prepare_tokens(
    source: Source,
    tokenizer: Any,
    section: DataSection,
    *,
    tokens_needed: int,
    cache_dir: Path | None = None,
    progress: bool = True,
) -> TokenSet:
    """Tokenize and pack enough of a source for `tokens_needed` tokens (steps x batch x sequence_length), or all it has.

    The result is cached in `cache_dir` (default `<user cache>/wide/tokens`) under a key of everything it depends on; a
    cache entry that is incomplete or damaged is built anew. `progress` shows a bar, on a terminal only.
    A source with fewer tokens gives a smaller set (`exhausted`). Raises UsageError if there is no text, or less than
    one sequence of it, and WideError if the cache cannot be written.
    """
    root = cache_dir if cache_dir is not None else user_cache() / "tokens"
    length = section.sequence_length
    limit = tokens_to_prepare(section, tokens_needed)
    encoder = DocumentEncoder.of(tokenizer)
    depends_on = {
        "source": source.identity(),
        "tokenizer": encoder.fingerprint,
        "sequence_length": length,
        "packing": section.packing,
        "max_tokens": limit,
        "code_version": CODE_VERSION,
    }
    key = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:32]
    folder = root / key

    found = _load(folder, key)
    if found is not None:
        return found
    max_sequences = limit // length
    counted = _Counted()
    sampled = section.packing == "sample"
    encoded = encoder.encode(
        counted.texts_of(source.documents()),
        tokens_needed=max_sequences * length,
        longest_useful=length if sampled else None,
    )
    packed = (samples if sampled else windows)(counted.tokens_of(encoded), length, max_sequences)
    max_token_id = encoder.max_token_id()
    with (
        disk_errors_named(root, needed_bytes=max_sequences * length * (2 if max_token_id < 2**16 else 4)),
        folder_in_one_piece(folder, lambda other: _load(other, key) is not None) as building,
        _bar(f"tokens of {source.name}", max_sequences * length, shown=progress) as advance,
    ):
        written = write_token_set(
            building,
            packed,
            padded=sampled,
            max_sequences=max_sequences,
            max_token_id=max_token_id,
            description={**depends_on, "identity": key, "pad_token_id": encoder.pad_token_id},
            on_tokens=advance,
        )
        if written == 0:
            raise counted.too_little_text(source.name, section)
    prepared = _load(folder, key)
    if prepared is None:
        raise WideError(f"the token cache {folder} cannot be read back: delete it and try again")
    return prepared


def tokens_to_prepare(section: DataSection, tokens_needed: int) -> int:
    """How many tokens at most are prepared: `data.max_tokens`, else what is needed up to the next power of two.

    Powers of two let runs of similar length share a cache entry. Never less than one sequence.
    """
    if section.max_tokens is not None:
        if section.max_tokens < section.sequence_length:
            raise UsageError(
                f"data.max_tokens={section.max_tokens} is less than one sequence of "
                f"data.sequence_length={section.sequence_length} tokens: raise it or shorten the sequence"
            )
        return section.max_tokens
    return 1 << (max(tokens_needed, section.sequence_length, 1) - 1).bit_length()


def _load(folder: Path, key: str) -> TokenSet | None:
    found = load_token_set(folder)
    return found if found is not None and found.identity == key else None


@dataclass
class _Counted:
    """What went by on the way to the file: for the message when it was too little."""

    documents: int = 0
    tokens: int = 0

    def texts_of(self, documents: Iterable[str]) -> Iterator[str]:
        for text in documents:
            self.documents += 1
            yield text

    def tokens_of(self, encoded: Iterable[Tokens]) -> Iterator[Tokens]:
        for tokens in encoded:
            self.tokens += tokens.size
            yield tokens

    def too_little_text(self, name: str, section: DataSection) -> UsageError:
        if self.documents == 0:
            return UsageError(f"data.source={name!r} is empty: there is no text in it; name another source")
        if section.packing == "sample":
            return UsageError(f"data.source={name!r} has no document of two tokens or more: name another source")
        return UsageError(
            f"data.source={name!r} has {self.tokens} tokens, less than one sequence of "
            f"data.sequence_length={section.sequence_length}: name more text, shorten the sequence or use "
            "data.packing=sample"
        )


@contextlib.contextmanager
def _bar(title: str, total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, if that is a terminal; yields what to call with each number of tokens."""
    if not (shown and sys.stderr.isatty()):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of at most {task.total:,.0f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda tokens: progress.advance(task, tokens)

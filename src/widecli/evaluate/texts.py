"""The texts whose perplexity is reported: WikiText-2, Python's own documentation topics, or a file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from widecli.data.file_formats import FORMATS, format_of, running_text
from widecli.errors import UsageError
from widecli.evaluate.hub_data import load_rows
from widecli.storage import given_path, printable

WIKITEXT2 = "EleutherAI/wikitext_document_level"
WIKITEXT2_CONFIG = "wikitext-2-raw-v1"

PERPLEXITY_TOKEN_CAPS = {"pydoc-topics": 4096}
"""Default length of a text, in tokens: Python's documentation is long and a small machine slow."""

TEXT_FIELDS = ("text", "page")
"""Where the rows of a file have their text: the first that a row has."""

NAMED_TEXTS = ("wikitext2", "pydoc-topics")
METRIC = "token_ppl"


def perplexity_text(
    name: str, data_root: str | None = None, offline: bool = False, fields: Sequence[str] = TEXT_FIELDS
) -> tuple[str, Iterator[str]]:
    """A description for people, and the text in pieces that follow each other.

    `wikitext2` is the raw test split, its articles joined without anything between them; `pydoc-topics` is every topic
    of `pydoc_data.topics` in sorted order, a blank line between them; anything else is a file that training could read,
    rows with a blank line between them. A file is read as the pieces are taken: UsageError for what is wrong in it.
    """
    if name == "wikitext2":
        rows = load_rows(WIKITEXT2, WIKITEXT2_CONFIG, "test", data_root=data_root, offline=offline)
        return "WikiText-2 raw test", (row["page"] for row in rows)
    if name == "pydoc-topics":
        topics = _pydoc_topics()
        return "Python documentation topics", (f"\n\n{text}" if i else text for i, text in enumerate(topics))
    path = _file(name)
    return path.name, _not_empty(path, fields)


def beginning(pieces: Iterable[str], chars: int) -> str:
    """The first `chars` characters of a text, of which no more is read."""
    held: list[str] = []
    left = chars
    for piece in pieces:
        held.append(piece[:left])
        left -= len(held[-1])
        if left <= 0:
            break
    return "".join(held)


def check_texts(names: Iterable[str]) -> None:
    """Refuse, before anything is loaded, a name that is neither a known text nor a file that can be read."""
    for name in names:
        text, _ = split_windows(name)
        if text not in NAMED_TEXTS:
            _file(text)


def split_windows(name: str) -> tuple[str, int | None]:
    """`wikitext2@60` -> (`wikitext2`, 60): a text cut to its first windows; without a suffix (name, None)."""
    text, at, count = name.rpartition("@")
    if at and count.isdecimal() and int(count) > 0:
        return text, int(count)
    return name, None


def perplexity_keys(names: Sequence[str]) -> dict[str, str]:
    """Name -> the name of its result: `wikitext2/token_ppl`, `wikitext2@60/token_ppl`; names of one text share one.

    A file's is its own name without the kind's suffix, `news.v1@4/token_ppl`; with it where another file, or a known
    text, would be called the same, and with as many folders as tell it from the others.
    """
    named = {name: name for name in names if split_windows(name)[0] in NAMED_TEXTS}
    files = {name: given_path(split_windows(name)[0]).resolve() for name in names if name not in named}
    ends = {name: f"@{windows}" if (windows := split_windows(name)[1]) else "" for name in files}
    labels: dict[str, str] = {}
    for name in files:
        given = given_path(split_windows(name)[0])
        stem = given.name[: -len(format_of(given) or "")] or given.name
        reserved = split_windows(stem.lower())[0] in NAMED_TEXTS
        labels[name] = printable(f"{given.name if reserved else stem}{ends[name]}")
    for length in range(1, max((len(path.parts) for path in files.values()), default=0) + 1):
        for name in _shared(labels, files, ends):
            given = Path(given_path(split_windows(name)[0]).absolute())
            labels[name] = printable(f"{'/'.join(given.parts[-length:])}{ends[name]}")
    return {name: f"{(named | labels)[name]}/{METRIC}" for name in names}


def _shared(labels: Mapping[str, str], files: Mapping[str, Path], ends: Mapping[str, str]) -> list[str]:
    """The names whose label another text has, too."""
    texts = {(labels[name], files[name], ends[name]) for name in labels}
    counts = Counter(label for label, _, _ in texts)
    return [name for name in labels if counts[labels[name]] > 1]


def _pydoc_topics() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UsageError(
            "This Python has no pydoc_data.topics (some distributions package it apart): name a text file instead."
        ) from None
    return [topics[topic] for topic in sorted(topics)]


def _file(name: str) -> Path:
    path = given_path(name)
    if not path.is_file():
        raise UsageError(f"{name} is no perplexity text: give {', '.join(NAMED_TEXTS)} or a file that is there.")
    if not os.access(path, os.R_OK):
        raise UsageError(f"The perplexity text {name} may not be read (permission denied): name another.")
    if format_of(path) is None:
        raise UsageError(f"The perplexity text {name} is no kind of file that is read here: use {', '.join(FORMATS)}.")
    return path


def _not_empty(path: Path, fields: Sequence[str]) -> Iterator[str]:
    empty = True
    for piece in running_text(path, fields):
        empty = empty and not piece.strip()
        yield piece
    if empty:
        raise UsageError(f"The perplexity text {path} is empty.")

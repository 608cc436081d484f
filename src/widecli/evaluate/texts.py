"""The texts whose perplexity is reported: WikiText-2, Python's own documentation topics, or a file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from widecli.errors import UsageError
from widecli.evaluate.hub_data import load_rows

WIKITEXT2 = "EleutherAI/wikitext_document_level"
WIKITEXT2_CONFIG = "wikitext-2-raw-v1"

PERPLEXITY_TOKEN_CAPS = {"pydoc-topics": 4096}
"""Default length of a text, in tokens: Python's documentation is long and a small machine slow."""

_FIELDS = ("text", "page")


NAMED_TEXTS = ("wikitext2", "pydoc-topics")


def perplexity_text(name: str, data_root: str | None = None, offline: bool = False) -> tuple[str, str]:
    """A description for people and the whole text.

    `wikitext2` is the raw test split, its articles joined without anything between them; `pydoc-topics` is every topic
    of `pydoc_data.topics` in sorted order, a blank line between them; anything else is a .txt or .jsonl[.gz] file.
    """
    if name == "wikitext2":
        rows = load_rows(WIKITEXT2, WIKITEXT2_CONFIG, "test", data_root=data_root, offline=offline)
        return "WikiText-2 raw test", "".join(row["page"] for row in rows)
    if name == "pydoc-topics":
        return "Python documentation topics", "\n\n".join(_pydoc_topics())
    return Path(name).name, _read_file(name)


def check_texts(names: Iterable[str]) -> None:
    """Refuse, before anything is loaded, a name that is neither a known text nor a file."""
    for name in names:
        text, _ = split_windows(name)
        if text not in NAMED_TEXTS and not Path(text).expanduser().is_file():
            raise UsageError(
                f"{text} is no perplexity text: give {', '.join(NAMED_TEXTS)} or a .txt, .jsonl or .jsonl.gz file."
            )


def split_windows(name: str) -> tuple[str, int | None]:
    """`wikitext2@60` -> (`wikitext2`, 60): a text cut to its first windows; without a suffix (name, None)."""
    text, at, count = name.rpartition("@")
    if at and count.isdecimal() and int(count) > 0:
        return text, int(count)
    return name, None


def perplexity_key(name: str) -> str:
    """The name of a result: `wikitext2/token_ppl`, `wikitext2@60/token_ppl`; a file's without folder and suffix."""
    if split_windows(name)[0] in NAMED_TEXTS:
        return f"{name}/token_ppl"
    return f"{Path(name).name.split('.')[0] or Path(name).name}/token_ppl"


def _pydoc_topics() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UsageError(
            "This Python has no pydoc_data.topics (some distributions package it apart): name a text file instead."
        ) from None
    return [topics[topic] for topic in sorted(topics)]


def _read_file(name: str) -> str:
    path = Path(name).expanduser()
    if not path.is_file():
        raise UsageError(
            f"{name} is no perplexity text: give wikitext2, pydoc-topics or a .txt, .jsonl or .jsonl.gz file."
        )
    try:
        if path.name.endswith((".jsonl", ".jsonl.gz")):
            text = "\n\n".join(_json_texts(path))
        else:
            text = path.read_text(encoding="utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UsageError(f"The perplexity text {name} cannot be read: {error}.") from error
    if not text.strip():
        raise UsageError(f"The perplexity text {name} is empty.")
    return text


def _json_texts(path: Path) -> Iterator[str]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UsageError(f"Line {number} of {path.name} is not JSON: {error}.") from error
            field = next(
                (field for field in _FIELDS if isinstance(row, dict) and isinstance(row.get(field), str)), None
            )
            if field is None:
                there = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                raise UsageError(f"Line {number} of {path.name} has no `text` field; it has: {there}.")
            yield row[field]

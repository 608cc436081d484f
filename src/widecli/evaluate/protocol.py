"""What an evaluation measures, as one value: two results are comparable exactly when their protocols are equal."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from widecli.evaluate.texts import METRIC, NAMED_TEXTS, TEXT_FIELDS, perplexity_keys, split_windows
from widecli.storage import given_path

if TYPE_CHECKING:
    from widecli.recipe.schema import EvalSection

PAPER_TASKS = ("arc_easy", "arc_challenge", "boolq", "winogrande", "piqa", "openbookqa", "hellaswag")
"""The seven zero-shot tasks behind every average; `paper` is their short name, in this order."""

SCORING_VERSION = 2
"""Raised whenever our own code would give other numbers for the same protocol; stored dense results then expire."""


def expand_tasks(names: Iterable[str]) -> tuple[str, ...]:
    """Replace `paper` by the seven tasks and drop repetitions, keeping the order of first mention."""
    expanded: dict[str, None] = {}
    for name in names:
        expanded.update(dict.fromkeys(PAPER_TASKS if name == "paper" else (name,)))
    return tuple(expanded)


@dataclass(frozen=True)
class EvalProtocol:
    """Everything besides the model that an evaluation result depends on.

    Batch size and device are absent on purpose: results do not depend on them (beyond floating-point noise).
    """

    tasks: tuple[str, ...]
    limit: int | None
    max_length: int
    perplexity: tuple[str, ...]
    perplexity_windows: int | None
    perplexity_window: int
    data: str
    lm_eval: str
    transformers: str
    scoring: int = SCORING_VERSION

    @classmethod
    def from_section(cls, section: EvalSection, text_field: str = TEXT_FIELDS[0]) -> EvalProtocol:
        """The protocol that a recipe's `eval` section asks for, with the versions installed here.

        `text_field`: where rows of files have their text first of all.
        """
        named = perplexity_keys(section.perplexity)
        texts = tuple(_text_identity(name, key, text_field) for name, key in named.items())
        return cls(
            tasks=expand_tasks(section.tasks),
            limit=section.limit,
            max_length=section.max_length,
            perplexity=texts,
            perplexity_windows=section.perplexity_windows,
            perplexity_window=section.perplexity_window,
            data=_data_identity(section.data_root),
            lm_eval=_installed("lm-eval"),
            transformers=_installed("transformers"),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a summary: JSON without further conversion."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _text_identity(name: str, key: str, text_field: str) -> str:
    """A named text stands for itself; a file for its label and contents, so that an edited file is another protocol."""
    text, _ = split_windows(name)
    path = given_path(text)
    if text in NAMED_TEXTS or not path.is_file():
        return name
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256")
    if text_field not in TEXT_FIELDS:
        found.update(text_field.encode())  # the same rows with another text
    digest = found.hexdigest()[:16]
    return f"{key.removesuffix(f'/{METRIC}')}:{digest}"


def _data_identity(data_root: str | None) -> str:
    """`hub`, or a digest of the names and sizes below the data root (cheap, and independent of where it lies)."""
    if data_root is None:
        return "hub"
    root = given_path(data_root)
    listing = hashlib.sha256()
    for path in sorted(p for p in root.glob("**/*") if p.is_file() and p.suffix != ".md"):
        listing.update(os.fsencode(f"{path.relative_to(root).as_posix()} {path.stat().st_size}\n"))
    return f"root:{listing.hexdigest()[:16]}"

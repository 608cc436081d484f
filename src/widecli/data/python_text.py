"""Text that every Python installation has: the standard library's docstrings and the reference behind `help()`."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from widecli.errors import UsageError

# Tests, bundled wheels and generated code tables say little in English; pydoc_data is the held-out text itself.
_LEFT_OUT = frozenset(
    {
        "pydoc_data",
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "_bundled",
        "encodings",
        "__pycache__",
    }
)
_MIN_DOCSTRING_CHARS = 40
# A run of so many words shared with the held-out text counts as the same text.
OVERLAP_WORDS = 13


class StandardLibrary:
    """Docstrings of the standard library, one module a document, read from source without importing anything.

    Each is preceded by the signature it belongs to, as a reference manual would print it. Docstrings that share a run
    of 13 words with `pydoc-topics` are left out, so that text stays unseen. Modules come in a fixed mixed order.
    """

    name = "stdlib"

    def __init__(self, root: Path | None = None) -> None:
        self.root = root if root is not None else Path(sysconfig.get_path("stdlib"))

    def _modules(self) -> list[Path]:
        kept: list[Path] = []
        for folder, folders, files in os.walk(self.root):
            folders[:] = [name for name in folders if name not in _LEFT_OUT]
            inside = Path(folder).relative_to(self.root)
            kept += [inside / name for name in files if name.endswith(".py") and not name.startswith("test_")]
        # By a hash of the name: alphabetical order would put whole topics (asyncio, ...) next to each other.
        return sorted(kept, key=lambda file: hashlib.sha256(file.as_posix().encode()).digest())

    def identity(self) -> dict[str, str | int]:
        """The Python version, and the modules with their sizes: distributions leave some out."""
        modules = [(file.as_posix(), (self.root / file).stat().st_size) for file in self._modules()]
        return {
            "kind": "stdlib",
            "python": platform.python_version(),
            "modules": hashlib.sha256(json.dumps(modules).encode()).hexdigest(),
        }

    def documents(self) -> Iterator[str]:
        """One document a module that has docstrings."""
        held_out = _held_out_runs()
        for file in self._modules():
            try:
                source = (self.root / file).read_bytes()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # odd escapes in old modules are not our user's concern
                    tree = ast.parse(source)
            except (OSError, SyntaxError, ValueError, RecursionError):
                continue  # templates and deliberately broken files
            sections = [
                section
                for section in _sections(tree, ".".join(file.with_suffix("").parts).removesuffix(".__init__"))
                if not _runs(section) & held_out
            ]
            if sections:
                yield "\n\n".join(sections) + "\n"


class PydocTopics:
    """The topics of `pydoc_data`, in sorted order: the held-out text of the demo."""

    name = "pydoc-topics"

    def identity(self) -> dict[str, str | int]:
        """The Python version and a hash of the text."""
        text = "\0".join(self.documents())
        return {
            "kind": "pydoc-topics",
            "python": platform.python_version(),
            "text": hashlib.sha256(text.encode()).hexdigest(),
        }

    def documents(self) -> Iterator[str]:
        """One document a topic."""
        topics = _topics()
        if not topics:
            raise UsageError("this Python has no pydoc_data.topics (pydoc-topics): name another text")
        for topic in sorted(topics):
            if topics[topic].strip():
                yield topics[topic]


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return {}
    return dict(topics)


@lru_cache(maxsize=1)
def _held_out_runs() -> frozenset[tuple[str, ...]]:
    return frozenset(run for text in _topics().values() for run in _runs(text))


def _runs(text: str) -> set[tuple[str, ...]]:
    """All runs of `OVERLAP_WORDS` words, whatever the case and punctuation."""
    words = "".join(char if char.isalnum() else " " for char in text.lower()).split()
    return {tuple(words[start : start + OVERLAP_WORDS]) for start in range(len(words) - OVERLAP_WORDS + 1)}


def _sections(tree: ast.Module, module: str) -> Iterator[str]:
    """The docstrings below a node, in source order, each under its heading."""
    doc = _docstring(tree)
    if doc:
        yield f"{module}\n\n{doc}"
    pending: list[tuple[ast.AST, str]] = [(node, module) for node in reversed(tree.body)]
    while pending:
        node, owner = pending.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = _docstring(node)
            if doc:
                yield f"{_heading(node, owner)}\n\n{doc}"
            if isinstance(node, ast.ClassDef):
                pending += [(child, f"{owner}.{node.name}") for child in reversed(node.body)]
        elif isinstance(node, ast.If | ast.Try | ast.ExceptHandler):  # definitions that depend on the platform
            pending += [(child, owner) for child in reversed(list(ast.iter_child_nodes(node)))]


def _heading(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, owner: str) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {owner}.{node.name}"
    return f"{owner}.{node.name}({ast.unparse(node.args)})"


def _docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    doc = ast.get_docstring(node, clean=False)
    if doc is None or len(doc) < _MIN_DOCSTRING_CHARS:
        return None
    return inspect.cleandoc(doc).encode("utf-8", "replace").decode()

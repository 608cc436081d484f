from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import pytest

from widecli.data import python_text
from widecli.data.python_text import OVERLAP_WORDS, PydocTopics, StandardLibrary, _runs

MODULE = '''"""A module that says a little about itself, for reading."""
raise RuntimeError("nothing here is ever run")

class Box:
    """Holds one thing, and gives it back when it is asked to."""

    def open(self, *, slowly: bool = False) -> None:
        """Open the box; with slowly=True it takes rather longer."""
        def inner():
            """Functions within functions are nobody's manual entry."""

    def close(self): "too short"

try:
    import nothing
except ImportError:
    async def fallback(x):
        """Used where the better implementation cannot be found."""
'''


@pytest.fixture
def library(tmp_path: Path) -> Path:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/box.py").write_text(MODULE)
    (tmp_path / "pack/bare.py").write_text("x = 1")
    (tmp_path / "broken.py").write_text("def (:")
    (tmp_path / "latin.py").write_bytes(b'"""caf\xe9 has no declared encoding and is no Python at all"""')
    for left_out in ("test/test_a.py", "pydoc_data/topics.py", "site-packages/other.py", "test_b.py"):
        file = tmp_path / left_out
        file.parent.mkdir(exist_ok=True)
        file.write_text('"""This must not be found in the text, whatever happens here."""')
    return tmp_path


def test_docstrings_come_in_source_order_under_their_signatures(library: Path) -> None:
    (document,) = StandardLibrary(library).documents()
    assert document.split("\n\n") == [
        "pack.box",
        "A module that says a little about itself, for reading.",
        "class pack.box.Box",
        "Holds one thing, and gives it back when it is asked to.",
        "pack.box.Box.open(self, *, slowly: bool=False)",
        "Open the box; with slowly=True it takes rather longer.",
        "pack.box.fallback(x)",
        "Used where the better implementation cannot be found.\n",
    ]


def test_text_shared_with_the_held_out_topics_is_dropped(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"word{index}" for index in range(40)]
    (library / "pack/box.py").write_text(
        f'"""{" ".join(words[:30])}"""\ndef f():\n    """{" ".join(words[28:])} {words[0] * 9}"""'
    )
    python_text._held_out_runs.cache_clear()
    monkeypatch.setattr(python_text, "_topics", lambda: {"a": " ".join(words[5 : 5 + OVERLAP_WORDS]).upper()})
    try:
        (document,) = StandardLibrary(library).documents()
    finally:
        python_text._held_out_runs.cache_clear()
    assert document.startswith("pack.box.f()")
    assert "word28" in document
    assert "word5" not in document.split()


def test_the_identity_follows_the_modules(library: Path) -> None:
    before = StandardLibrary(library).identity()
    assert StandardLibrary(library).identity() == before
    (library / "pack/bare.py").write_text("x = 12")
    assert StandardLibrary(library).identity() != before


def test_this_pythons_library_is_read_without_importing_it() -> None:
    loaded = set(sys.modules)
    documents = list(islice(StandardLibrary().documents(), 25))
    assert sum(map(len, documents)) > 20_000
    assert set(sys.modules) - loaded <= {"pydoc_data", "pydoc_data.topics"}
    assert documents[:5] == list(islice(StandardLibrary().documents(), 5))


@pytest.mark.slow
def test_no_run_of_words_is_shared_with_the_held_out_text() -> None:
    held_out = {run for text in PydocTopics().documents() for run in _runs(text)}
    assert len(held_out) > 10_000
    for document in StandardLibrary().documents():
        # Section by section: a run across two docstrings is nobody's text.
        for section in document.split("\n\n"):
            assert not _runs(section) & held_out


def test_topics_come_sorted_and_none_is_empty() -> None:
    from pydoc_data.topics import topics

    documents = list(PydocTopics().documents())
    assert documents[0] == topics[min(topics)]
    assert len(documents) == sum(bool(text.strip()) for text in topics.values())
    assert all(text.strip() for text in documents)

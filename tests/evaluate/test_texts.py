from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from widecli.errors import UsageError
from widecli.evaluate.texts import perplexity_key, perplexity_text


def test_wikitext_joins_the_articles_with_nothing_between(hub_folder: Path) -> None:
    label, text = perplexity_text("wikitext2", str(hub_folder), offline=True)
    assert label == "WikiText-2 raw test"
    assert text.startswith(" = Title 0 = \n") and ". \n = Title 1 = \n" in text


def test_pydoc_topics_come_sorted() -> None:
    from pydoc_data.topics import topics

    _, text = perplexity_text("pydoc-topics")
    first, second = sorted(topics)[:2]
    assert text.startswith(f"{topics[first]}\n\n{topics[second]}")


def test_a_file_is_read_by_its_kind(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("héllo", encoding="utf-8")
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write('{"text": "one"}\n\n{"text": "two"}\n')
    assert perplexity_text(str(tmp_path / "plain.txt")) == ("plain.txt", "héllo")
    assert perplexity_text(str(tmp_path / "rows.jsonl.gz")) == ("rows.jsonl.gz", "one\n\ntwo")


def test_keys_name_the_text() -> None:
    assert perplexity_key("wikitext2") == "wikitext2/token_ppl"
    assert perplexity_key("some/folder/rows.jsonl.gz") == "rows/token_ppl"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.jsonl", b'{"text": "x"}\n{oops\n', "Line 2 of bad.jsonl"),
        ("other.jsonl", b'{"body": "x", "id": 1}\n', "it has: body, id"),
        ("list.jsonl", b"[1]\n", "it has: list"),
        ("empty.txt", b" \n", "empty"),
        ("latin.txt", b"caf\xe9", "cannot be read"),
        ("cut.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99, mtime=0)[:30], "cannot be read"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        perplexity_text(str(tmp_path / name))


def test_an_unknown_text_lists_what_there_is() -> None:
    with pytest.raises(UsageError, match=r"wikitext3.*wikitext2, pydoc-topics"):
        perplexity_text("wikitext3")


def test_offline_without_the_data_is_refused_up_front(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="EleutherAI/wikitext_document_level"):
        perplexity_text("wikitext2", str(tmp_path), offline=True)

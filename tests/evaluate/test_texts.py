from __future__ import annotations

import gzip
import json
import os
import re
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from widecli.data.local_files import LocalFiles
from widecli.errors import UsageError
from widecli.evaluate.texts import NAMED_TEXTS, beginning, check_texts, perplexity_keys, perplexity_text


def read(name: Path | str) -> str:
    return "".join(perplexity_text(str(name))[1])


def test_wikitext_joins_the_articles_with_nothing_between(hub_folder: Path) -> None:
    label, pieces = perplexity_text("wikitext2", str(hub_folder), offline=True)
    text = "".join(pieces)
    assert label == "WikiText-2 raw test"
    assert text.startswith(" = Title 0 = \n") and ". \n = Title 1 = \n" in text


def test_pydoc_topics_come_sorted() -> None:
    from pydoc_data.topics import topics

    first, second = sorted(topics)[:2]
    assert read("pydoc-topics").startswith(f"{topics[first]}\n\n{topics[second]}")


def test_a_text_that_may_not_be_read_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "private.txt"
    path.write_text("words")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UsageError, match=r"private\.txt may not be read \(permission denied\)"):
        check_texts([str(path)])


def test_a_text_file_is_read_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("  héllo\n\n\n there \n", encoding="utf-8")
    assert read(tmp_path / "plain.txt") == "  héllo\n\n\n there \n"


ROWS = ["one  ü", "two\nlines"]


def written(folder: Path) -> dict[str, Path]:
    """The same two rows, or the same text, in every kind of file."""
    lines = "".join(json.dumps({"text": row, "id": 1}) + "\n" for row in ROWS).encode()
    text = "\n\n".join(ROWS).encode()
    rows = {
        "plain.jsonl": lines,
        "UPPER.JSONL": lines,
        "bom.jsonl": b"\xef\xbb\xbf" + lines,
        "packed.Jsonl.GZ": gzip.compress(lines),
        "null.jsonl": b'{"text": null}\n\n' + lines + b'{"text": " "}\n',
        "plain.txt": text,
        "bom.txt": b"\xef\xbb\xbf" + text,
        "windows.TXT": text.replace(b"\n", b"\r\n"),
        "packed.txt.gz": gzip.compress(text),
    }
    for name, content in rows.items():
        (folder / name).write_bytes(content)
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": [*ROWS, None]}), folder / "table.Parquet")
    return {name: folder / name for name in (*rows, "table.Parquet")}


def test_every_kind_of_file_gives_the_text_that_training_reads(tmp_path: Path) -> None:
    for name, path in written(tmp_path).items():
        check_texts([str(path)])
        assert read(path) == "\n\n".join(ROWS), name
        documents = list(LocalFiles([str(path)], text_field="text").documents())
        assert sorted("\n\n".join(documents).split()) == sorted("\n\n".join(ROWS).split()), name


def test_lone_surrogates_reach_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "half \\ud83d"}\n')
    assert read(tmp_path / "a.jsonl") == "half ?"


def test_another_field_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "body": "two"}\n{"text": "three"}\n')
    assert "".join(perplexity_text(str(tmp_path / "a.jsonl"), fields=("body", "text"))[1]) == "two\n\nthree"


def test_no_more_is_read_than_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "words"}\n' * 5 + "{broken\n")
    (tmp_path / "a.txt").write_bytes(b"x" * 400_000 + b"\xff")
    assert beginning(perplexity_text(str(tmp_path / "a.jsonl"))[1], 12) == "words\n\nwords"
    assert beginning(perplexity_text(str(tmp_path / "a.txt"))[1], 200_000) == "x" * 200_000
    assert max(map(len, islice(perplexity_text(str(tmp_path / "a.txt"))[1], 2))) < 150_000


def test_keys_name_the_text() -> None:
    names = ["wikitext2", "wikitext2@60", "some/folder/rows.jsonl.gz", "news.v1.txt", "news.v2.txt@4"]
    assert list(perplexity_keys(names).values()) == [
        "wikitext2/token_ppl",
        "wikitext2@60/token_ppl",
        "rows/token_ppl",
        "news.v1/token_ppl",
        "news.v2@4/token_ppl",
    ]


def test_what_would_be_called_the_same_is_told_apart() -> None:
    names = ["a/x/t.txt", "b/x/t.txt", "u.txt", "u.jsonl", "wikitext2.txt", "WikiText2@60.txt", "v.txt", "v.txt@2"]
    labels = [key.removesuffix("/token_ppl") for key in perplexity_keys(names).values()]
    assert labels == ["a/x/t.txt", "b/x/t.txt", "u.txt", "u.jsonl", "wikitext2.txt", "WikiText2@60.txt", "v", "v@2"]


def test_one_text_under_two_names_has_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").touch()
    keys = perplexity_keys(["t.txt", "./t.txt", str(tmp_path / "t.txt")])
    assert set(keys.values()) == {"t/token_ppl"}


_FOLDERS = st.sampled_from(["", "a/", "b/", "a/b/", "./", "a/../b/", "wikitext2/"])
_STEMS = st.sampled_from(["t", "t@2", "T", "wikitext2", "wikitext2@2", "pydoc-topics", "t.txt", ".", "t.v1"])
_ENDS = st.sampled_from([".txt", ".TXT", ".jsonl", ".txt.gz", ".txt@2", ".txt@3"])
_NAMES = st.one_of(
    st.builds("".join, st.tuples(_FOLDERS, _STEMS, _ENDS)), st.sampled_from([*NAMED_TEXTS, "wikitext2@2"])
)


@given(st.lists(_NAMES, min_size=1, max_size=8))
def test_texts_share_a_key_exactly_when_they_are_the_same_text(names: list[str]) -> None:
    from widecli.evaluate.texts import split_windows

    def meant(name: str) -> object:
        text, windows = split_windows(name)
        return name if text in NAMED_TEXTS else (Path(text).resolve(), windows)

    keys = perplexity_keys(names)
    for one in names:
        for other in names:
            if meant(one) != meant(other):
                assert keys[one] != keys[other]
        if re.fullmatch(rf"({'|'.join(NAMED_TEXTS)})(@\d+)?", keys[one].removesuffix("/token_ppl"), re.IGNORECASE):
            assert split_windows(one)[0] in NAMED_TEXTS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.jsonl", b'{"text": "x"}\n{oops\n', "bad.jsonl line 2"),
        ("other.jsonl", b'{"body": "x", "id": 1}\n', "its fields: body, id"),
        ("list.jsonl", b"[1]\n", "no JSON object"),
        ("empty.txt", b" \n", "empty"),
        ("empty.jsonl", b'{"text": ""}\n', "empty"),
        ("latin.txt", b"caf\xe9", "not UTF-8"),
        ("cut.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99, mtime=0)[:30], "damaged"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read(tmp_path / name)


@pytest.mark.parametrize(
    "name", ["wikitext3", "missing.txt", "table.csv", "x" * 5000, "nul\0.txt", "~nobody-here/x.txt"]
)
def test_what_is_no_text_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text("a,b")
    with pytest.raises(UsageError):
        check_texts([name])


def test_an_unknown_text_lists_what_there_is() -> None:
    with pytest.raises(UsageError, match=r"wikitext3.*wikitext2, pydoc-topics"):
        perplexity_text("wikitext3")


def test_offline_without_the_data_is_refused_up_front(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="EleutherAI/wikitext_document_level"):
        perplexity_text("wikitext2", str(tmp_path), offline=True)

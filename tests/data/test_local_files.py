from __future__ import annotations

import gzip
import json
import os
import random
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from widecli.data.file_formats import Document, text_bytes
from widecli.data.local_files import LocalFiles, _mixed, _shuffled, find_files, is_local
from widecli.errors import UsageError


def write_jsonl(path: Path, texts: Iterable[str], field: str = "text") -> Path:
    content = "".join(json.dumps({field: text}) + "\n" for text in texts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    return path


def write_parquet(path: Path, texts: list[str | None], field: str = "text") -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({field: texts, "id": list(range(len(texts)))}), path)
    return path


def read(*names: Path | str, field: str = "text") -> list[str]:
    return list(LocalFiles([str(name) for name in names], text_field=field).documents())


def test_every_format_gives_its_documents(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["one", "zwei ü"])
    write_jsonl(tmp_path / "sub/b.jsonl.gz", ["three"])
    write_parquet(tmp_path / "c.parquet", ["four", None, ""])
    (tmp_path / "d.txt").write_text("\ufefffive\r\n\r\nsix\n", encoding="utf-8")
    (tmp_path / "e.txt.gz").write_bytes(gzip.compress(b"seven"))
    (tmp_path / "README.md").write_text("not text to learn from")
    (tmp_path / ".hidden.txt").write_text("nor this")
    assert sorted(read(tmp_path)) == sorted(["one", "zwei ü", "three", "four", "five\n\nsix", "seven"])


def test_names_globs_and_folders_may_overlap_and_each_file_counts_once(tmp_path: Path) -> None:
    one = write_jsonl(tmp_path / "x/one.jsonl", ["1"])
    write_jsonl(tmp_path / "x/deep/two.jsonl", ["2"])
    names = [str(one), str(tmp_path / "x"), str(tmp_path / "x/**/*.jsonl")]
    assert [file.name for file in find_files(names)] == ["two.jsonl", "one.jsonl"]


def test_links_are_followed_under_their_own_names(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "0a1b").write_text('{"text": "linked file"}\n')  # as the Hub's cache keeps files
    (snapshot / "train.jsonl").symlink_to("../../blobs/0a1b")
    write_jsonl(tmp_path / "store" / "deep" / "more.jsonl", ["linked folder"])
    (snapshot / "part2").symlink_to(tmp_path / "store")
    (tmp_path / "store" / "back").symlink_to(snapshot)  # a circle
    (tmp_path / "whole").symlink_to(snapshot)
    assert read(snapshot / "train.jsonl") == ["linked file"]
    for name in (snapshot, tmp_path / "whole", tmp_path / "snapshots" / "*", tmp_path / "snapshots" / "**"):
        assert sorted(read(name)) == ["linked file", "linked folder"], name
    assert LocalFiles([str(tmp_path / "whole")], text_field="text").identity()["num_files"] == 2


def test_a_file_behind_several_links_counts_once(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "store" / "a.jsonl", ["one"])
    (tmp_path / "b.jsonl").symlink_to("store/a.jsonl")
    (tmp_path / "again").symlink_to("store")
    assert read(tmp_path) == ["one"]
    assert read(tmp_path / "store", tmp_path / "b.jsonl", tmp_path / "again" / "*.jsonl") == ["one"]


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data" / "a.jsonl", ["one"])
    (tmp_path / "data" / "part2").symlink_to(tmp_path / "gone")
    for name in ("data", "data/part2"):
        with pytest.raises(UsageError, match=r"part2 is a link to .*gone, which is not there"):
            find_files([str(tmp_path / name)])


def test_what_exists_under_a_globs_name_is_that(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "x[1]" / "a*b.jsonl", ["literal"])
    write_jsonl(tmp_path / "x1" / "azb.jsonl", ["pattern"])
    write_jsonl(tmp_path / "x[1]" / "azb.jsonl", ["inside"])
    assert read(tmp_path / "x[1]" / "a*b.jsonl") == ["literal"]
    assert sorted(read(tmp_path / "x[1]" / "a*.jsonl")) == ["inside", "literal"]
    assert sorted(read(tmp_path / "x[1]")) == ["inside", "literal"]
    assert read(tmp_path / "x[0-9]") == ["pattern"]


def test_a_txt_without_line_ends_is_read_in_documents_of_bounded_size(tmp_path: Path) -> None:
    words = "some words that go on and on " * 20_000
    (tmp_path / "line.txt").write_text(words)
    (tmp_path / "solid.txt").write_text("x" * 500_000)
    documents = read(tmp_path / "line.txt")
    assert 4 <= len(documents) <= 8 and max(map(len, documents)) <= 140_000
    assert sorted(" ".join(documents).split()) == sorted(words.split())  # no word is cut in two
    assert sum(map(len, read(tmp_path / "solid.txt"))) == 500_000


def test_what_counts_as_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner/name").mkdir(parents=True)
    assert all(map(is_local, ["owner/name", "a.txt", "./x", "/x", "~/x", "data/*.jsonl", "a/b/c", "table.csv"]))
    assert not any(map(is_local, ["allenai/c4", "wikitext", "stdlib", "togethercomputer/RedPajama-Data-1T-Sample"]))


def test_every_prefix_of_a_mix_holds_each_files_share(tmp_path: Path) -> None:
    sizes = {"a": 1000, "b": 300, "c": 100}
    for name, count in sizes.items():
        write_jsonl(tmp_path / f"{name}.jsonl", [name * 40] * count)
    documents = read(tmp_path)
    assert len(documents) == 1400
    for part in (140, 420, 1000):
        counts = Counter(text[0] for text in documents[:part])
        for name, count in sizes.items():
            assert counts[name] == pytest.approx(part * count / 1400, abs=3)


def test_shares_go_by_bytes_of_text_whatever_the_format(tmp_path: Path) -> None:
    texts = [f"{index:05d} some ordinary words that pack rather well" for index in range(2000)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    write_jsonl(tmp_path / "b.jsonl.gz", [text.upper() for text in texts])
    half = read(tmp_path)[:2000]
    assert sum(text.isupper() for text in half) == pytest.approx(1000, abs=10)


def test_documents_are_shuffled_within_a_file_and_the_order_is_repeatable(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [str(index) for index in range(200)])
    first = read(path)
    assert first == read(path)
    assert first != [str(index) for index in range(200)]
    assert sorted(map(int, first)) == list(range(200))


@settings(deadline=None)  # shared machines
@given(st.lists(st.integers(1, 20), max_size=60), st.integers(1, 200))
def test_a_shuffle_buffer_loses_and_doubles_nothing_and_stays_small(sizes: list[int], capacity: int) -> None:
    read_so_far = 0

    def counted() -> Iterable[Document]:
        nonlocal read_so_far
        for index, size in enumerate(sizes):
            read_so_far += size
            yield Document(str(index), size)

    given_out = []
    written = 0
    for document in _shuffled(iter(counted()), capacity, seed=0):
        if read_so_far < sum(sizes):
            assert read_so_far - written <= capacity + 2 * 20  # one document over, and one always stays
        written += document.size_bytes
        given_out.append(int(document.text))
    assert sorted(given_out) == list(range(len(sizes)))


@settings(deadline=None)  # shared machines
@given(st.lists(st.lists(st.integers(1, 9), max_size=15), min_size=1, max_size=6))
def test_mixing_gives_every_document_once(files: list[list[int]]) -> None:
    streams = [iter([Document(f"{f}-{d}", size) for d, size in enumerate(sizes)]) for f, sizes in enumerate(files)]
    mixed = list(_mixed(streams, [max(sum(sizes), 1) for sizes in files]))
    assert sorted(mixed) == sorted(f"{f}-{d}" for f, sizes in enumerate(files) for d in range(len(sizes)))


def test_more_files_than_lanes_are_all_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("widecli.data.local_files.MAX_LANES", 3)
    for index in range(10):
        write_jsonl(tmp_path / f"{index}.jsonl", [f"{index}-{number}" for number in range(4)])
    documents = read(tmp_path)
    assert sorted(documents) == sorted(f"{index}-{number}" for index in range(10) for number in range(4))


def test_a_corpus_beyond_the_buffer_is_read_lazily(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["x" * 100] * 50)
    with path.open("a") as stream:
        stream.write("{broken\n")
    source = LocalFiles([str(path)], text_field="text", shuffle_bytes=1000)
    assert len(list(islice(source.documents(), 20))) == 20


def test_a_long_txt_becomes_several_documents_at_blank_lines(tmp_path: Path) -> None:
    paragraphs = [f"paragraph {index} " + "word " * 500 for index in range(60)]
    (tmp_path / "book.txt").write_text("\n\n".join(paragraphs))
    documents = read(tmp_path / "book.txt")
    assert 3 <= len(documents) <= 5
    assert sorted(p.strip() for text in documents for p in text.split("\n\n")) == sorted(p.strip() for p in paragraphs)


def test_identity_changes_with_a_file_and_with_the_field(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one"])

    def identity(field: str = "text") -> dict[str, str | int]:
        return LocalFiles([str(path)], text_field=field).identity()

    before = identity()
    assert identity() == before
    assert identity("body") != before
    os.utime(path, ns=(1, 1))
    assert identity() != before


def test_lone_surrogates_do_not_reach_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "bad \\ud800 half"}\n')
    assert read(tmp_path / "a.jsonl") == ["bad ? half"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "ok"}\n{"text": \n', r"a\.jsonl line 2 is not valid JSON"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": "\xff"}\n', r"a\.jsonl line 2 is not valid JSON"),
        ("a.jsonl", b'\n["text"]\n', r"line 2 holds no JSON object"),
        ("a.jsonl", b'{"body": "x", "id": 1}\n', r"line 1 has no field 'text' .*body, id"),
        ("a.jsonl", b'{"text": ["x"], "body": "y"}\n', r"holds list, not text; its fields: body"),
        ("a.jsonl.gz", b"not gzip at all", r"a\.jsonl\.gz is damaged"),
        (
            "a.jsonl.gz",
            gzip.compress(random.Random(0).randbytes(9000).hex().encode(), mtime=0)[:-2000],
            r"a\.jsonl\.gz is damaged",
        ),
        ("a.txt.gz", gzip.compress(b"word\n" * 9000, mtime=0)[:-12], r"a\.txt\.gz is damaged"),
        ("a.txt", b"fine\nbad \xff\n", r"a\.txt is not UTF-8"),
        ("a.parquet", b"PAR1 but no", r"a\.parquet is no readable parquet"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read(tmp_path / name)


def test_a_parquet_column_that_is_missing_or_no_text_lists_what_is_there(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ["x"], field="body")
    with pytest.raises(UsageError, match=r"no column 'text'.*body, id"):
        read(path)
    with pytest.raises(UsageError, match="holds int, not text"):
        read(path, field="id")


def test_names_that_cannot_be_read_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.csv").write_text("a,b")
    for name, message in (
        ("missing.jsonl", "does not exist"),
        ("empty", "holds no text file"),
        ("x.csv", "not a kind of file"),
        ("*.jsonl", "holds no text file"),
    ):
        with pytest.raises(UsageError, match=message):
            LocalFiles([str(tmp_path / name)], text_field="text")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["x"])
    path.chmod(0)
    with pytest.raises(UsageError, match=r"cannot read .*a\.jsonl"):
        read(path)


def test_text_bytes_estimates_unpacked_size(tmp_path: Path) -> None:
    texts = ["the same words again and again"] * 500
    plain = write_jsonl(tmp_path / "a.jsonl", texts)
    packed = write_jsonl(tmp_path / "b.jsonl.gz", texts)
    assert text_bytes(packed, "text") == text_bytes(plain, "text") == plain.stat().st_size


@pytest.mark.slow
def test_a_short_prefix_of_real_text_holds_every_source_in_proportion(data_root: Path) -> None:
    folder = data_root / "text"
    sizes: Counter[str] = Counter()
    for file in find_files([str(folder)]):
        sizes[file.parent.name] += text_bytes(file, "text")
    owner = {}
    for file in find_files([str(folder)]):
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            owner.update({json.loads(line)["text"]: file.parent.name for line in lines})
    read_bytes: Counter[str] = Counter()
    for text in islice(LocalFiles([str(folder)], text_field="text").documents(), 2000):
        read_bytes[owner[text]] += len(text.encode())
    for name, size in sizes.items():
        share = size / sizes.total()
        assert read_bytes[name] / read_bytes.total() == pytest.approx(share, abs=0.01), name

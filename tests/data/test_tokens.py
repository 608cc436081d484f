from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from widecli.data import token_file
from widecli.data.stream import collate
from widecli.data.tokens import prepare_tokens, tokens_to_prepare
from widecli.errors import UsageError, WideError
from widecli.recipe.schema import DataSection
from widecli.storage import _sweep


class Texts:
    """A source that counts how often it is read."""

    name = "texts"

    def __init__(self, *texts: str, version: int = 0, pause_s: float = 0) -> None:
        self.texts = texts
        self.version = version
        self.pause_s = pause_s
        self.reads = 0

    def identity(self) -> dict[str, str | int]:
        return {"kind": "texts", "version": self.version}

    def documents(self) -> Iterator[str]:
        self.reads += 1
        for text in self.texts:
            time.sleep(self.pause_s)
            yield text


def section(**keys: Any) -> DataSection:
    return DataSection(**{"sequence_length": 8, **keys})


LONG = tuple(f"document number {index} with some words" for index in range(100))


def test_windows_read_back_are_the_documents_joined(tokenizer: Any, cache: Path) -> None:
    tokens = prepare_tokens(Texts("abcd", "efghij", "kl"), tokenizer, section(), tokens_needed=100, cache_dir=cache)
    assert len(tokens) == 1
    assert tokens.exhausted
    ids, length = tokens.sequence(0)
    assert ids.dtype == np.int64
    assert length == 8
    assert tokenizer.decode(ids) == "abcd</s>efg"
    assert tokens.total_tokens == 8


def test_samples_are_cut_padded_and_masked_by_length_though_pad_is_eos(tokenizer: Any, cache: Path) -> None:
    texts = Texts("abc", "a very long document", "xy")
    tokens = prepare_tokens(texts, tokenizer, section(packing="sample"), tokens_needed=64, cache_dir=cache)
    assert len(tokens) == 3
    assert tokens.total_tokens == 4 + 8 + 3
    ids, mask = collate(tokens, [0, 1, 2, 0])
    assert ids.shape == mask.shape == (4, 8)
    assert str(ids.dtype) == "torch.int64"
    assert str(mask.dtype) == "torch.bool"
    assert mask.sum(1).tolist() == [4, 8, 3, 4]
    assert mask[0].tolist() == [True] * 4 + [False] * 4
    eos = tokenizer.eos_token_id
    assert ids[0, 3] == eos  # the document's own end counts
    assert ids[0, 4:].eq(eos).all()  # padding looks the same and does not
    assert tokenizer.decode(ids[1]) == "a very l"


def test_an_index_outside_is_refused(tokenizer: Any, cache: Path) -> None:
    tokens = prepare_tokens(Texts(*LONG), tokenizer, section(), tokens_needed=64, cache_dir=cache)
    for index in (-1, len(tokens)):
        with pytest.raises(IndexError):
            tokens.sequence(index)


def test_a_second_call_reads_the_cache_not_the_source(tokenizer: Any, cache: Path) -> None:
    source = Texts(*LONG)
    first = prepare_tokens(source, tokenizer, section(), tokens_needed=64, cache_dir=cache)
    again = prepare_tokens(source, tokenizer, section(), tokens_needed=60, cache_dir=cache)  # the same power of two
    assert source.reads == 1
    assert again.identity == first.identity
    assert (again.sequence(3)[0] == first.sequence(3)[0]).all()
    assert not first.exhausted
    assert first.total_tokens == 64


def test_everything_the_tokens_depend_on_is_in_the_key(
    make_tokenizer: Callable[..., Any], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(version: int = 0, needed: int = 64, extra: tuple[str, ...] = (), **keys: Any) -> str:
        source = Texts(*LONG, version=version)
        return prepare_tokens(
            source, make_tokenizer(extra=extra), section(**keys), tokens_needed=needed, cache_dir=cache
        ).identity

    keys = [
        key(),
        key(version=1),
        key(needed=65),
        key(extra=("<x>",)),
        key(sequence_length=16),
        key(packing="sample"),
        key(max_tokens=48),
    ]
    monkeypatch.setattr("widecli.data.tokens.CODE_VERSION", 999)
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_the_default_cache_lies_under_xdg_cache_home(tokenizer: Any, tmp_path: Path) -> None:
    tokens = prepare_tokens(Texts(*LONG), tokenizer, section(), tokens_needed=64)
    assert tokens.folder.parent == tmp_path / "xdg/wide/tokens"


def damage_by_truncation(folder: Path) -> None:
    with (folder / "tokens.npy").open("r+b") as stream:
        stream.truncate(140)


def damage_one_byte(folder: Path) -> None:
    with (folder / "tokens.npy").open("r+b") as stream:
        stream.seek(-3, os.SEEK_END)
        byte = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte[0] ^ 1]))


def damage_description(folder: Path) -> None:
    (folder / "meta.json").write_text('{"format": ')


def damage_whole_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("a file in its place")


@pytest.mark.parametrize(
    "damage",
    [
        damage_by_truncation,
        damage_one_byte,
        damage_description,
        damage_whole_folder,
        lambda folder: (folder / "meta.json").unlink(),
        lambda folder: (folder / "offsets.npy").unlink(),
    ],
)
def test_a_damaged_cache_is_built_anew(tokenizer: Any, cache: Path, damage: Callable[[Path], None]) -> None:
    source = Texts(*LONG)

    def prepare() -> Any:
        return prepare_tokens(source, tokenizer, section(packing="sample"), tokens_needed=64, cache_dir=cache)

    first = prepare()
    expected = [first.sequence(index)[0].tolist() for index in range(len(first))]
    damage(first.folder)
    second = prepare()
    assert source.reads == 2
    assert [second.sequence(index)[0].tolist() for index in range(len(second))] == expected


def test_pickled_arrays_are_not_loaded(tokenizer: Any, cache: Path) -> None:
    tokens = prepare_tokens(Texts(*LONG), tokenizer, section(), tokens_needed=64, cache_dir=cache)
    np.save(tokens.folder / "tokens.npy", np.array([{}], dtype=object), allow_pickle=True)
    assert token_file.load_token_set(tokens.folder) is None


def build_slowly(tokenizer: Any, cache: Path, started: Any) -> None:
    class Slow(Texts):
        def documents(self) -> Iterator[str]:
            for number, text in enumerate(super().documents()):
                if number == 5:
                    started.set()
                    time.sleep(60)
                yield text * 400

    import widecli.data.packing

    widecli.data.packing._MAX_BATCH_CHARS = 1
    prepare_tokens(Slow(*LONG), tokenizer, section(), tokens_needed=10**6, cache_dir=cache)


def test_a_build_killed_midway_leaves_nothing_that_loads(tokenizer: Any, cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    started = context.Event()
    process = context.Process(target=build_slowly, args=(tokenizer, cache, started))
    process.start()
    assert started.wait(30)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    (left,) = cache.iterdir()
    assert left.name.startswith(".building-")
    assert token_file.load_token_set(left) is None
    source = Texts(*LONG)
    prepare_tokens(source, tokenizer, section(), tokens_needed=64, cache_dir=cache)
    assert source.reads == 1


def test_leftovers_of_killed_builds_go_when_they_are_old(cache: Path) -> None:
    for name, age_s in (("old", 48 * 3600), ("new", 60)):
        folder = cache / f".building-{name}"
        folder.mkdir(parents=True)
        (folder / "tokens.npy").write_bytes(b"")
        os.utime(folder / "tokens.npy", (time.time() - age_s,) * 2)
    _sweep(cache)
    assert [folder.name for folder in cache.iterdir()] == [".building-new"]


def test_a_source_that_fails_midway_leaves_nothing(tokenizer: Any, cache: Path) -> None:
    class Failing(Texts):
        def documents(self) -> Iterator[str]:
            yield from LONG
            raise UsageError("file x line 3 is not valid JSON")

    with pytest.raises(UsageError, match="line 3"):
        prepare_tokens(Failing(), tokenizer, section(), tokens_needed=10**6, cache_dir=cache)
    assert list(cache.iterdir()) == []


def test_two_builders_at_once_both_get_the_tokens(tokenizer: Any, cache: Path) -> None:
    class Overtaken(Texts):
        """Another process finishes the same set while this one is being read."""

        def documents(self) -> Iterator[str]:
            prepare_tokens(Texts(*LONG), tokenizer, section(), tokens_needed=64, cache_dir=cache)
            yield from super().documents()

    tokens = prepare_tokens(Overtaken(*LONG), tokenizer, section(), tokens_needed=64, cache_dir=cache)
    assert len(tokens) == 8
    assert [entry.name for entry in cache.iterdir()] == [tokens.identity]


@pytest.mark.parametrize(
    ("texts", "keys", "message"),
    [
        ((), {}, "'texts' is empty"),
        (("abc",), {}, "4 tokens, less than one sequence of data.sequence_length=8"),
        ((), {"packing": "sample"}, "'texts' is empty"),
        (LONG, {"max_tokens": 7}, "data.max_tokens=7 is less than one sequence"),
    ],
)
def test_too_little_text_is_a_usage_error(
    tokenizer: Any, cache: Path, texts: tuple[str, ...], keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        prepare_tokens(Texts(*texts), tokenizer, section(**keys), tokens_needed=64, cache_dir=cache)


@pytest.mark.parametrize(
    ("number", "message"), [(errno.ENOSPC, "No space left .*XDG_CACHE_HOME"), (errno.EACCES, "not writable")]
)
def test_a_disk_that_refuses_is_one_sentence(
    tokenizer: Any, cache: Path, monkeypatch: pytest.MonkeyPatch, number: int, message: str
) -> None:
    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(WideError, match=message) as caught:
        prepare_tokens(Texts(*LONG), tokenizer, section(), tokens_needed=64, cache_dir=cache)
    assert caught.value.exit_code == 1
    assert list(cache.iterdir()) == []


def test_large_vocabularies_keep_their_ids(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    description = {"sequence_length": 2, "pad_token_id": 0, "identity": "k", "source": {}}
    token_file.write_token_set(
        folder,
        [np.array([70_000, 128_255])],
        padded=False,
        max_sequences=1,
        max_token_id=128_255,
        description=description,
        on_tokens=lambda _: None,
    )
    loaded = token_file.load_token_set(folder)
    assert loaded is not None
    assert loaded.sequence(0)[0].tolist() == [70_000, 128_255]
    assert json.loads((folder / "meta.json").read_text())["total_tokens"] == 2


def test_how_many_tokens_are_prepared() -> None:
    assert tokens_to_prepare(section(), 1000) == 1024
    assert tokens_to_prepare(section(), 1024) == 1024
    assert tokens_to_prepare(section(), 1) == 8
    assert tokens_to_prepare(section(max_tokens=1000), 10**9) == 1000


def test_nothing_is_printed_without_a_terminal(tokenizer: Any, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prepare_tokens(Texts(*LONG), tokenizer, section(), tokens_needed=64, cache_dir=cache)
    assert capfd.readouterr() == ("", "")

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from widecli.data.packing import DocumentEncoder, samples, token_ids, tokenizer_fingerprint, windows

lengths = st.lists(st.integers(1, 30), max_size=30)


def numbered(sizes: list[int]) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    ends = np.cumsum([0, *sizes])
    return [np.arange(start, end) for start, end in pairwise(ends)]


@settings(deadline=None)  # shared machines
@given(lengths, st.integers(1, 12), st.integers(1, 40))
def test_concat_keeps_every_token_in_order_up_to_the_last_whole_window(
    sizes: list[int], sequence_length: int, max_sequences: int
) -> None:
    packed = list(windows(numbered(sizes), sequence_length, max_sequences))
    joined = np.concatenate(packed) if packed else np.empty(0, dtype=np.int64)
    expected = min(sum(sizes) // sequence_length, max_sequences) * sequence_length
    assert joined.tolist() == list(range(expected))


def test_concat_gives_pieces_of_whole_windows() -> None:
    pieces = list(windows(numbered([70_000, 3, 70_000]), 1000, 10**6))
    assert len(pieces) > 1
    assert all(piece.size % 1000 == 0 for piece in pieces)


@settings(deadline=None)  # shared machines
@given(lengths, st.integers(1, 12), st.integers(1, 40))
def test_sample_gives_one_cut_sequence_a_document(sizes: list[int], sequence_length: int, max_sequences: int) -> None:
    packed = [tokens.tolist() for tokens in samples(numbered(sizes), sequence_length, max_sequences)]
    long_enough = [tokens for tokens in numbered(sizes) if min(tokens.size, sequence_length) >= 2]
    assert packed == [tokens[:sequence_length].tolist() for tokens in long_enough[:max_sequences]]


def test_the_source_is_read_no_further_than_needed() -> None:
    def endless() -> Any:
        while True:
            yield np.arange(10)

    assert sum(piece.size for piece in windows(endless(), 4, 7)) == 28
    assert len(list(samples(endless(), 4, 7))) == 7


def test_a_tokenizer_without_bos_ends_documents_with_eos(tokenizer: Any) -> None:
    (tokens,) = DocumentEncoder.of(tokenizer).encode(["ab"], tokens_needed=10**6)
    assert tokenizer.convert_ids_to_tokens(tokens.tolist()) == ["a", "b", "</s>"]


def test_bos_stands_only_where_the_tokenizer_puts_it(make_tokenizer: Callable[..., Any]) -> None:
    for adds, expected in ((True, ["<s>", "a", "</s>"]), (False, ["a", "</s>"])):
        tokenizer = make_tokenizer(bos=True, adds_bos=adds)
        (tokens,) = DocumentEncoder.of(tokenizer).encode(["a"], tokens_needed=10**6)
        assert tokenizer.convert_ids_to_tokens(tokens.tolist()) == expected


def test_the_pretraining_separator_goes_before_a_chat_models_eos(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(extra=("<|endoftext|>",))
    (tokens,) = DocumentEncoder.of(tokenizer).encode(["a"], tokens_needed=10**6)
    assert tokenizer.convert_ids_to_tokens(tokens.tolist()) == ["a", "<|endoftext|>"]


def test_without_eos_bos_separates_and_without_both_an_empty_line(make_tokenizer: Callable[..., Any]) -> None:
    with_bos = make_tokenizer(bos=True, eos=False)
    (tokens,) = DocumentEncoder.of(with_bos).encode(["a"], tokens_needed=10**6)
    assert with_bos.convert_ids_to_tokens(tokens.tolist()) == ["<s>", "a"]
    bare = make_tokenizer(eos=False)
    assert [bare.decode(tokens) for tokens in DocumentEncoder.of(bare).encode(["a", "b"], tokens_needed=10**6)] == [
        "a\n\n",
        "b\n\n",
    ]


def test_encoding_in_batches_equals_encoding_one_by_one(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"document {index} " * (index % 7 + 1) for index in range(50)]
    together = [tokens.tolist() for tokens in DocumentEncoder.of(tokenizer).encode(texts, tokens_needed=10**6)]
    monkeypatch.setattr("widecli.data.packing._MAX_BATCH_CHARS", 1)
    assert [tokens.tolist() for tokens in DocumentEncoder.of(tokenizer).encode(texts, tokens_needed=10**6)] == together


def test_a_padding_call_leaves_the_fingerprint_alone_and_another_vocabulary_changes_it(
    make_tokenizer: Callable[..., Any],
) -> None:
    tokenizer = make_tokenizer()
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(tokenizer) == before
    assert tokenizer_fingerprint(make_tokenizer()) == before
    assert tokenizer_fingerprint(make_tokenizer(extra=("<x>",))) != before
    assert tokenizer_fingerprint(make_tokenizer(bos=True, adds_bos=True)) != tokenizer_fingerprint(
        make_tokenizer(bos=True)
    )


def test_hardly_more_documents_are_read_than_the_tokens_take(tokenizer: Any) -> None:
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        while True:
            read += 1
            yield "x" * 99

    encoder = DocumentEncoder.of(tokenizer)
    list(windows(encoder.encode(endless(), tokens_needed=50_000), 100, 500))
    assert 500 <= read <= 500 + 42
    read = 0
    list(samples(encoder.encode(endless(), tokens_needed=5000, longest_useful=10), 10, 500))
    assert 500 <= read <= 500 + 42


def test_a_long_text_in_parts_gives_the_tokens_of_the_whole(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a few words, then more of them " * 50
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert token_ids(tokenizer, [text]) == whole
    monkeypatch.setattr("widecli.data.packing._ONE_CALL_CHARS", 100)
    pieces = [text[start : start + 7] for start in range(0, len(text), 7)]
    for given_out in ([text], pieces):
        assert token_ids(tokenizer, given_out) == whole
    for documents in ([text, "b", text], [text * 3]):
        (*_, last) = DocumentEncoder.of(tokenizer).encode(documents, tokens_needed=10**6)
        assert last.tolist()[:-1] == tokenizer(documents[-1], add_special_tokens=False)["input_ids"]


def test_a_long_text_is_read_no_further_than_needed(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("widecli.data.packing._ONE_CALL_CHARS", 100)

    def endless() -> Iterator[str]:
        while True:
            yield "some words "

    assert 500 <= len(token_ids(tokenizer, endless(), 500)) < 700
    monkeypatch.undo()
    assert 500 <= len(token_ids(tokenizer, endless(), 500)) < 40_000
    monkeypatch.setattr("widecli.data.packing._ONE_CALL_CHARS", 100)
    (document,) = DocumentEncoder.of(tokenizer).encode(["words " * 10_000], tokens_needed=500)
    assert 500 <= document.size < 700

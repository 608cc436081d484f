"""From documents to token sequences.

Every document becomes `[BOS] tokens [END]`:

- BOS stands in front where the tokenizer itself puts it there (Llama 3 does, SmolLM2 and Qwen don't), or where it has
  no END;
- END is the token that separated documents in pre-training: `<|endoftext|>` or `<|end_of_text|>` where the tokenizer
  has one, else its EOS. (The EOS of a chat model ends a turn, which is not the same.) A tokenizer with neither BOS nor
  END gets an empty line between documents.

`concat` joins them and cuts windows of `sequence_length`: no padding; a window may hold several documents, which see
each other; what doesn't fill the last window is dropped. `sample` makes one sequence of each document: cut at
`sequence_length` (a cut document has no END) or padded on the right, and whatever reads it goes by its length.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]

_END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>")
_MIN_BATCH_CHARS, _MAX_BATCH_CHARS = 2**12, 2**20
_BATCH_DOCUMENTS = 1024
_ONE_CALL_CHARS = 2**22
"""Longest text that a tokenizer gets at once: beyond it needs gigabytes. WikiText-2's test split has 1.3 million."""
_CUT_WITHIN_CHARS = 2**12
_CHARS_A_TOKEN = 32  # four are usual


@dataclass(frozen=True)
class DocumentEncoder:
    """A tokenizer and what it puts around a document."""

    tokenizer: Any
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    pad_token_id: int
    fingerprint: str
    has_end: bool = True

    @classmethod
    def of(cls, tokenizer: Any) -> DocumentEncoder:
        """Read the tokenizer's habits; its padding and truncation settings don't matter."""
        bos = tokenizer.bos_token_id
        end = _end_of_document(tokenizer)
        prefix = (bos,) if bos is not None and (end is None or adds_bos(tokenizer)) else ()
        suffix = (end,) if end is not None else ()
        if not prefix and not suffix:
            suffix = tuple(tokenizer("\n\n", add_special_tokens=False)["input_ids"])
        pad = next((token for token in (tokenizer.pad_token_id, end) if token is not None), 0)
        return cls(tokenizer, prefix, suffix, pad, tokenizer_fingerprint(tokenizer), end is not None)

    def encode(
        self, documents: Iterable[str], *, tokens_needed: int, longest_useful: int | None = None
    ) -> Iterator[Tokens]:
        """Tokens of each document (int64), with prefix and suffix; documents without any token are passed over.

        Documents are read in batches that shrink towards `tokens_needed`, so that hardly more are read than that
        takes: they may be expensive. A document counts for at most `longest_useful` tokens.
        """
        iterator = iter(documents)
        left = tokens_needed
        # A token is rarely shorter than a character, so this many characters do not overshoot.
        while texts := _batch(iterator, min(max(left, _MIN_BATCH_CHARS), _MAX_BATCH_CHARS)):
            for tokens in self._encoded(texts, left if longest_useful is None else longest_useful):
                if tokens:
                    document = np.array([*self.prefix, *tokens, *self.suffix], dtype=np.int64)
                    left -= document.size if longest_useful is None else min(document.size, longest_useful)
                    yield document

    def _encoded(self, texts: list[str], enough: int) -> list[list[int]]:
        """Tokens of each text; of one too long for a single call, hardly more than `enough`."""
        if any(len(text) > _ONE_CALL_CHARS for text in texts):
            return [token_ids(self.tokenizer, [text], enough) for text in texts]
        encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return list(encoded["input_ids"])

    def max_token_id(self) -> int:
        """The largest id that can come out."""
        return int(max(len(self.tokenizer) - 1, *self.tokenizer.get_vocab().values(), *self.prefix, *self.suffix))


def token_ids(tokenizer: Any, pieces: Iterable[str], enough: int | None = None) -> list[int]:
    """Tokens of a running text that comes in pieces, without special ones; reading stops when there are `enough`.

    A text of up to four million characters is encoded in one call. A longer one, or more than could be `enough`, is cut
    into parts, each at a space between words, where a tokenizer seldom joins anything.
    """
    ids: list[int] = []
    longest = _ONE_CALL_CHARS
    if enough is not None:
        longest = min(longest, max(_CHARS_A_TOKEN * enough, 2 * _CUT_WITHIN_CHARS))
    for text in _parts(iter(pieces), longest):
        ids += tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        if enough is not None and len(ids) >= enough:
            break
    return ids


def _parts(pieces: Iterator[str], longest: int) -> Iterator[str]:
    held: list[str] = []
    chars = 0
    for piece in pieces:
        held.append(piece)
        chars += len(piece)
        if chars <= longest:
            continue
        text = "".join(held)
        start = 0
        while len(text) - start > longest:
            end = start + longest
            space = text.rfind(" ", max(start + 1, end - _CUT_WITHIN_CHARS), end)
            cut = space if space > 0 else end
            yield text[start:cut]
            start = cut
        held, chars = [text[start:]], len(text) - start
    if chars:
        yield "".join(held)


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts BOS in front by itself: asked by encoding something, since settings often lie."""
    tokens = tokenizer("a")["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    return len(tokens) > len(plain) and tokens[0] == tokenizer.bos_token_id


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """sha256 of everything that decides which ids a text gets."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        described = json.loads(backend.to_str())
        # A call with padding=True leaves its setting behind here.
        described.pop("padding", None)
        described.pop("truncation", None)
    else:
        described = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    return hashlib.sha256(json.dumps([described, special], sort_keys=True).encode()).hexdigest()


def windows(documents: Iterable[Tokens], sequence_length: int, max_sequences: int) -> Iterator[Tokens]:
    """Packing `concat`: at most `max_sequences` windows of `sequence_length`, several in one array."""
    held: list[Tokens] = []
    num_held = 0
    left = max_sequences * sequence_length
    for tokens in documents:
        held.append(tokens)
        num_held += tokens.size
        # Given out in larger pieces: most documents are far shorter than a disk likes to write.
        if num_held >= min(left, max(sequence_length, 2**16)):
            joined = np.concatenate(held)
            whole = min(joined.size - joined.size % sequence_length, left)
            yield joined[:whole]
            left -= whole
            if left == 0:
                return
            held, num_held = [joined[whole:]], joined.size - whole
    rest = np.concatenate(held) if held else np.empty(0, dtype=np.int64)
    whole = rest.size - rest.size % sequence_length
    if whole:
        yield rest[:whole]


def samples(documents: Iterable[Tokens], sequence_length: int, max_sequences: int) -> Iterator[Tokens]:
    """Packing `sample`: one array for each of at most `max_sequences` documents, no longer than `sequence_length`.

    Documents of a single token are passed over: there is nothing to predict in them.
    """
    given = 0
    for tokens in documents:
        if min(tokens.size, sequence_length) < 2:
            continue
        yield tokens[:sequence_length]
        given += 1
        if given == max_sequences:
            return


def _end_of_document(tokenizer: Any) -> int | None:
    vocabulary = tokenizer.get_vocab()
    for token in _END_OF_DOCUMENT:
        if token in vocabulary:
            return int(vocabulary[token])
    return None if tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)


def _batch(documents: Iterator[str], max_chars: int) -> list[str]:
    """The next few documents, about `max_chars` of them; none at the end."""
    texts: list[str] = []
    chars = 0
    for text in documents:
        texts.append(text)
        chars += len(text)
        if chars >= max_chars or len(texts) >= _BATCH_DOCUMENTS:
            break
    return texts

"""Text sampled from the dense model itself: for people without data, and close to what the model knows."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from widecli.data.packing import DocumentEncoder
from widecli.data.sources import SamplingModel, encodable
from widecli.errors import WideError
from widecli.storage import disk_errors_named, user_cache, write_json

# Fixed, not tuned to the device: with the seed it decides the text.
BATCH_SIZE = 16
_MAX_EMPTY_BATCHES = 8


class SelfSampled:
    """Endless text drawn from a model at temperature 1, unfiltered.

    A text starts from BOS where documents do (see `packing`), else from a random ordinary token of the vocabulary, and
    ends where a document ends, with EOS or at `max_length` tokens. Batch i depends on (model, seed, i) alone and is
    kept on disk, so a stopped run goes on where it was and nothing is sampled twice.
    """

    name = "self"

    def __init__(self, sampling: SamplingModel, *, max_length: int, cache_dir: Path | None = None) -> None:
        self.sampling = sampling
        positions = getattr(sampling.model.config, "max_position_embeddings", None) or max_length
        self.max_length = min(max_length, int(positions))
        encoder = DocumentEncoder.of(sampling.tokenizer)
        self._fingerprint = encoder.fingerprint
        self._prefix = encoder.prefix
        eos = sampling.tokenizer.eos_token_id
        self._ends = sorted({*encoder.suffix, *([] if eos is None else [eos])}) if encoder.has_end else []
        root = cache_dir if cache_dir is not None else user_cache()
        key = hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:32]
        self.folder = root / "sampled" / key

    def identity(self) -> dict[str, str | int]:
        """The model, the tokenizer and how text is drawn."""
        return {
            "kind": "self",
            "model": self.sampling.identity,
            "tokenizer": self._fingerprint,
            "seed": self.sampling.seed,
            "max_length": self.max_length,
            "batch_size": BATCH_SIZE,
        }

    def documents(self) -> Iterator[str]:
        """Texts without end; the reader stops."""
        empty = 0
        for index in itertools.count():
            texts = [text for text in self._batch(index) if text.strip()]
            empty = 0 if texts else empty + 1
            if empty == _MAX_EMPTY_BATCHES:
                raise WideError(
                    f"the model samples nothing but empty text ({_MAX_EMPTY_BATCHES} batches): name another data.source"
                )
            yield from texts

    def _batch(self, index: int) -> list[str]:
        file = self.folder / f"{index:06d}.json"
        try:
            texts = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
                return texts
        except (OSError, ValueError):
            pass  # not sampled yet, or damaged: sample it (again)
        texts = self._sample(index)
        with disk_errors_named(self.folder):
            write_json(file, texts)
        return texts

    def _sample(self, index: int) -> list[str]:
        import torch
        from transformers import DynamicCache

        model, tokenizer = self.sampling.model, self.sampling.tokenizer
        device = next(model.parameters()).device
        # A loop of our own: `generate` would fill in whatever top-k, penalties or minimum lengths the model's own
        # settings hold, and draws from the global generator.
        generator = torch.Generator(device).manual_seed(_mixed_seed(self.sampling.seed, index))
        tokens = torch.from_numpy(self._start_tokens(index)).to(device)
        ends = torch.tensor(self._ends, dtype=torch.int64, device=device)
        ended = torch.zeros_like(tokens, dtype=torch.bool)
        drawn = [tokens]
        # Filled in place; its argument was renamed in transformers 5.
        cache = DynamicCache(config=model.config)
        cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                for _ in range(self.max_length - 1):
                    logits = model(input_ids=tokens, use_cache=True, **{cache_name: cache}).logits
                    probabilities = logits[:, -1].float().softmax(-1)
                    tokens = torch.multinomial(probabilities, 1, generator=generator)
                    ended |= torch.isin(tokens, ends)
                    drawn.append(torch.where(ended, -1, tokens))
                    if bool(ended.all()):
                        break
        finally:
            model.train(was_training)
        texts = [[token for token in row if token >= 0] for row in torch.cat(drawn, dim=1).tolist()]
        return [encodable(text) for text in tokenizer.batch_decode(texts, skip_special_tokens=True)]

    def _start_tokens(self, index: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """First token of each text: int64 [BATCH_SIZE, 1]."""
        tokenizer = self.sampling.tokenizer
        if self._prefix:
            return np.full((BATCH_SIZE, 1), self._prefix[0], dtype=np.int64)
        size = min(len(tokenizer), int(self.sampling.model.config.vocab_size))
        ordinary = np.setdiff1d(np.arange(size), np.array(tokenizer.all_special_ids, dtype=np.int64))
        words = np.random.Philox(np.random.SeedSequence([self.sampling.seed, index])).random_raw(BATCH_SIZE)
        chosen: np.ndarray[Any, np.dtype[np.int64]] = ordinary[words % np.uint64(ordinary.size)].astype(np.int64)
        return chosen[:, None]


def _mixed_seed(seed: int, index: int) -> int:
    return int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0] >> np.uint64(1))

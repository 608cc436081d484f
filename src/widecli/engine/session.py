"""A batch being served: its cache, its position, and the two passes that move it on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from widecli.engine.cache import KVCache
from widecli.engine.dense_rows import one_row, project_row, takes_one_row
from widecli.engine.fused import count_executed, normalise, take_likeliest
from widecli.engine.graphs import Recorded
from widecli.engine.layer import Layer
from widecli.engine.ranges import within
from widecli.engine.rotary import rotary_tables
from widecli.engine.statistics import SkipCounter
from widecli.engine.steps import DecodeStep, PrefillStep, Step
from widecli.engine.weights import ModelWeights
from widecli.errors import UsageError

if TYPE_CHECKING:
    from widecli.model.trace import RoutingTrace

PREFILL_CHUNK_TOKENS = 16384  # of all sequences together: bounds the memory of activations


def prefill_chunks(batch: int, tokens: int, chunk: int | None = None) -> list[tuple[int, int]]:
    """(begin, tokens) of each sequence in the chunks of a prefill: of `chunk` tokens, by default as many as fit.

    Raises UsageError for a `chunk` without tokens.
    """
    step = max(1, PREFILL_CHUNK_TOKENS // batch) if chunk is None else chunk
    if step < 1:
        raise UsageError(f"a chunk must have at least 1 token, got {step}")
    return [(begin, min(step, tokens - begin)) for begin in range(0, tokens, step)]


class Session:
    """Static buffers for the sequences that its cache holds; made by `InferenceModel.session`.

    `prefill` reads the prompts, then each `decode` takes one token a sequence. `lengths`, `token` and `active` [B] lie
    on the device; a sequence that is not active keeps running with its batch but is not counted. With `graphs`, decode
    steps are recorded once and replayed, and so are the prefill chunks of shapes named to `record_prefill`.
    """

    def __init__(
        self,
        weights: ModelWeights,
        layers: Sequence[Layer],
        counter: SkipCounter | None,
        cache: KVCache,
        graphs: bool,
        library: bool,
    ) -> None:
        device, shape = weights.device, weights.shape
        self._weights = weights
        self._layers = layers
        self._counter = counter
        self._graphs = graphs
        self._library = library
        self.cache = cache
        batch = cache.batch
        self._tables = rotary_tables(weights.rotary, cache.capacity, shape.head_dim, weights.dtype, device)
        self.token = torch.zeros(batch, dtype=torch.int64, device=device)
        self.active = torch.ones(batch, dtype=torch.bool, device=device)
        # executed groups and tokens
        self._sums = counter.new_sums(device) if counter is not None else None
        self._side: torch.cuda.Stream | None = None
        if counter is not None and device.type == "cuda":
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._filled = 0  # slots in use in the longest sequence, known to the host without asking the device
        self._pool = torch.cuda.graph_pool_handle() if graphs else None
        self._decode: Recorded | None = None
        self._prefill: dict[tuple[int, int, bool], Recorded] = {}
        self._ids: dict[tuple[int, int, bool], Tensor] = {}

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.cache.batch

    @property
    def capacity(self) -> int:
        """Tokens a sequence may have, prompt and generated together."""
        return self.cache.capacity

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence in the cache, int64 [B] on the device."""
        return self.cache.lengths

    @torch.inference_mode()
    def prefill(self, ids: Tensor, lengths: Sequence[int] | None = None, chunk: int | None = None) -> Tensor:
        """Start over with these prompts: ids [B, T] padded on the right to `lengths` -> logits [B, V] of what follows.

        Long prompts go through in chunks of `chunk` tokens a sequence. Raises UsageError for a prompt that the cache
        cannot hold and for a chunk without tokens.
        """
        batch, tokens = ids.shape
        lengths = [tokens] * batch if lengths is None else list(lengths)
        self._check_prompts(batch, tokens, lengths)
        chunks = prefill_chunks(batch, max(lengths), chunk)
        ragged = min(lengths) < tokens
        self.cache.lengths.copy_(torch.tensor(lengths))
        self.active.fill_(True)
        self._filled = max(lengths)
        ids = ids.to(self._weights.device)
        last: Tensor | None = None
        for begin, count in chunks:
            found = self._prefill_chunk(ids[:, begin : begin + count], begin, ragged)
            if ragged and last is not None:
                ends_here = (self.cache.lengths > begin)[:, None]  # an earlier chunk had the end of the others
                found = torch.where(ends_here, found, last)
            last = found.clone() if ragged else found  # a replay overwrites its output
        assert last is not None
        logits = self._logits(last)
        take_likeliest(logits, self.token)
        return logits

    @torch.inference_mode()
    def decode(self, token: Tensor | None = None) -> Tensor:
        """Take one more token of every sequence, int64 [B] (default: the most likely one) -> logits [B, V].

        The result is overwritten by the next call. Raises UsageError when the cache is full.
        """
        if self._filled >= self.capacity:
            raise UsageError(f"the cache is full: {self.capacity} tokens a sequence; open a session with more")
        if token is not None:
            self.token.copy_(token)
        if self._graphs:
            self.record_decode()
            assert self._decode is not None
            logits = self._decode()
        else:
            # On a GPU as a graph does, bit for bit: how many keys there may be decides how attention cuts its sums.
            on_gpu = self.token.is_cuda
            logits = self._decode_once(keys=self.capacity if on_gpu else self._filled + 1)
        self._filled += 1
        return logits

    @torch.inference_mode()
    def rewind(self, tokens: int, token: Tensor) -> None:
        """Go back to where every sequence had `tokens` tokens in the cache and `token` int64 [B] came next.

        What the cache holds there is the caller's matter: a prefill left it, or it was written from outside.
        """
        if not 0 <= tokens <= self.capacity:
            raise UsageError(f"the cache has {self.capacity} slots a sequence, got a position of {tokens}")
        self.cache.lengths.fill_(tokens)
        self.active.fill_(True)
        self.token.copy_(token)
        self._filled = tokens

    @torch.inference_mode()
    def record_decode(self) -> None:
        """Record the decode step now rather than at the first `decode`."""
        if self._graphs and self._decode is None:
            run = lambda: self._decode_once(keys=self.capacity)  # noqa: E731
            assert self._pool is not None
            full = self.cache.lengths.clone()
            self.cache.lengths.clamp_(max=self.capacity - 1)  # warming up writes a slot
            self._decode = Recorded(run, [self.cache.lengths, self.token, *(self._sums or ())], self._pool)
            self.cache.lengths.copy_(full)

    @torch.inference_mode()
    def record_prefill(self, tokens: int, begin: int = 0, ragged: bool = False) -> None:
        """Record a chunk of `tokens` tokens from slot `begin` on, for prompts of that shape that come again and again.

        Only with graphs; it overwrites these slots.
        """
        key = (tokens, begin, ragged)
        if not self._graphs or key in self._prefill:
            return
        ids = self._ids[key] = torch.zeros(self.batch, tokens, dtype=torch.int64, device=self._weights.device)
        assert self._pool is not None
        self._prefill[key] = Recorded(
            lambda: self._prefill_once(ids, begin, ragged), [self.cache.lengths, *(self._sums or ())], self._pool
        )

    def skipped(self) -> RoutingTrace | None:
        """What the tokens of this session skipped since it began or `reset_skipped`; None for a dense model."""
        return None if self._counter is None or self._sums is None else self._counter.trace(*self._sums)

    def reset_skipped(self) -> None:
        """Count from zero."""
        for total in self._sums or ():
            total.zero_()

    def _check_prompts(self, batch: int, tokens: int, lengths: Sequence[int]) -> None:
        if batch != self.batch or len(lengths) != batch:
            raise UsageError(f"this session serves {self.batch} sequences, got {batch} prompts, {len(lengths)} lengths")
        if not 1 <= min(lengths) <= max(lengths) <= tokens:
            raise UsageError(f"prompts must have 1 to {tokens} tokens, got {min(lengths)} to {max(lengths)}")
        if max(lengths) > self.capacity:
            raise UsageError(
                f"a prompt has {max(lengths)} tokens and the cache holds {self.capacity}; shorten it or open a session "
                "with more"
            )

    def _prefill_chunk(self, ids: Tensor, begin: int, ragged: bool) -> Tensor:
        key = (ids.shape[1], begin, ragged)
        if key not in self._prefill:
            return self._prefill_once(ids, begin, ragged)
        self._ids[key].copy_(ids)
        return self._prefill[key]()

    def _prefill_once(self, ids: Tensor, begin: int, ragged: bool) -> Tensor:
        """Run a chunk; returns the residual [B, D] of each sequence's last token, the chunk's last where it goes on."""
        batch, tokens = ids.shape
        valid = None
        if ragged:
            position = torch.arange(begin, begin + tokens, device=ids.device)
            valid = (position < self.cache.lengths[:, None]).flatten()
        step = PrefillStep(self.cache, tokens, begin, self._tables, valid)
        x = self._run(ids, step).view(batch, tokens, -1)
        with within("statistics"):
            if self._sums is not None:
                self._sums[0].add_(torch.cat(step.executed))
                self._sums[1].add_(batch * tokens if valid is None else valid.sum())
        if not ragged:
            return x[:, -1]
        last = (self.cache.lengths - 1 - begin).clamp(0, tokens - 1)
        return x[torch.arange(batch, device=x.device), last]

    def _decode_once(self, keys: int) -> Tensor:
        """Run one token a sequence; moves `lengths` on and leaves the most likely next token in `token`."""
        step = DecodeStep(self.cache, keys, self._tables)
        x = self._run(self.token, step)
        with self._counted_beside(step.executed):
            logits = self._logits(x)
            take_likeliest(logits, self.token, self.cache.lengths)
        return logits

    @contextmanager
    def _counted_beside(self, executed: list[Tensor]) -> Iterator[None]:
        """Count what a decode step executed; on a GPU on a stream of its own while the block runs, the LM head."""
        if self._sums is None:
            yield
            return
        if self._side is None:
            self._count(executed, *self._sums)
            yield
            return
        main = torch.cuda.current_stream(self._side.device)
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            self._count(executed, *self._sums)
        try:
            yield
        finally:  # in a capture, too, nothing may be left on its own
            main.wait_stream(self._side)

    def _count(self, executed: list[Tensor], groups: Tensor, tokens: Tensor) -> None:
        with within("statistics"):
            count_executed(torch.cat(executed, 1), self.active, groups, tokens)

    def _run(self, ids: Tensor, step: Step) -> Tensor:
        with within("embed"):
            x = F.embedding(ids.flatten(), self._weights.embedding)
        for layer in self._layers:
            x = layer.run(x, step)
        return x

    def _logits(self, x: Tensor) -> Tensor:
        """x [B, D] -> logits [B, V]."""
        with within("lm_head"):
            head = self._weights.lm_head
            x = normalise(x, self._weights.final_norm)
            if one_row(x) and self._own_head:
                return project_row(x, head, self.cache)
            return F.linear(x, head.weight, head.bias)

    @cached_property
    def _own_head(self) -> bool:
        return not self._library and takes_one_row(self._weights.lm_head.weight)

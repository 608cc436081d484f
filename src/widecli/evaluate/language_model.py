"""lm-eval's Hugging Face model with our own batching of log-likelihoods.

Differences from `HFLM`, none of which changes a prompt or, but for a token that spans context and continuation, what is
scored: the attention mask reaches the model (routing
and its statistics must not see padding), requests are tokenised in bulk, batches are filled by tokens and halved on
out-of-memory, the LM head runs only where a continuation is scored, log-probabilities are taken in fp32, and results
come to the CPU once a batch instead of twice a request.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm  # type: ignore[import-untyped]

from widecli.errors import UsageError, WideError
from widecli.evaluate.backoff import is_out_of_memory, release_memory
from widecli.evaluate.scoring_plan import BatchLimits, Row, kept_positions, make_rows, next_batch
from widecli.model.finite import not_finite
from widecli.model.positions import positions as positions_of
from widecli.model.vocabulary import refuse_unknown, vocabulary
from widecli.ranks import current

logger = logging.getLogger(__name__)

_TOKENIZE_AT_ONCE = 4096
_FP32_CHUNK_BYTES = 256 * 2**20
_UNLIMITED = 1 << 40


class ScoringModel(HFLM):  # type: ignore[misc]  # lm-eval is untyped
    """A causal Hugging Face model as lm-eval sees it. The tokenizer is copied: lm-eval gives it a padding token."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        batch_size: int | str,
        max_length: int,
        name: str,
        beyond_positions: bool = False,
    ) -> None:
        rows = batch_size if isinstance(batch_size, int) else (64 if model.device.type == "cuda" else 8)
        super().__init__(
            pretrained=model,
            tokenizer=copy.deepcopy(tokenizer),
            backend="causal",
            max_length=max_length,
            batch_size=rows,  # what generation and rolling windows use; log-likelihoods follow `limits`
            softmax_dtype="float32",
        )
        self.name = name
        self.requested_batch_size = batch_size
        known = vocabulary(model)
        if self.tokenizer.pad_token_id >= known:  # what stands under padding is never read, but it is looked up
            self.tokenizer.pad_token = self.tokenizer.convert_ids_to_tokens(0)
        self.most_positions = _UNLIMITED if beyond_positions else positions_of(model.config)
        self.limits = starting_limits(model, rows if isinstance(batch_size, int) else None)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        if not self._keeps_logits:
            # Every fed position gets its logits, so the tighter limit counts for both.
            self.limits = replace(self.limits, tokens=min(self.limits.tokens, self.limits.positions))

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval records about the model. Its own version asks the Hub, and names local folders."""
        probe = self.tok_encode("a")
        return {
            "model": self.name,
            "model_num_parameters": self.model.num_parameters(),
            "model_dtype": str(self.model.dtype).removeprefix("torch."),
            "max_length": self.max_length,
            "adds_bos": bool(probe) and probe[0] == self.tokenizer.bos_token_id,
            "softmax_dtype": "float32",
        }

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """log p(continuation | context) and whether greedy decoding gives it, for each request."""
        pairs = [request.args for request in requests]
        encoded = self.encode_pairs(pairs)
        return self._loglikelihood_tokens(
            [(pair, context, continuation) for pair, (context, continuation) in zip(pairs, encoded, strict=True)],
            disable_tqdm=disable_tqdm,
        )

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Tokens of (context, continuation) pairs by lm-eval's rules, in bulk.

        Spaces that end a context belong to the continuation; the whole text is tokenised and split after as many tokens
        as the context alone takes; an empty context becomes the prefix token (BOS, else EOS). Where a token spans the
        join, so that the whole does not begin with the context's tokens, the continuation is tokenised by itself:
        lm-eval would lose its beginning, and each choice must follow the same context.
        """
        split: list[tuple[str, str]] = []
        for context, continuation in pairs:
            bare = context.rstrip() if context else ""
            split.append((bare, context[len(bare) :] + continuation) if context else ("", continuation))
        contexts = self._encode_bulk([bare for (bare, _), (context, _) in zip(split, pairs, strict=True) if context])
        wholes = self._encode_bulk(
            [bare + rest for (bare, rest), (context, _) in zip(split, pairs, strict=True) if context]
        )
        encoded: list[tuple[list[int], list[int]]] = []
        for (context, continuation), (bare, rest) in zip(pairs, split, strict=True):
            if context:
                head, whole = contexts[bare], wholes[bare + rest]
                tail = whole[len(head) :]
                if not tail or whole[: len(head)] != head:
                    tail = self.tok_encode(rest, add_special_tokens=False)
                encoded.append((head, tail))
                continue
            tokens = self.tok_encode(continuation, add_special_tokens=False)
            prefix = self.prefix_token_id
            encoded.append(([prefix], tokens) if tokens[:1] != [prefix] else (tokens[:1], tokens[1:]))
        return encoded

    def _encode_bulk(self, texts: Sequence[str]) -> dict[str, list[int]]:
        """Tokens of each distinct text, as `tok_encode` gives them one by one."""
        prefix = self.tokenizer.decode(self.prefix_token_id)
        tokens: dict[str, list[int]] = {}
        distinct = list(dict.fromkeys(texts))
        for with_prefix in (False, True):
            # A text that brings its BOS along gets no second one.
            chosen = [text for text in distinct if text.startswith(prefix) == with_prefix]
            special = {"add_special_tokens": False} if with_prefix else {}
            for start in range(0, len(chosen), _TOKENIZE_AT_ONCE):
                part = chosen[start : start + _TOKENIZE_AT_ONCE]
                encoded = self.tokenizer(part, return_attention_mask=False, verbose=False, **special)["input_ids"]
                tokens.update(zip(part, encoded, strict=True))
        return tokens

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        for pair, context, continuation in requests:
            if not context or not continuation or len(continuation) > self.max_length:
                raise UsageError(
                    f"A continuation of {len(continuation)} tokens after {len(context)} cannot be scored "
                    f"with eval.max_length={self.max_length}: {str(pair)[:200]}"
                )
        rows, truncated = make_rows([(context, continuation) for _, context, continuation in requests], self.max_length)
        if truncated:
            logger.warning(
                "%d of %d texts were longer than %d tokens and were cut.", truncated, len(requests), self.max_length
            )
        self._refuse_beyond(max((len(row.tokens) for row in rows), default=0))
        largest = (max(max(row.tokens), *(max(more) for _, more in row.continuations)) for row in rows)
        refuse_unknown("a request of a task", [max(largest, default=0)], self.model)
        ranks = current()
        # sorted by length, so that every rank gets as much of the long ones
        rows = list(ranks.share(rows))
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        bar = tqdm(
            total=sum(len(row.continuations) for row in rows),
            desc="Scoring",
            unit="request",
            disable=disable_tqdm or not sys.stderr.isatty(),
            leave=False,
        )
        # One batch is in flight while the last one's numbers are read, so that the GPU does not wait for Python.
        pending: tuple[Sequence[Row], Any] | None = None
        start = 0
        while start < len(rows):
            batch = next_batch(rows, start, self.limits)
            scored = self._try_batch(batch)
            if pending is not None:
                bar.update(_collect(*pending, answers))
            pending = None
            if scored is None:
                self._shrink(batch)
                continue
            pending = (batch, scored)
            start += len(batch)
        if pending is not None:
            bar.update(_collect(*pending, answers))
        bar.close()
        if any(math.isnan(score) for score, _ in answers):
            raise not_finite(self.model)
        found = [(index, answers[index]) for row in rows for index, _ in row.continuations]
        for index, answer in (pair for part in ranks.gather(found) for pair in part):
            answers[index] = answer
        return answers

    def _refuse_beyond(self, tokens: int) -> None:
        """Raise UsageError for a sequence, already cut to `max_length`, that the model is not made for."""
        if tokens > self.most_positions:
            raise UsageError(
                f"eval.max_length={self.max_length} lets a sequence of {tokens} tokens through, more than the "
                f"{self.most_positions} positions that {self.name} is made for: take eval.max_length="
                f"{self.most_positions} (longer ones lose their beginning), or add --beyond-positions if you mean it"
            )

    def _try_batch(self, batch: Sequence[Row]) -> Any | None:
        """Scores of a batch, or None if it does not fit in memory."""
        try:
            return self._score(batch)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        return None

    def _shrink(self, batch: Sequence[Row]) -> None:
        if len(batch) == 1:
            raise WideError(
                f"One sequence of {len(batch[0].tokens)} tokens does not fit in memory; lower eval.max_length "
                f"(now {self.max_length}) or use a smaller model.dtype."
            )
        self.limits = self.limits.below(batch)
        logger.info("Out of memory with %d sequences; going on with at most %d.", len(batch), self.limits.rows)
        release_memory()

    def _score(self, batch: Sequence[Row]) -> Any:
        """[2, N] fp32: log-probability and greedy hit of every scored token, in the order of rows and continuations."""
        longest = len(batch[0].tokens)
        kept = kept_positions(batch)
        lengths = np.array([len(row.tokens) for row in batch])
        fed = np.zeros((len(batch), longest), dtype=np.int64)
        where: list[np.ndarray[Any, Any]] = []
        targets: list[int] = []
        for index, row in enumerate(batch):
            fed[index, : lengths[index]] = row.tokens
            end = index * kept + lengths[index] - (longest - kept)
            for _, continuation in row.continuations:
                where.append(np.arange(end - len(continuation), end))
                targets.extend(continuation)
        mask = np.arange(longest)[None, :] < lengths[:, None]
        logits = self._model_call(self._to_device(fed), self._to_device(mask.astype(np.int64)), kept=kept)
        return _token_scores(
            logits[:, -kept:].reshape(len(batch) * kept, -1),
            self._to_device(np.concatenate(where)),
            self._to_device(np.array(targets)),
        )

    def _to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)

    def _model_call(
        self,
        inps: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        kept: int | None = None,
    ) -> torch.Tensor:
        """Logits [B, L, V], or at least the last `kept` positions of them."""
        extra = {"logits_to_keep": kept} if kept is not None and self._keeps_logits else {}
        mask = attn_mask if attn_mask is not None else torch.ones_like(inps)
        with torch.no_grad():
            output = self.model(input_ids=inps, attention_mask=mask, use_cache=False, **extra)
        logits: torch.Tensor = output.logits
        return logits

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy generation by lm-eval's own code; a batch that does not fit starts over with half of its size."""
        contexts = self._encode_bulk([request.args[0] for request in requests])
        for request in requests:
            new = int(request.args[1].get("max_gen_toks", self.max_gen_toks))
            self._refuse_beyond(min(len(contexts[request.args[0]]) + new, self.max_length))
        ranks = current()
        texts: list[Any] = [None] * len(requests)
        mine = list(ranks.share(requests))
        for rank, part in enumerate(ranks.gather(self._generate(mine, disable_tqdm) if mine else [])):
            texts[rank :: ranks.size] = part
        return texts

    def _generate(self, requests: list[Any], disable_tqdm: bool) -> list[str]:
        quiet = disable_tqdm or not sys.stderr.isatty()
        while True:
            try:
                return super().generate_until(requests, disable_tqdm=quiet)  # type: ignore[no-any-return]
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            if self.batch_size_per_gpu == 1:
                raise WideError("Generating one sequence does not fit in memory; lower eval.max_length.")
            self.batch_size_per_gpu //= 2
            release_memory()


def starting_limits(model: Any, rows: int | None) -> BatchLimits:
    """Batch limits to start from: large enough to fill the device, halved later if memory runs out.

    A named batch size limits rows alone. Otherwise a GPU gets up to 64k tokens, less if its free memory looks short
    (four FFN activations and eight hidden states a token), and up to 4 GB of logits; a CPU gets what stays near its
    caches.
    """
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    width = model.dtype.itemsize
    device = model.device
    logit_bytes = config.vocab_size * width
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        token_bytes = width * (
            4 * getattr(config, "intermediate_size", 4 * config.hidden_size) + 8 * config.hidden_size
        )
        tokens = max(1, min(65536, free // 2 // token_bytes))
        positions = max(1, min(4 * 2**30, free // 8) // logit_bytes)
    else:
        tokens, positions = 2048, max(1, 256 * 2**20 // logit_bytes)
    if rows is not None:
        return BatchLimits(rows, _UNLIMITED, _UNLIMITED)
    return BatchLimits(_UNLIMITED, int(tokens), int(positions))


def _token_scores(logits: torch.Tensor, where: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[2, N] on the device: fp32 log-probability of each target and whether it is the most likely token."""
    pieces = []
    size = max(1, _FP32_CHUNK_BYTES // (4 * logits.shape[-1]))
    for positions, tokens in zip(torch.split(where, size), torch.split(targets, size), strict=True):
        scores = logits[positions].float()
        chosen = scores.gather(1, tokens[:, None]).squeeze(1) - scores.logsumexp(dim=1)
        pieces.append(torch.stack([chosen, (scores.argmax(dim=1) == tokens).float()]))
    return torch.cat(pieces, dim=1)


def _collect(batch: Sequence[Row], scored: torch.Tensor, answers: list[tuple[float, bool]]) -> int:
    """Sum token scores into the requests' answers; returns how many requests the batch answered."""
    chosen, greedy = scored.cpu().double().numpy()
    start = count = 0
    for row in batch:
        for index, continuation in row.continuations:
            stop = start + len(continuation)
            answers[index] = (float(chosen[start:stop].sum()), bool(greedy[start:stop].all()))
            start = stop
            count += 1
    return count

"""Prompts in, tokens out: greedy or sampled, in batches of mixed lengths, until a stop token or the limit."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from widecli.engine.sampling import Sampler, Sampling
from widecli.errors import UsageError
from widecli.model.finite import not_finite

if TYPE_CHECKING:
    from widecli.engine.model import InferenceModel
    from widecli.engine.session import Session
    from widecli.model.trace import RoutingTrace

OnToken = Callable[[int, int], None]
"""(sequence, token) as soon as it is there; a stop token is not passed on."""


@dataclass(frozen=True)
class Generation:
    """What came out. `tokens` without the stop token; times in seconds, each until the device was done.

    `prefill_seconds` is the time to the first token; `decode_steps` came after it, one token a sequence each.
    """

    tokens: tuple[tuple[int, ...], ...]
    finish: tuple[Literal["stop", "length"], ...]
    prompt_tokens: int
    prefill_seconds: float
    decode_steps: int
    decode_seconds: float
    skipped: RoutingTrace | None

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens a second, padding not counted."""
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens a second after the first, of all sequences together; None when there was only the first."""
        if not self.decode_steps:
            return None
        return self.decode_steps * len(self.tokens) / self.decode_seconds


def open_session(model: InferenceModel, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Session:
    """A session that these prompts and their continuations fit in exactly. Raises UsageError when none can."""
    if not prompts or not all(prompts):
        raise UsageError("there is nothing to continue: every prompt needs at least one token")
    if max_new_tokens < 1:
        raise UsageError(f"at least one new token must be asked for, got {max_new_tokens}")
    longest = max(map(len, prompts))
    if longest >= model.max_tokens:
        raise UsageError(
            f"the prompt has {longest} tokens, and this model serves sequences of at most {model.max_tokens}, prompt "
            "and generated together; shorten it, or add --beyond-positions if you mean it"
        )
    if longest + max_new_tokens > model.max_tokens:
        raise UsageError(
            f"{longest} prompt tokens and {max_new_tokens} new ones are more than the {model.max_tokens} this model "
            f"serves; ask for at most {model.max_tokens - longest} new tokens, or add --beyond-positions if you mean it"
        )
    return model.session(len(prompts), longest + max_new_tokens)


@torch.inference_mode()
def generate(
    session: Session,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    stop: Collection[int] = (),
    on_token: OnToken | None = None,
) -> Generation:
    """Continue every prompt (token ids) by at most `max_new_tokens`. Raises UsageError when the cache is too small."""
    lengths = [len(prompt) for prompt in prompts]
    if max(lengths) + max_new_tokens > session.capacity:
        raise UsageError(
            f"{max(lengths)} prompt tokens and {max_new_tokens} new ones overflow a cache of {session.capacity}; the "
            f"largest that fits is {max(0, session.capacity - max(lengths))} new tokens"
        )
    device = session.token.device
    sampler = Sampler(sampling or Sampling(), device)
    stops = torch.tensor(sorted(stop), dtype=torch.int64, device=device)
    session.record_decode()
    session.reset_skipped()
    ids = as_batch(prompts)
    started = time.perf_counter()
    logits = session.prefill(ids, lengths)
    token = sampler(logits)
    _wait(device)
    prefilled = time.perf_counter()
    if bool(torch.isnan(logits).any()):  # the most likely of these would be some token, always the same
        raise not_finite(logits)
    output = _Output(len(prompts), stop, on_token)
    unread = deque([_Sent(token)])
    launched = 1
    # On a GPU the host reads a token while the next step already runs; on a CPU that would only waste a step.
    in_flight = 2 if device.type == "cuda" else 1
    while not output.is_finished:
        while launched < max_new_tokens and len(unread) < in_flight:
            session.active.logical_and_(~torch.isin(token, stops))
            token = sampler(session.decode(token))
            unread.append(_Sent(token))
            launched += 1
        if not unread:
            break
        output.take(unread.popleft().read())
    _wait(device)
    return Generation(
        tokens=tuple(map(tuple, output.tokens)),
        finish=tuple("stop" if done else "length" for done in output.stopped),
        prompt_tokens=sum(lengths),
        prefill_seconds=prefilled - started,
        decode_steps=launched - 1,
        decode_seconds=time.perf_counter() - prefilled,
        skipped=session.skipped(),
    )


def as_batch(prompts: Sequence[Sequence[int]]) -> Tensor:
    """Token ids int64 [B, longest], padded on the right."""
    ids = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    return ids


class _Output:
    """Tokens by sequence, until each met a stop token."""

    def __init__(self, batch: int, stop: Collection[int], on_token: OnToken | None) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.stopped = [False] * batch
        self._stop = frozenset(stop)
        self._on_token = on_token

    @property
    def is_finished(self) -> bool:
        return all(self.stopped)

    def take(self, step: Sequence[int]) -> None:
        for sequence, token in enumerate(step):
            if self.stopped[sequence]:
                continue
            if token in self._stop:
                self.stopped[sequence] = True
                continue
            self.tokens[sequence].append(token)
            if self._on_token is not None:
                self._on_token(sequence, token)


class _Sent:
    """Tokens on their way to the host; `read` waits for these alone, not for what was launched after them."""

    def __init__(self, token: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = token
        if token.is_cuda:
            self._host = torch.empty(token.shape, dtype=token.dtype, pin_memory=True)
            self._host.copy_(token, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        return [int(token) for token in self._host.tolist()]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

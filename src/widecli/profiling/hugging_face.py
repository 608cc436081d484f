"""The same dense weights through Hugging Face transformers, as its users run them fastest: what our dense must beat.

TTFT is one forward pass with the faster of cuDNN's and Flash attention and the LM head on the last position, into a
growing cache, which spares it a static cache's mask. TPOT is `generate` with a static cache, which compiles its steps
with CUDA graphs (`reduce-overhead`) on a GPU; the cache holds the prompt already, as ours does.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from widecli.profiling.latency import Call, wait

_SECONDS = 60.0  # of one run for setting up cells: each new batch or length may be compiled anew
_ORDERS = {
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
}


class HuggingFace:
    """Runs `model`, a Hugging Face causal LM without hooks; `facts` says how its last call was set up."""

    def __init__(self, model: Any) -> None:
        from transformers import GenerationConfig

        self._model = model
        self._device = next(model.parameters()).device
        # a model's own settings may stop at a token or draw
        model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._spent = 0.0

    @property
    def may_set_up(self) -> bool:
        """Whether time for setting up is left."""
        return self._spent < _SECONDS

    def first_token(self, ids: Tensor) -> tuple[Call, dict[str, Any]]:
        """A call that reads the prompts `ids` [B, T] as `latency.first_token` does, and how it was set up.

        Raises torch.OutOfMemoryError.
        """
        started = time.perf_counter()
        best, attention = None, None
        for name, order in _ORDERS.items() if self._device.type == "cuda" else ():

            def call(order: list[SDPBackend] = order) -> list[float]:
                with sdpa_kernel(order, set_priority=True):
                    return self._forward(ids)

            call()
            taken = call()
            if best is None or taken < best[0]:
                best, attention = (taken, call), name
        self._spent += time.perf_counter() - started
        return (best[1] if best else lambda: self._forward(ids)), {"attention": attention, "compiled": False}

    def further_tokens(self, ids: Tensor, steps: int) -> tuple[Call, dict[str, Any]]:
        """A call that times `steps` steps after the prompts `ids` [B, T], and how it was set up.

        Keys and values are random: for the time their number alone matters. Raises torch.OutOfMemoryError.
        """
        from transformers import StaticCache

        started = time.perf_counter()
        batch, prompt = ids.shape
        model, config = self._model, self._model.config
        heads = config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        cache: Any = StaticCache(config=config, max_cache_len=prompt + 1 + steps)
        cache.early_initialization(
            batch_size=batch, num_heads=heads, head_dim=size, dtype=model.dtype, device=self._device
        )
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        # the prompt and the first token, as if a prefill had chosen it
        known = torch.cat([ids, ids[:, :1]], 1).to(self._device)

        def call() -> list[float]:
            for layer in cache.layers:
                layer.cumulative_length.fill_(prompt)
                if hasattr(layer, "cumulative_length_int"):  # a sliding window counts on the host too
                    layer.cumulative_length_int = prompt
            clock = _Clock(self._device)
            with _no_warnings():
                model.generate(
                    known,
                    attention_mask=torch.ones_like(known),
                    max_new_tokens=steps + 1,
                    logits_processor=[clock],
                    **{self._cache_name: cache},
                )
            return clock.milliseconds()

        for _ in range(2):  # compiles, then records
            call()
        self._spent += time.perf_counter() - started
        return call, {"attention": None, "compiled": self._device.type == "cuda"}

    @torch.inference_mode()
    def _forward(self, ids: Tensor) -> list[float]:
        wait(self._device)
        started = time.perf_counter()
        self._model(input_ids=ids.to(self._device), use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)
        wait(self._device)
        return [1e3 * (time.perf_counter() - started)]


class _Clock:
    """Stands among the logits processors, which `generate` calls once a step, and notes when."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[Any] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._device.type == "cuda":
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            self._events[-1].record()
        else:
            self._events.append(time.perf_counter())
        return scores

    def milliseconds(self) -> list[float]:
        """Of each step but the first, which no graph runs."""
        wait(self._device)
        if self._device.type == "cuda":
            return [before.elapsed_time(after) for before, after in pairwise(self._events)]
        return [1e3 * (after - before) for before, after in pairwise(self._events)]


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    """transformers renames arguments between its releases and says so at every call."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)

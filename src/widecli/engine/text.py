"""From a prompt as people write it to token ids and back, by the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from widecli.errors import UsageError
from widecli.model.backbone import Backbone


def encode(backbone: Backbone, prompt: str, *, chat: bool = False) -> list[int]:
    """Token ids of a prompt, in the model's chat template as the user's turn if `chat`. Raises UsageError."""
    tokenizer = backbone.tokenizer
    if not chat:
        ids = tokenizer(prompt)["input_ids"]
    elif tokenizer.chat_template is None:
        raise UsageError(f"{backbone.identity.id} has no chat template; leave out --chat")
    else:
        turns = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    if not ids:
        raise UsageError("the prompt is empty; write something to continue")
    return [int(token) for token in ids]


def stop_tokens(backbone: Backbone) -> frozenset[int]:
    """The tokens after which the model says no more."""
    found = {backbone.tokenizer.eos_token_id}
    configured = getattr(backbone.model.generation_config, "eos_token_id", None)
    found |= set(configured) if isinstance(configured, (list, tuple)) else {configured}
    return frozenset(int(token) for token in found if token is not None)


def text_stream(backbone: Backbone, write: Callable[[str], None]) -> Callable[[int], None]:
    """Takes token after token and writes text as soon as it is sure; call with -1 at the end."""
    from transformers import TextStreamer

    class Stream(TextStreamer):  # type: ignore[misc]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                write(text)

    import torch

    stream: Any = Stream(backbone.tokenizer, skip_special_tokens=True)
    return lambda token: stream.end() if token < 0 else stream.put(torch.tensor([token]))

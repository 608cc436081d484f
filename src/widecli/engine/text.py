"""From a prompt as people write it to token ids and back, by the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from widecli.errors import UsageError
from widecli.model.backbone import Backbone
from widecli.model.vocabulary import refuse_unknown


def encode(backbone: Backbone, prompt: str, *, chat: bool = False) -> list[int]:
    """Token ids of a prompt, in the model's chat template as the user's turn if `chat`. Raises UsageError."""
    refuse_undecoded(prompt)
    ids = _chat(backbone, prompt) if chat else backbone.tokenizer(prompt)["input_ids"]
    if not ids:
        raise UsageError("the prompt is empty; write something to continue")
    refuse_unknown("the prompt", ids, backbone.model)
    return [int(token) for token in ids]


def refuse_undecoded(prompt: str, where: str = "the prompt") -> None:
    """Raise UsageError for text that came from bytes which are no UTF-8: Python keeps them as lone surrogates."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{where} is no UTF-8 text (character {error.start + 1}); convert it, with iconv for one"
        ) from error


def _chat(backbone: Backbone, prompt: str) -> list[int]:
    """The prompt as the user's turn of the model's chat template."""
    tokenizer, name = backbone.tokenizer, backbone.identity.id
    template = tokenizer.chat_template
    if not template:
        raise UsageError(f"{name} has no chat template; leave out --chat")
    if isinstance(template, dict) and "default" not in template:
        raise UsageError(
            f"{name} has chat templates for special uses alone ({', '.join(sorted(template))}), none of them called "
            "default; leave out --chat"
        )
    turns = [{"role": "user", "content": prompt}]
    try:
        ids: list[int] = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    except Exception as error:  # a template is a program of the model's makers: it may raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UsageError(
            f"the chat template of {name} does not take the prompt ({reason}); leave out --chat, or mend the template"
        ) from error
    return ids


def stop_tokens(backbone: Backbone) -> frozenset[int]:
    """The tokens after which the model says no more. Raises UsageError where its files name something else."""
    configured = getattr(backbone.model.generation_config, "eos_token_id", None)
    found = [backbone.tokenizer.eos_token_id, *(configured if isinstance(configured, (list, tuple)) else [configured])]
    for token in found:
        if token is not None and (isinstance(token, bool) or not isinstance(token, int)):
            raise UsageError(
                f"{backbone.identity.id} names {token!r} as a token that ends a text, and tokens are whole numbers: "
                "mend eos_token_id in its generation_config.json"
            )
    return frozenset(token for token in found if token is not None)


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

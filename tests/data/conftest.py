"""A small byte-level tokenizer, built in code, in the variants whose habits differ between model families."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def build_tokenizer(*, bos: bool = False, eos: bool = True, adds_bos: bool = False, extra: tuple[str, ...] = ()) -> Any:
    """One token a byte (ids from `ord`-like order), then the special tokens. pad is EOS, as in many real models."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [*(["<s>"] if bos else []), *(["</s>"] if eos else []), *extra]
    vocabulary = {token: index for index, token in enumerate([*special, *letters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocabulary["<s>"])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>" if bos else None,
        eos_token="</s>" if eos else None,
        pad_token="</s>" if eos else None,
    )


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """EOS but no BOS of its own accord, pad = EOS: as SmolLM2."""
    return build_tokenizer()


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    return build_tokenizer


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _own_user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test touches the cache of whoever runs it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))

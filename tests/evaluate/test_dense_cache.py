from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from widecli.errors import WideError
from widecli.evaluate.dense_cache import DenseCache, default_cache_dir
from widecli.evaluate.protocol import EvalProtocol
from widecli.recipe.schema import EvalSection

PROTOCOL = EvalProtocol.from_section(EvalSection(tasks=("paper",), limit=3))
RESULT = {"perplexity": {"wikitext2/token_ppl": 20.7}, "tasks": {}}


def test_a_stored_result_comes_back(tmp_path: Path) -> None:
    cache = DenseCache(tmp_path / "new")
    assert cache.load("model", "float32", PROTOCOL) is None
    path = cache.store("model", "float32", PROTOCOL, RESULT)
    assert cache.load("model", "float32", PROTOCOL) == RESULT
    assert list((tmp_path / "new").iterdir()) == [path]


def test_another_model_dtype_or_protocol_is_another_entry(tmp_path: Path) -> None:
    cache = DenseCache(tmp_path)
    identity = {"id": "model", "revision": None}
    cache.store(identity, "float32", PROTOCOL, RESULT)
    assert cache.load(identity, "float32", PROTOCOL) == RESULT
    assert cache.load({**identity, "revision": "a"}, "float32", PROTOCOL) is None
    assert cache.load(identity, "bfloat16", PROTOCOL) is None
    for change in (
        {"limit": None},
        {"perplexity_window": 64},
        {"max_length": 64},
        {"transformers": "0"},
        {"tasks": ("piqa",)},
        {"scoring": 0},
    ):
        assert cache.load(identity, "float32", replace(PROTOCOL, **change)) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": "wide.dense/1"}', '{"schema": "x", "result": {}}'])
def test_a_damaged_file_counts_as_absent(tmp_path: Path, content: str) -> None:
    cache = DenseCache(tmp_path)
    cache.store("model", "float32", PROTOCOL, RESULT).write_text(content)
    assert cache.load("model", "float32", PROTOCOL) is None


def test_a_file_of_another_key_is_not_taken(tmp_path: Path) -> None:
    cache = DenseCache(tmp_path)
    stored = cache.store("model", "float32", PROTOCOL, RESULT)
    stored.rename(cache.path("other", "float32", PROTOCOL))
    assert cache.load("other", "float32", PROTOCOL) is None


def test_a_failed_write_leaves_the_old_result_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DenseCache(tmp_path)
    cache.store("model", "float32", PROTOCOL, RESULT)

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(WideError, match="No space left"):
        cache.store("model", "float32", PROTOCOL, {"perplexity": {}})
    assert cache.load("model", "float32", PROTOCOL) == RESULT
    assert len(list(tmp_path.iterdir())) == 1


def test_the_cache_lies_under_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "wide" / "dense"

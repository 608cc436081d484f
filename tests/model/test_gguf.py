"""Conversion of GGUF files, on a tiny one; the embedded model's is in test_backbone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_gguf import gguf_model, write_gguf
from widecli.errors import UsageError
from widecli.model import gguf
from widecli.model.backbone import load_backbone, load_shape, load_tokenizer
from widecli.recipe.schema import ModelSection


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "wide" / "models"


def load(file: Path) -> Any:
    return load_backbone(ModelSection(name=str(file)), torch.device("cpu"))


def assert_is_the_model(backbone: Any) -> None:
    expected = gguf_model().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in backbone.model.state_dict().items())


def test_a_gguf_file_gives_the_model_that_it_holds(tmp_path: Path, cache: Path) -> None:
    assert_is_the_model(load(write_gguf(tmp_path / "m.gguf")))
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(("part", "said"), [((0, 2), "part 1 of a model split into 2"), ((2, 3), "part 3 .* into 3")])
@pytest.mark.parametrize("name", ["m-00001-of-00002.gguf", "renamed.gguf"])
def test_one_part_of_a_split_file_is_refused_whatever_its_name(
    tmp_path: Path, cache: Path, name: str, part: tuple[int, int], said: str
) -> None:
    file = write_gguf(tmp_path / name, part=part)
    for read in (load_backbone, load_shape, load_tokenizer, load_backbone):
        with pytest.raises(UsageError, match=f"{name} is {said} files: join them"):
            read(ModelSection(name=str(file)))
    assert not cache.exists() or not list(cache.iterdir()), "nothing of it is kept"


@pytest.mark.parametrize("lacks", ["blk.1.", "blk.0.ffn_up", "token_embd", "output_norm"])
def test_a_file_that_lacks_tensors_is_refused_by_name_and_not_kept(tmp_path: Path, cache: Path, lacks: str) -> None:
    file = write_gguf(tmp_path / "m.gguf", leave_out=lacks)
    with pytest.raises(UsageError, match=r"m\.gguf"):
        load(file)
    assert not cache.exists() or not list(cache.iterdir())


def test_an_adapter_beside_the_file_is_refused(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"m\.gguf holds a whole model and an adapter beside it"):
        load(file)
    assert not cache.exists() or not list(cache.iterdir())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 0x40
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: flip(folder / "model.safetensors"),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "model.safetensors").write_bytes(b""),
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        lambda folder: (folder / "config.json").write_text((folder / "config.json").read_text().replace("1000", "50")),
        lambda folder: (folder / "wide_conversion.json").unlink(),
        lambda folder: (folder / "wide_conversion.json").write_text("[1"),
        lambda folder: (folder / "wide_conversion.json").write_text("[]"),
    ],
)
def test_a_damaged_conversion_is_made_anew(tmp_path: Path, cache: Path, damage: Callable[[Path], Any]) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    load(file)
    (folder,) = cache.iterdir()
    damage(folder)
    assert_is_the_model(load(file))
    assert list(cache.iterdir()) == [folder]
    record = json.loads((folder / "wide_conversion.json").read_text())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= record.keys()


def test_a_sound_conversion_is_not_made_twice_and_weights_are_not_hashed_for_a_tokenizer(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    load(file)

    def refuse(file: Path) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(gguf, "_read", refuse)
    load(file)
    (folder,) = cache.iterdir()
    flip(folder / "model.safetensors")
    load_tokenizer(ModelSection(name=str(file)))
    with pytest.raises(AssertionError, match="converted again"):
        load(file)

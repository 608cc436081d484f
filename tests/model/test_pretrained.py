from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from broken_models import copy_of, with_adapter, with_config, with_value, with_weights
from tiny_models import FAMILIES, save_model_folder
from widecli.errors import UsageError
from widecli.model.backbone import load_backbone, load_config, load_tokenizer
from widecli.model.finite import first_not_finite
from widecli.recipe.schema import ModelSection

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return copy_of(sound, tmp_path / "broken")


def load(folder: Path, **section: Any) -> Any:
    return load_backbone(ModelSection(name=str(folder), **section), torch.device("cpu"))


def test_weights_stored_as_whole_numbers_need_a_config_that_says_what_they_stand_for(folder: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    with_weights(folder, lambda t: t.update({name: (t[name] * 1000).round().clamp(-127, 127).to(torch.int8)}))
    with pytest.raises(
        UsageError, match=f"whole numbers \\({name} is I8\\) and its config.json has no quantization_config"
    ):
        load(folder)


def test_whole_numbers_that_are_no_weights_are_nobody_s_business(folder: Path) -> None:
    from safetensors.torch import save_file

    save_file({"order": torch.arange(8, dtype=torch.int32)}, folder / "channels.safetensors")
    load(folder)


def without(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: {f"_orig_mod.{k}": v for k, v in t.items()},
            ["model.embed_tokens.weight", "begin with '_orig_mod.'"],
        ),
        (lambda t: {f"module.{k}": v for k, v in t.items()}, ["20 tensors are left over", "begin with 'module.'"]),
        (lambda t: {f"base_model.model.{k}": v for k, v in t.items()}, ["begin with 'base_model.model.'"]),
        (lambda t: {k.replace("mlp", "ffn"): v for k, v in t.items()}, ["6 tensors are missing", "layers.0.mlp"]),
        (without("model.norm.weight"), ["1 tensor is missing (model.norm.weight)"]),
        (without("model.embed_tokens.weight"), ["model.embed_tokens.weight"]),
        (without("model.layers.1.self_attn.k_proj.weight"), ["(model.layers.1.self_attn.k_proj.weight)"]),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(64, 32)}),
            ["1 tensor is left over (model.layers.2.mlp.up_proj.weight)"],
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}),
            ["1 tensor is left over (model.layers.0.self_attn.q_proj.bias)"],
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(16)}),
            ["1 tensor is of another shape (model.norm.weight)"],
        ),
    ],
)
def test_weights_that_are_not_the_configs_are_refused_by_name(
    folder: Path, change: Callable[[Tensors], Any], words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with_weights(folder, change)
    with pytest.raises(UsageError) as error:
        load(folder)
    assert all(word in str(error.value) for word in ["broken", *words]), str(error.value)
    assert "\n" not in str(error.value) and not caplog.records, "the library's own report stays silent"


def test_a_refusal_does_not_depend_on_what_transformers_logs(folder: Path) -> None:
    import transformers

    with_weights(folder, without("model.layers.0.mlp.up_proj.weight"))
    before = transformers.logging.get_verbosity()
    try:
        for level in (logging.DEBUG, logging.CRITICAL):
            transformers.logging.set_verbosity(level)
            with pytest.raises(UsageError, match=r"model\.layers\.0\.mlp\.up_proj\.weight"):
                load(folder)
    finally:
        transformers.logging.set_verbosity(before)


def test_a_config_with_more_layers_than_the_weights_is_refused(folder: Path) -> None:
    with_config(folder, num_hidden_layers=3)
    with pytest.raises(UsageError, match=r"9 tensors are missing \(model\.layers\.2\.input_layernorm\.weight"):
        load(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
        lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
        lambda t: {k.removeprefix("model."): v for k, v in t.items()},
    ],
    ids=["a tied head stored too", "buffers of older versions", "a decoder saved without its head"],
)
def test_what_is_only_stored_another_way_loads(folder: Path, sound: Path, change: Callable[[Tensors], Any]) -> None:
    with_weights(folder, change)
    assert load(folder).identity.weights_hash == load(sound).identity.weights_hash


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_whole_and_lacks_nothing_else(family: str, tmp_path: Path) -> None:
    made = save_model_folder(tmp_path / "m", family)
    load(made)
    with_weights(made, without("model.layers.1.post_attention_layernorm.weight"))
    with pytest.raises(UsageError, match=r"1 tensor is missing \(model\.layers\.1\.post_attention_layernorm"):
        load(made)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_value_that_is_not_finite_is_named(folder: Path, name: str, value: float, dtype: str) -> None:
    with_value(folder, name, value)
    with pytest.raises(UsageError, match=f"not finite: {name} holds NaN or infinity"):
        load(folder, dtype=dtype)


def test_the_first_of_several_is_named(folder: Path) -> None:
    for layer in (1, 0):
        with_value(folder, f"model.layers.{layer}.mlp.up_proj.weight", float("nan"))
    with pytest.raises(UsageError, match=r"not finite: model\.layers\.0\.mlp\.up_proj"):
        load(folder)


def test_a_value_too_large_for_float16_is_refused_there_alone(folder: Path) -> None:
    with_value(folder, "model.norm.weight", 1e6)
    load(folder, dtype="bfloat16")
    with pytest.raises(UsageError, match=r"model\.norm\.weight.*model\.dtype=bfloat16 if it is only too large"):
        load(folder, dtype="float16")


def test_integers_and_empty_tensors_are_finite() -> None:
    sound = [("a", torch.zeros(0)), ("b", torch.tensor([1, 2])), ("c", torch.tensor([3e38]))]
    assert first_not_finite(sound) is None and first_not_finite([]) is None
    eight = torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)
    assert first_not_finite([*sound, ("e", eight)]) == "e" and first_not_finite([("e", eight[:1])]) is None
    assert first_not_finite([*sound, ("d", torch.tensor([[0.0], [float("nan")]]))]) == "d"


def test_an_adapter_beside_a_whole_model_is_refused(folder: Path, sound: Path) -> None:
    with_adapter(folder, sound)
    for read in (load_backbone, load_config):
        with pytest.raises(UsageError, match=r"a whole model and an adapter beside it \(adapter_config\.json\)"):
            read(ModelSection(name=str(folder)))
    for left in folder.glob("adapter_*"):
        left.unlink()
    load(folder)


def test_an_adapter_alone_is_refused_with_its_base_model(sound: Path, tmp_path: Path) -> None:
    alone = tmp_path / "adapter"
    with_adapter(alone, sound)
    sound_tokenizer = [p for p in sound.iterdir() if p.name.startswith("tokenizer")]
    for path in sound_tokenizer:
        shutil.copy(path, alone)
    with pytest.raises(UsageError, match=f"holds an adapter .* and no model: merge it into its base model, {sound}, "):
        load(alone)
    (alone / "adapter_config.json").write_text("{")
    with pytest.raises(UsageError, match=r"holds an adapter .* and no model: merge it into its base model and"):
        load(alone)


CODE = """
from transformers import PreTrainedConfig
open({marker!r}, "w").write("ran")
class Own(PreTrainedConfig):
    model_type = "own"
"""


@pytest.fixture
def own_code(folder: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A folder whose config needs Python code that lies beside it, and the file that this code writes."""
    marker = tmp_path / "ran"
    (folder / "own.py").write_text(CODE.format(marker=str(marker)))
    with_config(folder, model_type="own", auto_map={"AutoConfig": "own.Own"})
    return folder, marker


def test_a_models_own_code_does_not_run_and_nobody_is_asked(
    own_code: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(prompt: str = "") -> str:
        raise AssertionError("asked on the terminal")

    monkeypatch.setattr("builtins.input", ask)
    for read in (load_backbone, load_config):
        with pytest.raises(UsageError, match=r"Python code of its own.*--trust-remote-code if you trust it"):
            read(ModelSection(name=str(own_code[0])))
    assert not own_code[1].exists()


def test_a_tokenizers_own_code_does_not_run_either(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (folder / "words.py").write_text(f"open({str(marker)!r}, 'w').write('ran')\nclass Words:\n    pass\n")
    path = folder / "tokenizer_config.json"
    config = {
        **json.loads(path.read_text()),
        "tokenizer_class": "Words",
        "auto_map": {"AutoTokenizer": ["words.Words", None]},
    }
    path.write_text(json.dumps(config))
    try:
        load_tokenizer(ModelSection(name=str(folder)))
    except UsageError as error:
        assert "--trust-remote-code" in str(error) or "cannot be loaded" in str(error)
    assert not marker.exists()


def test_a_models_own_code_runs_for_those_who_trust_it(
    own_code: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WIDE_TRUST_REMOTE_CODE", "1")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(UsageError, match="model type 'own' is not supported yet"):
        load(own_code[0])
    assert own_code[1].read_text() == "ran"


def test_a_folder_that_cannot_be_used_is_not_called_a_corrupt_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    def unwritable(*_: Any, **__: Any) -> None:
        try:
            raise PermissionError(13, "Permission denied", "/somewhere/torchinductor")
        except OSError as error:
            raise RuntimeError("Failed to import something") from error

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", unwritable)
    with pytest.raises(UsageError, match=r"because /somewhere/torchinductor cannot be used.*TORCHINDUCTOR_CACHE_DIR"):
        load(folder)
    (folder / "model.safetensors").write_bytes(b"")
    monkeypatch.undo()
    with pytest.raises(UsageError, match="cannot be loaded; the files may be incomplete or corrupt"):
        load(folder)

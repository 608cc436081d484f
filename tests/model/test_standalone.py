"""A merged export loads by transformers alone, for every family and mode, and computes what widecli computes."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tiny_models import FAMILIES, byte_tokenizer, random_ids, tiny_config, tiny_model, tiny_plan, tiny_routed
from widecli.model import checkpoint
from widecli.model.backbone import Backbone, empty_backbone, load_backbone, load_shape, load_tokenizer, stored_dtype
from widecli.model.export import export_copy, export_merged
from widecli.model.identity import BackboneIdentity, config_hash, weights_hash
from widecli.model.plan import CompensationPlan, LayerOverride
from widecli.model.remote import modeling_wide
from widecli.model.remote.modeling_wide import settings_for
from widecli.model.routed import RoutedModel
from widecli.model.standalone import static_facts, write_standalone
from widecli.recipe.schema import ModelSection

BOTH = CompensationPlan(mean=True, rank=4)


def checkpoint_of(routed: RoutedModel, folder: Path) -> tuple[Path, Backbone]:
    """A checkpoint of what `routed` decides, and its backbone without it."""
    model: Any = routed.backbone
    identity = BackboneIdentity("some/model", None, config_hash(model.config), weights_hash(model))
    config = checkpoint.CheckpointConfig(identity, routed.plan, 1, "12345678", {})
    checkpoint.save(folder / "checkpoint", routed.routers, config, "{}\n", compensations=routed.compensations)
    bare = copy.deepcopy(model.config), model.state_dict()
    routed.detach()
    twin = AutoModelForCausalLM.from_config(bare[0]).to(model.dtype)
    twin.load_state_dict(bare[1])
    twin.eval().requires_grad_(False)
    return folder / "checkpoint", Backbone(twin, byte_tokenizer(), identity, torch.device("cpu"))


def export(folder: Path, family: str = "llama", **plan: Any) -> tuple[Path, Backbone]:
    """A merged export of a random routed model, and its backbone with the same routing by widecli."""
    source, backbone = checkpoint_of(tiny_routed(family, **plan), folder)
    export_merged(source, folder / "merged", backbone, lambda _: "")
    return folder / "merged", backbone


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options).eval()


@torch.no_grad()
def by_widecli(folder: Path, backbone: Backbone, ids: Tensor, **options: Any) -> tuple[Tensor, Mapping[Any, Tensor]]:
    routed, _ = checkpoint.attach(folder.parent / "checkpoint", backbone)
    with routed.tracing(keep_masks=True) as trace:
        logits = backbone.model(ids, use_cache=False, **options).logits
    routed.detach()
    assert trace.masks is not None
    return logits, {key: masks[0].bool() for key, masks in trace.masks.items()}


@torch.no_grad()
def refuse_difference(folder: Path, backbone: Backbone) -> Any:
    """Load `folder`, compare logits and masks with widecli's, and see that something was skipped, not everything."""
    ids = random_ids(2, 20)
    logits, masks = by_widecli(folder, backbone, ids)
    model = load(folder)
    torch.testing.assert_close(model(ids).logits, logits, rtol=1e-5, atol=1e-5)  # fp32, the same order of sums
    found = model.masks()
    assert found.keys() == masks.keys() and found
    for key, mask in masks.items():
        assert torch.equal(found[key].flatten(0, 1).flatten(), mask.flatten()), key
    run = torch.cat([mask.flatten() for mask in found.values()]).float().mean()
    assert 0.1 < run < 0.9
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("compensation", [None, BOTH], ids=["bare", "compensated"])
@pytest.mark.parametrize("mode", ["wide", "token", "layer"])
def test_every_family_and_mode_routes_as_in_widecli(
    tmp_path: Path, family: str, mode: str, compensation: CompensationPlan | None
) -> None:
    model = refuse_difference(*export(tmp_path, family, mode=mode, compensation=compensation))
    assert type(model).__mro__[2].__module__.startswith(f"transformers.models.{family}")


@pytest.mark.parametrize(
    "plan",
    [
        {"parts": "attention"},
        {"parts": "ffn", "compensation": CompensationPlan(mean=False, rank=4)},
        {"tap": "normalised", "compensation": CompensationPlan(mean=True, rank=0)},
        {"overrides": {0: LayerOverride(parts="none"), 1: LayerOverride(ffn_group_size=32)}, "compensation": BOTH},
        {"overrides": {0: LayerOverride(parts="ffn"), 1: LayerOverride(parts="attention")}},
    ],
    ids=["attention", "ffn", "normalised", "dense-layer", "a-part-a-layer"],
)
def test_parts_taps_and_dense_layers_are_as_in_widecli(tmp_path: Path, plan: dict[str, Any]) -> None:
    refuse_difference(*export(tmp_path, **plan))


def test_weights_are_the_base_models_alone_and_the_code_is_one_short_file_without_widecli(tmp_path: Path) -> None:
    folder, backbone = export(tmp_path, compensation=BOTH)
    assert load_file(folder / "model.safetensors").keys() == backbone.model.state_dict().keys() - {"lm_head.weight"} | (
        set() if backbone.model.config.tie_word_embeddings else {"lm_head.weight"}
    )
    code = (folder / "modeling_wide.py").read_text(encoding="utf-8")
    assert code == Path(modeling_wide.__file__).read_text(encoding="utf-8")
    assert len(code.splitlines()) <= 300
    imports = {line.split()[1].split(".")[0] for line in code.splitlines() if line.startswith(("import ", "from "))}
    own = {"__future__", "collections", "copy", "json", "pathlib", "shutil", "typing"}
    assert imports == own | {"torch", "transformers", "safetensors"}


@pytest.mark.parametrize("family", ["llama", "mistral"])  # mistral's window is shorter than what is generated here
@torch.no_grad()
def test_generation_with_a_cache_takes_the_decisions_of_one_pass_and_padding_changes_none(
    tmp_path: Path, family: str
) -> None:
    folder, _ = export(tmp_path, family, compensation=BOTH)
    model = load(folder)
    prompts = [random_ids(1, 9, seed=1)[0].tolist(), random_ids(1, 5, seed=2)[0].tolist()]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    alone = [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]
    for prompt, words in zip(prompts, alone, strict=True):
        ids = torch.tensor([prompt + words])
        whole = model(ids, use_cache=False).logits[0].argmax(-1).tolist()
        assert whole[len(prompt) - 1 : -1] == words
    padded = torch.tensor([prompts[0], [1] * 4 + prompts[1]])
    valid = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
    together = model.generate(padded, attention_mask=valid, **options)[:, 9:].tolist()
    assert together == alone


@torch.no_grad()
def test_in_bfloat16_routers_and_compensation_stay_fp32_and_agree_with_widecli(tmp_path: Path) -> None:
    source, backbone = checkpoint_of(tiny_routed(compensation=BOTH), tmp_path)
    backbone.model.to(torch.bfloat16)
    export_merged(source, tmp_path / "merged", backbone, lambda _: "")
    ids = random_ids(2, 16)
    again = load_backbone(ModelSection(name=str(tmp_path / "merged"), dtype="bfloat16"))
    logits, masks = by_widecli(tmp_path / "merged", again, ids)
    for options in ({}, {"dtype": "auto"}, {"dtype": torch.bfloat16}):
        model = load(tmp_path / "merged", **options)
        assert model.dtype == torch.bfloat16
        assert torch.equal(model(ids).logits, logits)
        assert all(torch.equal(model.masks()[key].flatten(), mask.flatten()) for key, mask in masks.items())
    held = load_file(tmp_path / "merged/router.safetensors")
    model.half().bfloat16()
    assert all(torch.equal(model._tensors[f"router.{key}"], tensor) for key, tensor in held.items())
    wider = load(tmp_path / "merged", dtype=torch.float32)
    assert wider.dtype == torch.float32 and wider(ids).logits.dtype == torch.float32


@torch.no_grad()
def test_what_it_saves_loads_again_and_is_the_same(tmp_path: Path) -> None:
    folder, _ = export(tmp_path, "qwen3", compensation=BOTH)
    ids = random_ids(1, 12)
    model = load(folder)
    model.save_pretrained(tmp_path / "again")
    names = {path.name for path in folder.iterdir()} - {"recipe.yaml", "wide_config.json", "README.md"}
    assert {path.name for path in (tmp_path / "again").iterdir()} == {n for n in names if "tokenizer" not in n}
    assert json.loads((tmp_path / "again/config.json").read_text()) == json.loads((folder / "config.json").read_text())
    assert torch.equal(load(tmp_path / "again")(ids).logits, model(ids).logits)
    twin = copy.deepcopy(model)
    for part in model.parts.values():
        part.mask = None
    assert torch.equal(twin(ids).logits, model(ids).logits) and all(p.mask is not None for p in model.parts.values())
    with pytest.raises(ValueError, match=r"model\.push_to_hub"):
        model.save_pretrained(tmp_path / "elsewhere", push_to_hub=True)


@torch.no_grad()
def test_layers_may_lie_on_a_disk_and_settings_be_changed_as_for_any_model(tmp_path: Path) -> None:
    folder, _ = export(tmp_path, compensation=BOTH)
    ids = random_ids(1, 12)
    logits = load(folder)(ids).logits
    places = {"model.layers.1": "disk", "model.layers.0": "cpu", "model.embed_tokens": "cpu", "model.norm": "cpu"}
    places |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    spread = load(folder, device_map=places, offload_folder=str(tmp_path / "offloaded"))
    assert next(spread.model.layers[1].parameters()).is_meta
    torch.testing.assert_close(spread(ids).logits, logits)
    changed = load(folder, use_cache=False, attn_implementation="eager")
    assert changed.config.use_cache is False and changed.config._attn_implementation == "eager"
    torch.testing.assert_close(changed(ids).logits, logits, rtol=1e-4, atol=1e-4)  # attention by another order of sums


@torch.no_grad()
def test_from_the_hub_the_routing_files_come_with_the_weights(tmp_path: Path) -> None:
    folder, _ = export(tmp_path, compensation=BOTH)
    ids = random_ids(1, 12)
    logits = load(folder)(ids).logits
    commit = "0123456789abcdef0123456789abcdef01234567"
    stored = tmp_path / "hub/models--some--routed"  # the Hub's cache as a download leaves it
    (stored / "refs").mkdir(parents=True)
    (stored / "refs/main").write_text(commit)
    shutil.copytree(folder, stored / "snapshots" / commit)
    for options in ({}, {"revision": "main"}, {"revision": commit}):
        model = AutoModelForCausalLM.from_pretrained(
            "some/routed", cache_dir=tmp_path / "hub", trust_remote_code=True, **options
        )
        assert torch.equal(model(ids).logits, logits)
    (stored / "snapshots" / commit / "compensation.safetensors").unlink()
    with pytest.raises(OSError, match=r"some/routed|cached files"):
        AutoModelForCausalLM.from_pretrained("some/routed", cache_dir=tmp_path / "hub", trust_remote_code=True)


def test_it_is_never_loaded_dense(tmp_path: Path) -> None:
    folder, _ = export(tmp_path)
    for load_by in (AutoConfig.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            load_by(folder, trust_remote_code=False)
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3"):
        with pytest.raises(KeyError, match="this model routes: load it by AutoModelForCausalLM"):
            getattr(transformers, f"{name}ForCausalLM").from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    with pytest.raises(ValueError, match="made by from_pretrained, not from a config"):
        AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    assert config.get_text_config().hidden_size == 32
    assert AutoModelForCausalLM.from_pretrained(folder, config=config, trust_remote_code=True).parts
    assert AutoModelForCausalLM.from_pretrained(folder, config=config).parts  # known by now, and routed
    for config in (tiny_config(), None):
        with pytest.raises(ValueError, match=r"says nothing of routing|tensor parallelism"):
            load_class = modeling_wide.WideForCausalLM.from_pretrained
            load_class(folder, config=config, **({} if config else {"tp_plan": "auto"}))


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("router.safetensors", {"0.ffn.up.bias": None}, r"missing, left over or of another shape: router\.0\.ffn\.up"),
        ("router.safetensors", {"7.ffn.up.bias": torch.zeros(2)}, r"router\.7\.ffn\.up\.bias"),
        ("compensation.safetensors", {"1.ffn.mean": torch.zeros(3, 32)}, r"compensation\.1\.ffn\.mean"),
        ("model.safetensors", {"model.layers.1.mlp.up_proj.weight": None}, r"lacks weights: model\.layers\.1\.mlp\.up"),
    ],
)
def test_a_tensor_that_is_missing_left_over_or_misshaped_is_named(
    tmp_path: Path, file: str, change: dict[str, Tensor | None], words: str
) -> None:
    folder, _ = export(tmp_path, compensation=BOTH)
    tensors: dict[str, Any] = load_file(folder / file) | change
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=words):
        load(folder)
    (folder / file).unlink()
    with pytest.raises(OSError, match=file.replace(".", r"\.") if "model" not in file else "model"):
        load(folder)


def test_widecli_reads_the_dense_model_of_an_export_without_its_code(tmp_path: Path) -> None:
    folder, backbone = export(tmp_path, "qwen2")
    section = ModelSection(name=str(folder))
    found = load_backbone(section)
    assert type(found.model).__module__.startswith("transformers.models.qwen2")
    assert found.identity.mismatch(backbone.identity) is None
    assert found.shape == backbone.shape == load_shape(section) and stored_dtype(section) == "float32"
    tokenizer, empty, place = empty_backbone(section, torch.float32)  # as sharded runs load it
    assert type(empty) is type(found.model) and place == folder
    assert tokenizer("ab").input_ids == found.tokenizer("ab").input_ids
    assert (
        load_tokenizer(section)("ab").input_ids == found.tokenizer("ab").input_ids == backbone.tokenizer("ab").input_ids
    )


def test_an_unmerged_export_says_what_it_needs(tmp_path: Path) -> None:
    source, _ = checkpoint_of(tiny_routed(), tmp_path)
    export_copy(source, tmp_path / "small", "")
    for trusted in (True, False):
        with pytest.raises(
            ValueError, match=r"routing of some/model without the model\. `wide export --merge` writes both"
        ):
            AutoModelForCausalLM.from_pretrained(tmp_path / "small", trust_remote_code=trusted)


def static(folder: Path, model: Any, layers: list[dict[str, Any]]) -> Path:
    model.save_pretrained(folder)
    write_standalone(folder, model.config, static_facts(model.config, layers))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_layers_cut_to_uneven_widths_compute_what_constant_masks_do(tmp_path: Path, family: str) -> None:
    ids, model = random_ids(2, 10), tiny_model(family)
    dense = model(ids).logits
    masks = [{"attention": "0011", "ffn": "1011"}, {"attention": "0101", "ffn": "0110"}]
    masked = load(static(tmp_path / "masked", model, masks))
    expected = masked(ids).logits
    assert not torch.allclose(expected, dense, atol=0.1)
    assert masked.masks()[1, "ffn"].tolist() == [[[False, True, True, False]] * 10] * 2
    size = masked.config.head_dim if family == "qwen3" else 8
    channels = [[*range(16), *range(32, 64)], list(range(16, 48))]
    heads = [[2, 3], [1, 3]]  # the first two share a KV head, the others have one each
    for index, layer in enumerate(model.model.layers):
        for name in ("gate_proj", "up_proj"):
            _cut(layer.mlp, name, rows=channels[index])
        _cut(layer.mlp, "down_proj", columns=channels[index])
        kept = [head * size + i for head in heads[index] for i in range(size)]
        _cut(layer.self_attn, "q_proj", rows=kept)
        _cut(layer.self_attn, "o_proj", columns=kept)
    for name in ("k_proj", "v_proj"):
        _cut(model.model.layers[0].self_attn, name, rows=list(range(size, 2 * size)))
    tables = [{"channels": 48, "heads": 2, "kv_heads": 1}, {"channels": 32, "heads": 2}]
    narrow = load(static(tmp_path / "narrow", model, tables))
    assert narrow.model.layers[1].mlp.up_proj.weight.shape == (32, 32) and not narrow.masks()
    torch.testing.assert_close(narrow(ids).logits, expected, rtol=1e-4, atol=1e-4)  # fp32, fewer summands
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    assert torch.equal(narrow.generate(ids, **options), masked.generate(ids, **options))
    narrow.save_pretrained(tmp_path / "again")
    assert torch.equal(load(tmp_path / "again")(ids).logits, narrow(ids).logits)


def _cut(parent: nn.Module, name: str, rows: list[int] | None = None, columns: list[int] | None = None) -> None:
    linear: Any = getattr(parent, name)
    if rows is not None:
        linear.weight = nn.Parameter(linear.weight[rows].clone())
        linear.bias = None if linear.bias is None else nn.Parameter(linear.bias[rows].clone())
    if columns is not None:
        linear.weight = nn.Parameter(linear.weight[:, columns].clone())


@torch.no_grad()
def test_constant_masks_may_leave_means_and_stand_beside_routers(tmp_path: Path) -> None:
    """The same as routers that always decide so: zero weights, and biases that say what runs."""
    routed = RoutedModel.attach(tiny_model(), tiny_plan(compensation=BOTH))
    generator = torch.Generator().manual_seed(5)
    for parameter in routed.compensations.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    for name, router in routed.routers.named_parameters():
        router.zero_() if name.startswith("0") else router.copy_(torch.randn(router.shape, generator=generator))
    routed.routers["0"]["ffn"].up.bias[:] = torch.tensor([1.0, 0, 0, 1, 1, 0, 0, 1])  # runs, skips, runs, skips
    source, backbone = checkpoint_of(routed, tmp_path)
    export_merged(source, tmp_path / "merged", backbone, lambda _: "")
    expected = refuse_difference(tmp_path / "merged", backbone)
    config = json.loads((tmp_path / "merged/config.json").read_text())
    config["routing"]["layers"][0]["ffn"] = "1010"
    (tmp_path / "merged/config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "merged/router.safetensors")
    kept = {key: tensor for key, tensor in tensors.items() if not key.startswith("0.ffn")}
    save_file(kept, tmp_path / "merged/router.safetensors")
    ids = random_ids(2, 20)
    assert torch.equal(load(tmp_path / "merged")(ids).logits, expected(ids).logits)


def test_odd_tables_are_refused(tmp_path: Path) -> None:
    for index, (table, words) in enumerate(
        [({"ffn": "101"}, "64 inputs in 3 groups"), ({"heads": 3, "kv_heads": 2}, "cannot share 2 KV heads")]
    ):
        folder = static(tmp_path / str(index), tiny_model(), [table, {}])
        with pytest.raises(ValueError, match=words):
            load(folder)
        shutil.rmtree(folder)


def test_settings_of_version_5_are_understood_by_version_4() -> None:
    scaled = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}
    assert settings_for({"rope_parameters": scaled, "vocab_size": 3}, 4) == {
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
        "vocab_size": 3,
    }
    plain = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
    assert settings_for(plain, 4) == {"rope_theta": 1e4, "rope_scaling": None}
    assert settings_for(plain, 5) == plain

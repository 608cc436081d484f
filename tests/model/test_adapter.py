from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_models import FAMILIES, random_ids, shake_routers, tiny_model, tiny_plan
from widecli.errors import UsageError
from widecli.model.adapter import CONFIG, WEIGHTS, Adapter
from widecli.model.routed import RoutedModel
from widecli.recipe.schema import LoraSection

SECTION = LoraSection(rank=4, alpha=8, dropout=0.5)


def shaken(model: Any, seed: int = 0) -> Adapter:
    """An adapter whose B matrices are not zero."""
    adapter = Adapter.new(model, SECTION, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter.named_parameters().values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return adapter


@torch.no_grad()
def logits(model: Any, ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    out: Tensor = model(input_ids=random_ids(2, 12) if ids is None else ids, attention_mask=mask).logits
    return out


def test_a_new_adapter_changes_nothing_and_has_both_matrices_on_seven_layers() -> None:
    model = tiny_model()
    before = logits(model)
    adapter = Adapter.new(model, SECTION, seed=0)
    assert torch.equal(logits(model), before)
    assert len(adapter.named_parameters()) == 2 * 7 * 2
    assert adapter.facts()["parameters"] == 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))


def test_the_start_depends_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = Adapter.new(tiny_model(), SECTION, seed=5).state()
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    second, third = (Adapter.new(tiny_model(), SECTION, seed=seed).state() for seed in (5, 6))
    torch.random.set_rng_state(state)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], third[name]) for name in first)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["wide", "layer"])
def test_merged_and_unmerged_agree_under_routing(family: str, mode: str) -> None:
    """The mask must be on the adapter's path too, and the routers must read the same residual."""
    model = tiny_model(family)
    adapter = shaken(model)
    routed = RoutedModel.attach(model, tiny_plan(mode=mode))
    shake_routers(routed)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0  # left padding
    unmerged = logits(model, mask=mask)
    with routed.tracing() as trace:
        logits(model, mask=mask)
    assert 0.1 < trace.skip_rate().mean < 0.9
    with routed.dense():
        assert (logits(model, mask=mask) - unmerged).abs().max() > 0.1, "routing must matter here"
    routed.detach()
    adapter.merge()
    again = RoutedModel.attach(model, routed.plan)
    again.routers.load_state_dict(routed.routers.state_dict())
    real = mask.bool()
    # fp32 sums in another order; logits are of the order of ten
    torch.testing.assert_close(logits(model, mask=mask)[real], unmerged[real], rtol=1e-4, atol=1e-3)


def test_a_skipped_group_adds_nothing_on_the_adapters_path() -> None:
    model = tiny_model()
    shaken(model)
    routed = RoutedModel.attach(model, tiny_plan())
    shake_routers(routed)
    seen: dict[str, Tensor] = {}
    down = model.model.layers[0].mlp.down_proj
    for name, module in (("base", down.base_layer), ("adapter", down.lora_A["default"])):
        module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0]}))
    with routed.tracing(keep_masks=True) as trace:
        logits(model)
    assert trace.masks is not None
    skipped = ~trace.masks[0, "ffn"][0].view(2, 12, 4)
    assert bool(skipped.any())
    for value in seen.values():
        assert not bool(value.view(2, 12, 4, 16)[skipped].any())
    torch.testing.assert_close(seen["base"], seen["adapter"])


def test_disabled_gives_the_bare_model_and_leaves_the_adapter_trainable() -> None:
    model = tiny_model()
    before = logits(model)
    adapter = shaken(model)
    adapted = logits(model)
    with adapter.disabled():
        assert torch.equal(logits(model), before)
    assert torch.equal(logits(model), adapted) and not torch.equal(adapted, before)
    assert all(p.requires_grad for p in adapter.named_parameters().values())


def test_it_drops_in_training_alone() -> None:
    model = tiny_model()
    adapter = shaken(model)
    quiet = logits(model)
    assert torch.equal(logits(model), quiet)
    with adapter.training():
        assert not torch.equal(logits(model), quiet)
    assert torch.equal(logits(model), quiet)


def test_a_loaded_adapter_is_the_saved_one_and_drops_nothing(tmp_path: Path) -> None:
    model = tiny_model()
    adapter = shaken(model)
    adapter.save(tmp_path / "adapter", "some/base")
    fresh = tiny_model()
    loaded = Adapter.load(fresh, tmp_path / "adapter")
    assert torch.equal(logits(fresh), logits(model))
    assert loaded.facts() == adapter.facts()
    loaded.save(tmp_path / "again", "some/base")
    for name in (CONFIG, WEIGHTS):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "adapter" / name).read_bytes()


def test_peft_alone_loads_it(tmp_path: Path) -> None:
    from peft import PeftModel

    model = tiny_model()
    shaken(model).save(tmp_path / "adapter", "some/base")
    theirs = PeftModel.from_pretrained(tiny_model(), str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(theirs), logits(model), rtol=0, atol=0)


def test_weights_stay_fp32_on_a_bf16_backbone() -> None:
    model = tiny_model().to(torch.bfloat16)
    adapter = Adapter.new(model, SECTION, seed=0)
    assert {p.dtype for p in adapter.named_parameters().values()} == {torch.float32}
    assert logits(model).dtype == torch.bfloat16


def test_tied_embeddings_survive_merging_and_saving(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model(tie_word_embeddings=True)
    adapter = shaken(model)
    unmerged = logits(model)
    adapter.merge()
    model.save_pretrained(tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert read.lm_head.weight is read.model.embed_tokens.weight and read.config.tie_word_embeddings
    torch.testing.assert_close(logits(read), unmerged, rtol=1e-4, atol=1e-3)
    assert not [name for name, _ in read.named_parameters() if "lora" in name]


def test_missing_files_are_named(tmp_path: Path) -> None:
    shaken(tiny_model()).save(tmp_path / "adapter", "some/base")
    (tmp_path / "adapter" / WEIGHTS).unlink()
    with pytest.raises(UsageError, match=f"adapter lacks {WEIGHTS}"):
        Adapter.load(tiny_model(), tmp_path / "adapter")
    with pytest.raises(UsageError, match=f"lacks {CONFIG} and {WEIGHTS}"):
        Adapter.load(tiny_model(), tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("r", 2, "has shape"),
        ("target_modules", ["q_proj"], "unexpected"),
        ("target_modules", ["c_attn"], "c_attn"),
        ("peft_type", "IA3", "only LoRA"),
        ("peft_type", "NONSENSE", "cannot be read"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(tmp_path: Path, key: str, value: object, words: str) -> None:
    shaken(tiny_model()).save(tmp_path / "adapter", "some/base")
    path = tmp_path / "adapter" / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(UsageError, match=words):
        Adapter.load(tiny_model(), tmp_path / "adapter")


def test_missing_and_damaged_tensors_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shaken(tiny_model()).save(tmp_path / "adapter", "some/base")
    path = tmp_path / "adapter" / WEIGHTS
    tensors = load_file(path)
    removed = sorted(tensors)[0]
    del tensors[removed]
    save_file(tensors, path)
    with pytest.raises(UsageError, match=f"missing {removed}"):
        Adapter.load(tiny_model(), tmp_path / "adapter")
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(UsageError, match="cannot be read"):
        Adapter.load(tiny_model(), tmp_path / "adapter")


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    shaken(tiny_model()).save(tmp_path / "adapter", "some/base")
    with pytest.raises(UsageError, match=r"missing .*layers\.2"):
        Adapter.load(tiny_model(num_hidden_layers=3), tmp_path / "adapter")

"""How a backbone is dealt, and that dealt parts are the whole; tests/recipes/test_ranks.py trains on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from broken_models import with_adapter, with_value, with_weights
from tiny_models import FAMILIES, random_ids, save_model_folder, tiny_config, tiny_model, tiny_plan
from widecli import ranks
from widecli.errors import UsageError
from widecli.model.backbone import empty_model, load_backbone
from widecli.model.budget import Budget
from widecli.model.channel_order import arrange
from widecli.model.plan import CompensationPlan
from widecli.model.routed import RoutedModel
from widecli.recipe.schema import DistributedSection, LoraSection, ModelSection, TrainSection
from widecli.train.distributed import refuse_shares
from widecli.train.loop import Trainer
from widecli.train.sharding import GIB, Sharding, choose_sharding, load_sharded, shard_layers, whole_sizes


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ranks.Ranks]:
    """A gloo group of this process alone."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield ranks.Ranks()
    torch.distributed.destroy_process_group()


def choose(group: ranks.Ranks, weights_gib: float = 15, **section: object) -> Sharding | None:
    return choose_sharding(DistributedSection.model_validate(section), group, weights_gib * GIB)


def test_a_backbone_stays_whole_where_it_leaves_room(group: ranks.Ranks) -> None:
    assert choose(group, memory_gib=80) is None
    assert choose(group, memory_gib=24) == Sharding("full")
    assert choose(group) is None  # CPUs
    assert choose(group, memory_gib=24, shard="none") is None
    assert choose(group, shard="full") == Sharding("full")
    assert choose(group, offload=True) == Sharding("node", offload=True)


def test_machines_hold_the_same_parts_where_one_is_enough(monkeypatch: pytest.MonkeyPatch, group: ranks.Ranks) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    eight = ranks.Ranks(size=8)
    assert choose(eight, memory_gib=24) == Sharding("node")
    assert choose(eight, weights_gib=150, memory_gib=80) == Sharding("full")
    with pytest.raises(UsageError, match=r"6 is not n x 4"):
        choose(ranks.Ranks(size=6), shard="node")


@pytest.mark.parametrize("offload", [False, True])
def test_a_model_read_in_parts_is_the_model(tmp_path: Path, group: ranks.Ranks, offload: bool) -> None:
    section = ModelSection(name=str(save_model_folder(tmp_path / "model")))
    whole = load_backbone(section)
    parts = load_sharded(section, Sharding("full", offload), group)
    assert parts.identity == whole.identity and parts.sharded and not whole.sharded
    assert not any(p.requires_grad for p in parts.model.parameters())
    ids = random_ids(2, 7)
    with torch.no_grad():
        assert torch.equal(parts.model(input_ids=ids).logits, whole.model(input_ids=ids).logits)


def test_an_adapter_has_the_sizes_of_the_whole_weights(tmp_path: Path, group: ranks.Ranks) -> None:
    from widecli.model.adapter import Adapter

    section = ModelSection(name=str(save_model_folder(tmp_path / "model")))
    sizes = []
    for backbone in (load_backbone(section), load_sharded(section, Sharding("node"), group)):
        with whole_sizes(backbone.model, backbone.device):
            adapter = Adapter.new(backbone.model, LoraSection(rank=4), seed=0)
        sizes.append({name: p.clone() for name, p in adapter.named_parameters().items()})
    assert sizes[0].keys() == sizes[1].keys()
    assert all(torch.equal(sizes[1][name], value) for name, value in sizes[0].items())


def test_a_folder_that_lacks_a_weight_is_refused(tmp_path: Path, group: ranks.Ranks) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_model_folder(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"1 tensor is missing \(model\.layers\.1\.mlp\.up_proj\.weight\)"):
        load_sharded(ModelSection(name=str(folder)), Sharding("full"), group)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"no \.safetensors files"):
        load_sharded(ModelSection(name=str(folder)), Sharding("full"), group)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: with_weights(f, lambda t: {f"module.{k}": v for k, v in t.items()}), "begin with 'module.'"),
        (lambda f: with_weights(f, lambda t: t.update({"model.extra.weight": torch.ones(2)})), "1 tensor is left over"),
        (lambda f: with_value(f, "model.layers.1.mlp.up_proj.weight", float("nan")), r"not finite: .*1\.mlp\.up_proj"),
        (lambda f: with_value(f, "model.norm.weight", float("inf")), r"not finite: model\.norm\.weight"),
        (lambda f: with_adapter(f, f), "an adapter beside it"),
        (
            lambda f: with_weights(f, lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)})),
            r"whole numbers \(model\.norm\.weight is I8\)",
        ),
    ],
)
def test_a_folder_that_is_not_what_it_says_is_refused_in_parts_too(
    tmp_path: Path, group: ranks.Ranks, spoil: Callable[[Path], Any], said: str
) -> None:
    folder = save_model_folder(tmp_path / "model")
    spoil(folder)
    with pytest.raises(UsageError, match=said):
        load_sharded(ModelSection(name=str(folder)), Sharding("full"), group)


def test_what_is_only_stored_another_way_is_read_in_parts(tmp_path: Path, group: ranks.Ranks) -> None:
    folder = save_model_folder(tmp_path / "model")
    with_weights(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    section = ModelSection(name=str(folder))
    assert load_sharded(section, Sharding("full"), group).identity == load_backbone(section).identity


@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_model_has_no_weights_but_its_buffers(family: str) -> None:
    from transformers import AutoModelForCausalLM

    config = tiny_config(family)
    model, real = empty_model(config, torch.float32), AutoModelForCausalLM.from_config(config)
    assert all(p.is_meta for p in model.parameters())
    buffers = dict(real.named_buffers())
    assert buffers and all(torch.equal(buffers[name], b) for name, b in model.named_buffers())


@pytest.mark.parametrize(
    ("batch", "size", "micro", "words"),
    [(2, 3, None, "3 ranks are more than the 2 sequences"), (6, 4, None, "start 1, 2, 3, 6"), (6, 3, 4, "one rank")],
)
def test_a_batch_that_cannot_be_dealt_is_refused(batch: int, size: int, micro: int | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        refuse_shares(batch, size, micro)


@pytest.mark.parametrize("dealt", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_graph_serves_all_layers_however_they_are_held(
    group: ranks.Ranks, monkeypatch: pytest.MonkeyPatch, dealt: bool, checkpointing: bool
) -> None:
    """Traced only: generating code for it would take minutes."""
    from torch._dynamo.utils import counters

    from widecli.model import loss

    monkeypatch.setattr(loss, "_compiled_chunk", lambda: loss.chunk_loss_and_gradient)
    plain = tiny_trainer(dealt=False, compile=False)
    compiled = tiny_trainer(dealt=dealt, compile=True, activation_checkpointing=checkpointing)
    compiled_layers = compiled.routed.compiled_layers
    compiled.routed.compiled_layers = lambda on, **o: compiled_layers(on, backend="aot_eager", **o)  # type: ignore[method-assign,assignment]
    torch.compiler.reset()
    counters.clear()
    for one, other in zip(plain.run(0, 2), compiled.run(0, 2), strict=True):
        assert other.lm_loss == pytest.approx(one.lm_loss, rel=1e-5)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_channels_of_a_dealt_backbone_move_where_they_lie(group: ranks.Ranks, family: str) -> None:
    whole, dealt = tiny_model(family), tiny_model(family)
    shard_layers(dealt, Sharding("full"), torch.device("cpu"))
    order = torch.stack([torch.randperm(64, generator=torch.Generator().manual_seed(i)) for i in range(2)]).int()
    arrange(dealt, order)
    arrange(whole, order)
    for (name, one), other in zip(whole.named_parameters(), dealt.parameters(), strict=True):
        found = other.full_tensor() if isinstance(other, DTensor) else other
        assert torch.equal(one, found), name


def tiny_trainer(*, dealt: bool, **train: Any) -> Trainer:
    model = tiny_model(num_hidden_layers=3)
    if dealt:
        shard_layers(model, Sharding("full"), torch.device("cpu"))

    def fetch(step: int, rows: Sequence[int]) -> tuple[torch.Tensor, None]:
        return torch.cat([random_ids(1, 10, seed=100 * step + row) for row in rows]), None

    routed = RoutedModel.attach(model, tiny_plan(compensation=CompensationPlan(rank=3)), seed=0)
    return Trainer(routed, Budget("rate", 0.9), TrainSection(steps=4, batch_size=4, **train), fetch, 10)

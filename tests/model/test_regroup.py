from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_models import FAMILIES, random_ids, tiny_model, tiny_plan, tiny_routed
from widecli.errors import UsageError
from widecli.model.clustering import cluster_channels
from widecli.model.plan import LayerOverride, PartName
from widecli.model.regroup import (
    channel_statistics,
    collecting,
    count_tokens,
    orders_from,
    regroup,
    require_enough_text,
)
from widecli.model.routed import RoutedModel

Key = tuple[int, PartName]


def padded_batches() -> list[tuple[Tensor, Tensor | None]]:
    """Left padding, right padding and none: 27, 22 and 20 real tokens."""
    left, right = torch.ones(3, 10, dtype=torch.long), torch.ones(3, 8, dtype=torch.long)
    left[1, :3] = 0
    right[2, 6:] = 0
    return [(random_ids(3, 10), left), (random_ids(3, 8, seed=1), right), (random_ids(2, 10, seed=2), None)]


def one_by_one(model: Any, batches: list[tuple[Tensor, Tensor | None]]) -> dict[Key, Tensor]:
    """Inputs of the output projections, each sequence alone and without padding: by layer and part [n, K]."""
    found: dict[Key, list[Tensor]] = {}
    handles = []
    for index, layer in enumerate(model.model.layers):
        for part, module in (("attention", layer.self_attn.o_proj), ("ffn", layer.mlp.down_proj)):

            def keep(_: Any, args: Any, key: Any = (index, part)) -> None:
                found.setdefault(key, []).append(args[0][0].clone())

            handles.append(module.register_forward_pre_hook(keep))
    for ids, valid in batches:
        for row, mask in zip(ids, torch.ones_like(ids) if valid is None else valid, strict=True):
            model(row[mask.bool()][None], use_cache=False)
    for handle in handles:
        handle.remove()
    return {key: torch.cat(parts) for key, parts in found.items()}


def expected_shares(model: Any, index: int, hidden: Tensor) -> Tensor:
    weight = model.model.layers[index].mlp.down_proj.weight
    squares = torch.stack([(h[:, None] * weight[:, c]).square().sum(1) for c, h in enumerate(hidden.T)], 1)
    return squares / squares.sum(1, keepdim=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_equal_a_slow_reference_without_padding(family: str) -> None:
    model, batches = tiny_model(family), padded_batches()
    hidden = one_by_one(model, batches)
    statistics = channel_statistics(model, batches)
    assert count_tokens(batches) == 27 + 22 + 20
    assert set(statistics.means) == set(hidden) and set(statistics.energy) == {0, 1}
    for key, h in hidden.items():
        torch.testing.assert_close(statistics.means[key], h.mean(0), rtol=1e-4, atol=1e-5)
    for index, energy in statistics.energy.items():
        assert energy.dtype == torch.float16
        expected = expected_shares(model, index, hidden[index, "ffn"])
        torch.testing.assert_close(energy.float(), expected, rtol=2e-3, atol=1e-5)  # fp16


def test_routers_change_no_statistics() -> None:
    dense = channel_statistics(tiny_model(), padded_batches())
    routed = tiny_routed()
    found = channel_statistics(routed, padded_batches())
    for key, mean in dense.means.items():
        assert torch.equal(found.means[key], mean)
    for index, energy in dense.energy.items():
        assert torch.equal(found.energy[index], energy)
    # and the routers do skip: the second layer's input is another one when they run
    with collecting(routed, 69) as skipping:
        for ids, valid in padded_batches():
            routed.decoder(input_ids=ids, attention_mask=valid)
    assert not torch.allclose(skipping.means[1, "ffn"], dense.means[1, "ffn"], atol=1e-2)


def test_kept_tokens_are_spread_evenly_over_the_text() -> None:
    everything = channel_statistics(tiny_model(), padded_batches())
    some = channel_statistics(tiny_model(), padded_batches(), tokens=23)
    assert torch.equal(some.energy[1], everything.energy[1][2::3])  # 69 tokens
    assert torch.equal(some.means[1, "ffn"], everything.means[1, "ffn"])  # of all tokens nevertheless
    for tokens in (1, 7, 40, 68):
        assert channel_statistics(tiny_model(), padded_batches(), tokens).energy[0].shape == (tokens, 64)


def test_other_passes_can_fill_the_statistics_and_hooks_are_gone_afterwards() -> None:
    routed = tiny_routed()
    expected = channel_statistics(routed, padded_batches())
    with collecting(routed, 69) as statistics, routed.probing(open_gates=True):
        for ids, valid in padded_batches():
            routed.decoder(input_ids=ids, attention_mask=valid, use_cache=False)
    assert torch.equal(statistics.energy[1], expected.energy[1])
    modules = [m for layer in routed.decoder_layers() for m in layer.modules()]
    assert sum(len(m._forward_pre_hooks) for m in modules) == 2 * 4  # the routers' own
    assert len(routed.decoder._forward_pre_hooks) == 1


def test_layers_that_run_again_in_a_backward_pass_count_once() -> None:
    routed = tiny_routed()
    ids = random_ids(2, 10)
    expected = channel_statistics(routed, [(ids, None)])
    runs: list[int] = []
    routed.decoder_layers()[0].mlp.down_proj.register_forward_pre_hook(lambda *_: runs.append(1))
    with routed.dense(), collecting(routed, 20) as found, routed.compiled_layers(False, checkpointing=True):
        embedded = routed.backbone.get_input_embeddings()(ids).requires_grad_(True)
        routed.decoder(inputs_embeds=embedded, use_cache=False).last_hidden_state.sum().backward()
    assert len(runs) == 2
    assert torch.equal(found.means[0, "ffn"], expected.means[0, "ffn"])
    assert torch.equal(found.energy[1], expected.energy[1])


def test_regrouping_orders_each_layer_by_its_own_width() -> None:
    model = tiny_model(num_hidden_layers=5)
    overrides = {
        1: LayerOverride(parts="attention"),
        2: LayerOverride(ffn_group_size=32),
        3: LayerOverride(ffn_group_size=64),
        4: LayerOverride(parts="none"),
    }
    routed = RoutedModel.attach(model, tiny_plan(overrides=overrides))
    said: list[str] = []
    orders = regroup(routed, padded_batches(), seed=5, say=said.append)
    assert orders.dtype == torch.int32 and orders.shape == (5, 64)
    energy = channel_statistics(routed, padded_batches()).energy
    for index, width in ((0, 16), (2, 32)):
        assert torch.equal(orders[index], cluster_channels(energy[index], width, seed=5).int())
        assert not torch.equal(orders[index], torch.arange(64).int())
    for index in (1, 3, 4):
        assert torch.equal(orders[index], torch.arange(64).int())
    assert said == ["channel statistics", "regrouping channels, layer 1 of 5"]


@pytest.mark.parametrize("mode", ["token", "layer"])
def test_modes_without_groups_keep_the_order(mode: str) -> None:
    routed = tiny_routed(mode=mode)
    assert torch.equal(regroup(routed, padded_batches()), torch.arange(64).int().expand(2, 64))


def test_too_little_text_is_refused_before_any_pass() -> None:
    routed = tiny_routed()
    batches = [(random_ids(1, 15), None)]
    calls: list[int] = []
    routed.decoder.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(UsageError, match="into 4 groups needs at least 16 tokens, and there were 15"):
        regroup(routed, batches)
    with pytest.raises(UsageError, match="at least 16 tokens, and there were 12"):
        require_enough_text(routed, padded_batches(), tokens=12)
    assert not calls


def test_nan_is_refused_and_the_layer_named() -> None:
    model = tiny_model()
    model.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")
    with pytest.raises(UsageError, match="the ffn of layer 1 gives NaN or infinity on this text"):
        channel_statistics(model, padded_batches())
    assert not model.model._forward_pre_hooks


def test_passes_that_do_not_come_are_noticed() -> None:
    model = tiny_model()
    with pytest.raises(RuntimeError, match="30 tokens were announced, and 20 came"), collecting(model, 30):
        model(random_ids(2, 10))


def test_orders_come_from_statistics_of_any_origin() -> None:
    routed = tiny_routed()
    statistics = channel_statistics(routed, padded_batches())
    assert torch.equal(orders_from(statistics, routed.layers), regroup(routed, padded_batches()))

"""The memory model against real tensors, and what fits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tiny_models import tiny_model, tiny_plan
from widecli.engine.cache import KVCache
from widecli.engine.model import InferenceModel
from widecli.errors import UsageError
from widecli.model.plan import CompensationPlan, ModelShape
from widecli.model.routed import RoutedModel, build_routers
from widecli.profiling import memory
from widecli.profiling.memory import Demand, compensations_bytes, memory_model, routers_bytes, weights_bytes

FP32 = torch.float32


@pytest.mark.parametrize("tied", [False, True])
def test_weights_and_routers_are_those_of_the_tensors(tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    shape = ModelShape.from_config(model.config)
    assert weights_bytes(shape, FP32, tied) == sum(4 * p.numel() for p in model.parameters())
    for plan in (tiny_plan(), tiny_plan(mode="layer"), tiny_plan(parts="ffn")):
        routers = build_routers(plan, shape)
        assert routers_bytes(shape, plan) == sum(4 * p.numel() for p in routers.parameters())


def test_what_is_added_for_skipped_groups_counts_with_the_routers() -> None:
    model = tiny_model()
    shape = ModelShape.from_config(model.config)
    for mode in ("wide", "layer"):
        routed = RoutedModel.attach(tiny_model(), tiny_plan(mode=mode, compensation=CompensationPlan(rank=5)))
        engine = InferenceModel.from_routed(
            routed.backbone, routed.plan, routed.routers, compensations=routed.compensations
        )
        packed = [stand_in.standing for layer in engine.layers for stand_in in layer.stand_ins.values()]
        readers = [r for layer in engine.layers for r in (layer.attention, layer.ffn, layer.reduction) if r is not None]
        packed += [reader.bypass for reader in readers if reader.bypass is not None]
        size = sum(4 * tensor.numel() for tensor in packed)
        assert compensations_bytes(shape, routed.plan, FP32) == size > 0
        found = memory_model(shape, routed.plan, 1, 8, 8, FP32, tied=False)
        assert found.routers == routers_bytes(shape, routed.plan) + size
    assert compensations_bytes(shape, tiny_plan(), FP32) == 0


def test_the_parts_of_the_model() -> None:
    shape = ModelShape.from_config(tiny_model().config)
    found = memory_model(shape, tiny_plan(), 3, 10, 14, FP32, tied=False)
    cache = KVCache(shape, 3, 14, FP32, torch.device("cpu"))
    assert found.cache == sum(4 * t.numel() for t in (*cache.k, *cache.v))
    assert found.activations == 4 * (30 * (2 * 32 + 3 * 64) + 2 * 3 * 96)
    assert found.total == found.weights + found.routers + found.cache + found.activations
    decode = memory_model(shape, None, 3, 10, 14, FP32, tied=False, prefills=False)
    assert decode.routers == 0 and decode.activations == 4 * (3 * (2 * 32 + 3 * 64) + 2 * 3 * 96)
    long = memory_model(shape, None, 1, 100_000, 100_000, FP32, tied=False)
    assert long.activations == 4 * (16384 * (2 * 32 + 3 * 64) + 2 * 96)  # a prompt goes through in chunks


def demand() -> Demand:
    shape = ModelShape.from_config(tiny_model().config)
    plans = [tiny_plan()] * 2
    return Demand(shape, plans, FP32, tied=False, loaded=False, shared_cache=True, prefills=True)


def test_sides_share_weights_and_may_share_the_cache() -> None:
    one = demand()
    alone = memory_model(one.shape, None, 2, 10, 14, FP32, tied=False)
    routers = 2 * routers_bytes(one.shape, tiny_plan())
    assert one.needed(2, 10, 14) == alone.weights + routers + alone.cache + 3 * alone.activations
    own = dataclasses.replace(one, shared_cache=False)
    assert own.needed(2, 10, 14) - one.needed(2, 10, 14) == 2 * alone.cache
    loaded = dataclasses.replace(one, loaded=True)
    assert loaded.needed(2, 10, 14) == alone.cache + 3 * alone.activations


def test_what_does_not_fit_is_refused_with_the_largest_batch_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    one, cpu = demand(), torch.device("cpu")
    free = int(one.needed(5, 10, 14) / 0.9) + 10
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    one.check(5, 10, 14, cpu)
    with pytest.raises(UsageError, match=r"batch 6 with 14 tokens each .* largest batch that fits is 5$"):
        one.check(6, 10, 14, cpu)
    with pytest.raises(UsageError, match=r"largest batch that fits is 5$"):
        one.check(10_000, 10, 14, cpu)
    with pytest.raises(UsageError, match="not even a batch of 1 fits; shorten the prompt"):
        one.check(6, 1000, 1400, cpu)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    with pytest.raises(UsageError, match="not even the weights fit"):
        one.check(1, 1, 2, cpu)
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    one.check(10_000, 10, 14, cpu)  # the system does not tell

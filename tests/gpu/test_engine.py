"""The engine on a GPU: graphs equal plain calls, groups nobody runs are never read, bf16 stays near the fp32 path."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import wide_kernels as wk
from tiny_models import random_ids, shake_routers, tiny_model
from widecli.engine import layer as engine_layer
from widecli.engine.generate import generate, open_session
from widecli.engine.model import InferenceModel
from widecli.engine.routing import RandomMasks
from widecli.model.plan import CompensationPlan, RoutingPlan
from widecli.model.routed import RoutedModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
PLAN = RoutingPlan(attention_group_size=4, ffn_group_size=64, rank=16)
COMPENSATED = dataclasses.replace(PLAN, compensation=CompensationPlan(rank=32))
LAYERS = dataclasses.replace(COMPENSATED, mode="layer")
PLANS = {"routed": PLAN, "compensated": COMPENSATED, "layers": LAYERS}


def big_enough(dtype: torch.dtype, family: str = "llama") -> Any:
    """A model whose sizes the kernels take: head_dim 32, groups of 64 channels."""
    return tiny_model(family, **{**SIZES, "initializer_range": 0.08, "max_position_embeddings": 256}).to("cuda", dtype)


def routed_model(
    dtype: torch.dtype, family: str = "llama", plan: RoutingPlan = PLAN
) -> tuple[RoutedModel, InferenceModel]:
    model = big_enough(dtype, family)
    routed = RoutedModel.attach(model, plan)
    shake_routers(routed)
    return routed, engine_of(routed)


def engine_of(routed: RoutedModel) -> InferenceModel:
    return InferenceModel.from_routed(routed.backbone, routed.plan, routed.routers, compensations=routed.compensations)


@pytest.fixture(params=["dense", *PLANS])
def engine(request: pytest.FixtureRequest) -> InferenceModel:
    if request.param == "dense":
        return InferenceModel.from_dense(big_enough(torch.bfloat16))
    return routed_model(torch.bfloat16, plan=PLANS[request.param])[1]


def test_dense_rows_of_the_library_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = big_enough(torch.float32)
    ids = random_ids(1, 30).cuda()
    found, products = [], []
    real = wk.gemm_mn
    monkeypatch.setattr(wk, "gemm_mn", lambda *args, **kwargs: products.append(1) or real(*args, **kwargs))
    for library in (False, True):
        session = InferenceModel.from_dense(model, library=library).session(1, 64)
        found.append([session.prefill(ids).clone(), *(session.decode().clone() for _ in range(5))])
        assert bool(products) != library
        products.clear()
    for own, theirs in zip(*found, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 3])
def test_replayed_graphs_give_what_plain_calls_give(engine: InferenceModel, batch: int) -> None:
    ids, following = random_ids(batch, 40).cuda(), random_ids(batch, 12, seed=5).cuda()
    found: list[list[Tensor]] = []
    rates = []
    for graphs in (False, True):
        session = engine.session(batch, 64, graphs=graphs)
        session.record_prefill(40)
        session.record_prefill(40, ragged=True)
        steps = []
        for lengths in (None, [40, 3, 17][-batch:]):
            steps.append(session.prefill(ids, lengths).clone())
            steps += [session.decode(following[:, t]).clone() for t in range(12)]
        found.append(steps)
        if trace := session.skipped():
            assert trace.tokens == batch * 40 + sum([40, 3, 17][-batch:]) + 2 * batch * 12
            rates.append(trace.skip_rate())
    assert not rates or rates[0] == rates[1]
    for plain, replayed in zip(*found, strict=True):
        assert torch.equal(replayed, plain)


def test_greedy_goes_on_by_itself_without_the_host(engine: InferenceModel) -> None:
    prompts = [random_ids(1, length, seed=length)[0].tolist() for length in (30, 7)]
    session = open_session(engine, prompts, 20)
    done = generate(session, prompts, 20)
    assert all(len(t) == 20 for t in done.tokens) and done.decode_steps == 19
    again = generate(session, prompts, 20, stop=[done.tokens[0][5], done.tokens[1][5]])
    assert again.finish == ("stop", "stop") and again.decode_steps <= 7


@pytest.mark.parametrize("plan", [PLAN, COMPENSATED], ids=["routed", "compensated"])
def test_no_weight_of_a_group_that_nobody_runs_is_read(plan: RoutingPlan) -> None:
    routed, engine = routed_model(torch.bfloat16, plan=plan)
    for routers in routed.routers.values():
        for router in routers.values():  # type: ignore[attr-defined]
            router.up.bias.data.view(-1, 2)[0] = torch.tensor([-1e6, 1e6])
    for layer in routed.decoder_layers():
        width = PLAN.attention_group_size * 32
        layer.self_attn.q_proj.weight.data[:width] = torch.nan
        layer.self_attn.o_proj.weight.data[:, :width] = torch.nan
        layer.mlp.gate_proj.weight.data[:64] = torch.nan
        layer.mlp.up_proj.weight.data[:64] = torch.nan
        layer.mlp.down_proj.weight.data[:, :64] = torch.nan
    session = engine.session(2, 160)
    assert session.prefill(random_ids(2, 150)).isfinite().all()
    assert session.decode().isfinite().all()


@pytest.mark.parametrize("batch", [1, 2])  # one row has launches of its own, which overlap
@pytest.mark.parametrize("plan", [None, *PLANS.values()], ids=["dense", *PLANS])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "smollm3"])
def test_fp32_agrees_with_the_hugging_face_path(family: str, plan: RoutingPlan | None, batch: int) -> None:
    if plan is not None:
        attached, engine = routed_model(torch.float32, family, plan)
        model: Any = attached.backbone
    else:
        model = big_enough(torch.float32, family)
        engine = InferenceModel.from_dense(model)
    ids = random_ids(batch, 50).cuda()
    with torch.no_grad():
        expected = model(ids).logits
    session = engine.session(batch, 64)
    # a flipped decision would move logits of size 5 by far more; kernels may multiply fp32 in three bf16 parts
    torch.testing.assert_close(session.prefill(ids), expected[:, -1], rtol=0, atol=2e-2)
    session.prefill(ids[:, :20], chunk=8)
    found = torch.stack([session.decode(ids[:, t]).clone() for t in range(20, 50)], 1)
    torch.testing.assert_close(found, expected[:, 20:], rtol=0, atol=2e-2)


@pytest.mark.parametrize("whole", [True, False], ids=["whole inputs", "groups"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_compensated_rows_agree_with_the_hugging_face_path(
    dtype: torch.dtype, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not whole:
        monkeypatch.setattr(engine_layer, "DENSE_PROJECTIONS", range(0))
        monkeypatch.setattr(engine_layer, "NARROW", 0)
    attached, engine = routed_model(dtype, plan=COMPENSATED)
    assert engine.layers[0].projects_whole(600) is whole
    ids = random_ids(3, 200).cuda()
    with torch.no_grad():
        expected = attached.backbone(ids).logits[:, -1]
    session = engine.session(3, 210)
    for recorded in (False, True):
        if recorded:
            session.record_prefill(200)
        found = session.prefill(ids)
        if dtype is torch.float32:
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-2)
        else:  # decisions near a tie flip: on average logits of size 5 move by a small share
            assert (found.float() - expected.float()).abs().mean() < 0.4


def test_compensation_adds_no_launch_to_a_step_of_one_row() -> None:
    def launches(plan: RoutingPlan) -> int:
        session = routed_model(torch.bfloat16, plan=plan)[1].session(1, 64, graphs=False)
        session.prefill(random_ids(1, 8))
        session.decode()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            session.decode()
            torch.cuda.synchronize()
        kernels = [event for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA]
        return len([event for event in kernels if not event.name.startswith("Mem")])

    for mode in ("wide", "layer"):
        plan = dataclasses.replace(PLAN, mode=mode)
        assert launches(dataclasses.replace(plan, compensation=CompensationPlan(rank=32))) == launches(plan) > 10


def test_redrawn_random_masks_reach_a_recorded_graph() -> None:
    routed, _ = routed_model(torch.bfloat16)
    masks = RandomMasks(0.5)
    engine = InferenceModel.from_routed(routed.backbone, PLAN, routed.routers, masks)
    session = engine.session(1, 64)
    session.record_prefill(40)
    first = session.prefill(random_ids(1, 40)).clone()
    masks.redraw(7)
    assert not torch.equal(session.prefill(random_ids(1, 40)), first)

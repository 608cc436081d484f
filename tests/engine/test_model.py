"""What `InferenceModel` takes, refuses, skips and counts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_pairs import Pair, make_pair, padded
from torch import Tensor, nn

from tiny_models import random_ids, save_model_folder, shake_routers, tiny_model, tiny_plan
from widecli.engine import cache, layer
from widecli.engine.model import InferenceModel
from widecli.engine.ranges import RANGES, named_ranges
from widecli.engine.routing import RandomMasks
from widecli.engine.session import PREFILL_CHUNK_TOKENS, prefill_chunks
from widecli.errors import UsageError
from widecli.model import checkpoint
from widecli.model.backbone import load_backbone
from widecli.model.plan import PARTS, CompensationPlan
from widecli.model.routed import Decision, RoutedModel
from widecli.recipe.load import dump, load_text

COMPENSATED = {"compensation": CompensationPlan(rank=8)}


@pytest.mark.parametrize("mode", ["wide", "token", "layer"])
def test_it_counts_what_the_hugging_face_path_counts(mode: str) -> None:
    pair = make_pair(routed=True, plan={"mode": mode})
    prompts = [random_ids(1, length, seed=length)[0] for length in (4, 11)]
    assert pair.routed is not None
    with pair.routed.tracing() as trace:
        for prompt in prompts:
            pair.reference(prompt[None])
    ids, lengths = padded(prompts)
    session = pair.engine.session(2, 20)
    session.prefill(ids, lengths, chunk=3)
    found = session.skipped()
    assert found is not None and found.tokens == trace.tokens == 15
    for part in PARTS:
        assert found.group_rates(part) == trace.group_rates(part)
    session.reset_skipped()
    # the same tokens one at a time; the shorter sequence retires when it has had its own
    session.prefill(ids[:, :1])
    for t in range(1, 11):
        session.active[0] = t < 4
        session.decode(ids[:, t])
    found = session.skipped()
    assert found is not None and found.tokens == 15
    assert found.summary(64) == trace.summary(64)


def test_weights_of_groups_that_nobody_runs_are_not_used() -> None:
    pair = make_pair(routed=True)
    assert pair.routed is not None
    for routers in pair.routed.routers.values():
        for router in routers.values():
            router.up.bias.data.view(-1, 2)[0] = torch.tensor([-1e6, 1e6])  # group 0: never
    ids = random_ids(2, 9)
    session = pair.engine.session(2, 12)
    clean = session.prefill(ids).clone(), session.decode(ids[:, 0]).clone()
    for decoder_layer in pair.model.model.layers:  # the engine multiplies with these very tensors
        decoder_layer.self_attn.q_proj.weight.data[:16] = torch.nan  # 2 heads of 8
        decoder_layer.mlp.gate_proj.weight.data[:16] = torch.nan
        decoder_layer.mlp.up_proj.weight.data[:16] = torch.nan
    poisoned = session.prefill(ids), session.decode(ids[:, 0])
    for found, expected in zip(poisoned, clean, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("batch", "tokens", "chunk", "expected"),
    [
        (2, 9, 4, [(0, 4), (4, 4), (8, 1)]),
        (2, 8, 4, [(0, 4), (4, 4)]),
        (2, 3, 4, [(0, 3)]),
        (1, PREFILL_CHUNK_TOKENS, None, [(0, PREFILL_CHUNK_TOKENS)]),
        (4, 5000, None, [(0, 4096), (4096, 904)]),
        (PREFILL_CHUNK_TOKENS + 1, 2, None, [(0, 1), (1, 1)]),  # more sequences than a chunk has tokens
    ],
)
def test_chunks_of_a_prefill_cover_every_token_once(
    batch: int, tokens: int, chunk: int | None, expected: list[tuple[int, int]]
) -> None:
    assert prefill_chunks(batch, tokens, chunk) == expected


@pytest.mark.parametrize("chunk", [0, -3])
def test_a_chunk_of_no_tokens_is_refused(chunk: int) -> None:
    with pytest.raises(UsageError, match=f"a chunk must have at least 1 token, got {chunk}"):
        make_pair(routed=False).engine.session(1, 8).prefill(random_ids(1, 4), chunk=chunk)


@pytest.mark.parametrize("plan", [{}, COMPENSATED], ids=["routed", "compensated"])
def test_whole_projections_of_some_hundred_rows_give_what_routed_ones_give(
    plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 x 80 rows, padding among them; then once more with every projection routed."""
    pair = make_pair(routed=True, plan=plan, max_position_embeddings=128)
    ids, lengths = padded([random_ids(1, length, seed=length)[0] for length in (80, 71)])
    assert ids.numel() in layer.DENSE_PROJECTIONS
    whole = pair.engine.session(2, 100).prefill(ids, lengths)
    monkeypatch.setattr(layer, "DENSE_PROJECTIONS", range(10**6, 10**6))
    torch.testing.assert_close(whole, pair.engine.session(2, 100).prefill(ids, lengths), rtol=1e-4, atol=1e-5)


def test_whole_projections_take_few_rows_or_narrow_models_and_finite_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair(routed=True)
    weights = pair.engine.weights
    assert [rows for rows in (128, 129, 1024, 4096) if layer.Layer(0, weights).projects_whole(rows)] == [
        129,
        1024,
        4096,
    ]
    monkeypatch.setattr(layer, "NARROW", 32)  # its hidden size
    assert [rows for rows in (128, 129, 1024, 4096) if layer.Layer(0, weights).projects_whole(rows)] == [129, 1024]
    pair.model.model.layers[0].mlp.down_proj.weight.data[:, :16] = torch.inf
    pair.model.model.layers[1].self_attn.o_proj.weight.data[0, 0] = torch.nan
    assert not any(layer.Layer(index, weights).projects_whole(160) for index in (0, 1))


def test_the_hugging_face_model_goes_on_working_on_the_same_memory() -> None:
    model = tiny_model("qwen2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = InferenceModel.from_dense(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    attention, fused = model.model.layers[0].self_attn, engine.weights.layers[0].qkv
    for module in (attention.q_proj, attention.k_proj, attention.v_proj):
        assert module.weight.untyped_storage().data_ptr() == fused.weight.untyped_storage().data_ptr()
        assert module.bias.untyped_storage().data_ptr() == fused.bias.untyped_storage().data_ptr()


def test_random_masks_skip_their_share_whatever_the_routers_say() -> None:
    pair = make_pair(routed=True)
    assert pair.routed is not None
    masks = RandomMasks(0.75, seed=3)
    engine = InferenceModel.from_routed(pair.model, pair.routed.plan, pair.routed.routers, masks)
    session = engine.session(8, 64)
    first = session.prefill(random_ids(8, 60)).clone()
    trace = session.skipped()
    assert trace is not None
    assert trace.skip_rate().mean == pytest.approx(0.75, abs=0.002)
    assert torch.equal(session.prefill(random_ids(8, 60)), first), "the same masks again"
    masks.redraw(4)
    assert not torch.equal(session.prefill(random_ids(8, 60)), first)


@pytest.mark.parametrize("mode", ["wide", "token", "layer"])
def test_what_is_added_follows_the_masks_that_decide(mode: str) -> None:
    pair = make_pair(routed=True, plan=COMPENSATED | {"mode": mode})
    assert pair.routed is not None
    masks = RandomMasks(0.5, seed=3)
    routed = pair.routed
    modules = {"masks": masks, "compensations": routed.compensations}
    engine = InferenceModel.from_routed(pair.model, routed.plan, routed.routers, **modules)
    found = engine.session(1, 9).prefill(random_ids(1, 9))
    for index, decision in enumerate(dict.fromkeys(routed.decisions.values())):

        def take(x: Tensor, index: int = index, decision: Decision = decision) -> None:
            learned = torch.empty(9, decision.router.groups, dtype=torch.bool)
            decision.mask = masks.take(index, learned)[None]

        decision.take = take  # type: ignore[method-assign]
    torch.testing.assert_close(found, pair.reference(random_ids(1, 9))[:, -1], rtol=0, atol=1e-4)


def test_weights_of_what_is_added_are_cast_once_and_the_norm_is_in_the_bypass() -> None:
    pair = make_pair(routed=True, plan=COMPENSATED, dtype=torch.bfloat16)
    assert pair.routed is not None
    made = pair.routed.compensations["0"]["ffn"]  # type: ignore[index]
    stand_in = pair.engine.layers[0].stand_ins["ffn"]
    assert stand_in.standing.dtype is torch.bfloat16 and stand_in.standing.shape == (32, 16)
    assert torch.equal(stand_in.standing[:, :4], made.mean.t().bfloat16())
    assert torch.equal(stand_in.standing[:, 4:12], made.up.bfloat16())
    norm = pair.engine.weights.layers[0].ffn_norm.weight
    decision = pair.engine.layers[0].ffn
    assert decision is not None and decision.bypass is not None
    assert torch.equal(decision.bypass, (made.down * norm.float()).bfloat16())


def test_a_plan_that_compensates_needs_something_to_do_it_with() -> None:
    routed = make_pair(routed=True, plan=COMPENSATED).routed
    assert routed is not None
    for missing in (None, torch.nn.ModuleDict()):
        with pytest.raises(UsageError, match=r"means and rank 8\), and there is nothing.*hand in the compensations"):
            InferenceModel.from_routed(routed.backbone, routed.plan, routed.routers, compensations=missing)


def test_a_part_without_compensation_adds_nothing() -> None:
    pair = make_pair(routed=True, plan=COMPENSATED)
    assert pair.routed is not None
    del pair.routed.compensations["0"]["attention"], pair.routed.compensations["1"]  # type: ignore[attr-defined]
    with torch.no_grad():
        for key in ((0, "attention"), (1, "attention"), (1, "ffn")):
            for parameter in pair.routed.substitutes[key].compensation.parameters():  # type: ignore[index]
                parameter.zero_()  # the reference still has it
    engine = Pair(pair.model, pair.routed).engine
    ids = random_ids(2, 9)
    torch.testing.assert_close(engine.session(2, 9).prefill(ids), pair.reference(ids)[:, -1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("plan", [{}, COMPENSATED], ids=["routed", "compensated"])
def test_nothing_skipped_is_the_dense_model(plan: dict[str, Any]) -> None:
    pair = make_pair(routed=True, plan=plan)
    assert pair.routed is not None
    modules = {"masks": RandomMasks(0.0), "compensations": pair.routed.compensations}
    engine = InferenceModel.from_routed(pair.model, pair.routed.plan, pair.routed.routers, **modules)
    ids = random_ids(2, 9)
    with pair.routed.dense():
        expected = pair.reference(ids)[:, -1]
    torch.testing.assert_close(engine.session(2, 9).prefill(ids), expected, rtol=0, atol=1e-4)


def test_a_sliding_window_bounds_what_may_be_asked_for() -> None:
    model = InferenceModel.from_dense(tiny_model("mistral", sliding_window=5))
    assert model.max_tokens == 5
    with pytest.raises(UsageError, match=r"sliding window of 5.*at most 5 tokens"):
        model.session(1, 6)
    assert InferenceModel.from_dense(tiny_model("mistral", sliding_window=None)).max_tokens == 128
    qwen = tiny_model("qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=1)
    assert InferenceModel.from_dense(qwen).max_tokens == 7
    assert InferenceModel.from_dense(tiny_model("qwen2", sliding_window=7)).max_tokens == 128, "not in use"


def test_more_than_the_model_is_made_for_is_refused() -> None:
    model = InferenceModel.from_dense(tiny_model())
    with pytest.raises(UsageError, match=r"129 tokens.*128"):
        model.session(1, 129)
    with pytest.raises(UsageError, match=r"at least one sequence"):
        model.session(0, 5)
    with pytest.raises(UsageError, match=r"need a GPU"):
        model.session(1, 5, graphs=True)


def test_a_cache_that_does_not_fit_is_refused_with_the_largest_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model = InferenceModel.from_dense(tiny_model())
    token = cache.cache_bytes(model.shape, 1, 1, torch.float32)
    assert token == 2 * 2 * 2 * 8 * 4  # keys and values of 2 layers, 2 KV heads of 8, fp32
    monkeypatch.setattr(cache, "free_bytes", lambda device: int(token * 200 / 0.9) + 1)
    model.session(2, 100)
    with pytest.raises(UsageError, match=r"3 sequences of 100.*2 sequences of 100 tokens or 66 tokens for each of 3"):
        model.session(3, 100)


def test_frequencies_that_depend_on_the_length_are_refused_beyond_the_original_one() -> None:
    settings = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}
    pair = make_pair(routed=False, rope_parameters=settings, max_position_embeddings=32)
    ids = random_ids(1, 20)
    torch.testing.assert_close(pair.engine.session(1, 32).prefill(ids), pair.reference(ids)[:, -1], rtol=0, atol=1e-4)
    pair.model.config.max_position_embeddings = 16
    with pytest.raises(UsageError, match=r"'dynamic'.*beyond 16.*32 were asked for"):
        pair.engine.session(1, 32)


def test_layers_that_are_not_plain_are_refused_by_name() -> None:
    model = tiny_model()
    model.model.layers[1].mlp.down_proj = nn.Sequential(model.model.layers[1].mlp.down_proj)
    with pytest.raises(UsageError, match=r"mlp.down_proj, found Sequential"):
        InferenceModel.from_dense(model)
    with pytest.raises(UsageError, match=r"no activation 'tanh'"):
        InferenceModel.from_dense(tiny_model(hidden_act="tanh"))


def test_prompts_that_do_not_suit_the_session_are_refused() -> None:
    session = InferenceModel.from_dense(tiny_model()).session(2, 8)
    with pytest.raises(UsageError, match=r"serves 2 sequences, got 1"):
        session.prefill(random_ids(1, 4))
    with pytest.raises(UsageError, match=r"1 to 4 tokens, got 0 to 4"):
        session.prefill(random_ids(2, 4), [0, 4])
    with pytest.raises(UsageError, match=r"9 tokens and the cache holds 8"):
        session.prefill(random_ids(2, 9))
    session.prefill(random_ids(2, 7))
    session.decode()
    with pytest.raises(UsageError, match=r"the cache is full: 8 tokens"):
        session.decode()


def test_a_profiler_sees_the_parts_of_a_step() -> None:
    session = make_pair(routed=True).engine.session(1, 8)
    session.prefill(random_ids(1, 4))
    with named_ranges(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        session.decode()
    counts = {e.key: e.count for e in profile.key_averages() if e.key.startswith("wide::")}
    assert set(counts) == {f"wide::{name}" for name in RANGES}
    assert counts["wide::norm_route"] == 4 and counts["wide::down"] == 2 and counts["wide::lm_head"] == 1


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder and a checkpoint of it, in `model/` and `checkpoint/`."""
    folder = tmp_path_factory.mktemp("stored")
    recipe = load_text(f"model: {{name: {save_model_folder(folder / 'model')}}}")
    backbone = load_backbone(recipe.model)
    routed = RoutedModel.attach(backbone.model, tiny_plan())
    shake_routers(routed)
    config = checkpoint.CheckpointConfig(backbone.identity, tiny_plan(), 3, "12345678", {})
    checkpoint.save(folder / "checkpoint", routed.routers, config, dump(recipe))
    return folder


def test_a_checkpoint_is_all_it_needs(stored: Path) -> None:
    engine = InferenceModel.from_checkpoint(stored / "checkpoint")
    assert engine.backbone is not None and engine.plan == tiny_plan()
    ids = random_ids(2, 9)
    logits = engine.session(2, 9).prefill(ids)
    routed = RoutedModel.attach(engine.backbone.model, tiny_plan())
    dense = InferenceModel.from_checkpoint(stored / "checkpoint", dense=True)
    with torch.no_grad(), routed.dense():
        expected = engine.backbone.model(ids).logits[:, -1]
    torch.testing.assert_close(dense.session(2, 9).prefill(ids), expected, rtol=0, atol=1e-4)
    checkpoint.load_routers(stored / "checkpoint", routed.routers)
    with torch.no_grad():
        expected = engine.backbone.model(ids).logits[:, -1]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert dense.plan is None and dense.session(1, 4).skipped() is None


def test_a_checkpoint_of_another_model_or_without_its_routers_is_refused(stored: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(stored / "checkpoint", tmp_path / "broken")
    config = json.loads((broken / "wide_config.json").read_text())
    config["backbone"]["weights_hash"] = "0" * 8
    (broken / "wide_config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"another model"):
        InferenceModel.from_checkpoint(broken)
    shutil.copy(stored / "checkpoint" / "wide_config.json", broken)
    (broken / "router.safetensors").unlink()
    with pytest.raises(UsageError, match=r"router.safetensors cannot be read"):
        InferenceModel.from_checkpoint(broken)
    (broken / "recipe.yaml").unlink()
    with pytest.raises(UsageError, match=r"lacks its recipe.yaml"):
        InferenceModel.from_checkpoint(broken)

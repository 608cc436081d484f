from __future__ import annotations

from typing import Any

import pytest
import torch
from routed_reference import slow_forward
from torch import Tensor

from tiny_models import FAMILIES, random_ids, shake_routers, tiny_model, tiny_plan, tiny_routed
from widecli.model.gate import Gumbel, logistic_noise
from widecli.model.plan import LayerOverride
from widecli.model.routed import RoutedModel, mask_groups
from widecli.model.trace import RoutingTrace


def masks_of(trace: RoutingTrace) -> dict[tuple[int, str], Tensor]:
    """All decisions of a trace, in the order of its passes: [tokens, groups] by layer and part."""
    assert trace.masks is not None
    return {key: torch.cat(parts) for key, parts in trace.masks.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_routed_logits_and_decisions_equal_a_slow_independent_model(family: str) -> None:
    routed = tiny_routed(family)
    model: Any = routed.backbone
    ids = random_ids(1, 12)
    with torch.no_grad(), routed.tracing(keep_masks=True) as trace:
        logits = model(input_ids=ids).logits[0]
    slow = slow_forward(
        model.config,
        model.state_dict(),
        routed.routers.state_dict(),
        ids[0].tolist(),
        heads_a_group=2,
        channels_a_group=16,
    )
    assert slow.margin > 1e-4, "a decision is too close for fp32: take another seed"
    for key, mask in masks_of(trace).items():
        assert mask.tolist() == slow.executed[key]
    skipped = [bit for rows in slow.executed.values() for row in rows for bit in row]
    assert 0.2 < sum(skipped) / len(skipped) < 0.8, "the test would hold for a model that routes nothing"
    torch.testing.assert_close(logits.double(), slow.logits, rtol=1e-4, atol=1e-4)


def test_attention_groups_smaller_than_a_kv_group_mask_single_heads() -> None:
    model = tiny_model()
    routed = RoutedModel.attach(model, tiny_plan(attention_group_size=1, ffn_group_size=32))
    shake_routers(routed)
    ids = random_ids(1, 9)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0]
    slow = slow_forward(
        model.config,
        model.state_dict(),
        routed.routers.state_dict(),
        ids[0].tolist(),
        heads_a_group=1,
        channels_a_group=32,
    )
    assert slow.margin > 1e-4
    torch.testing.assert_close(logits.double(), slow.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_left_padded_batch_routes_as_single_sequences(family: str) -> None:
    routed = tiny_routed(family)
    model: Any = routed.backbone
    lengths = [4, 9, 12]
    rows = [random_ids(1, n, seed=n)[0] for n in lengths]
    width = max(lengths)
    ids = torch.stack([torch.cat([torch.ones(width - len(r), dtype=torch.long), r]) for r in rows])
    mask = torch.stack([torch.arange(width) >= width - n for n in lengths]).long()
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad(), routed.tracing(keep_masks=True) as together:
        batched = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    start = 0
    for row, length in enumerate(lengths):
        with torch.no_grad(), routed.tracing(keep_masks=True) as alone:
            single = model(input_ids=rows[row][None]).logits[0]
        torch.testing.assert_close(batched[row, width - length :], single, rtol=1e-4, atol=1e-4)
        for key, decided in masks_of(alone).items():
            assert torch.equal(masks_of(together)[key][start : start + length], decided)
        start += length


def test_right_padding_changes_nothing_before_it() -> None:
    routed = tiny_routed()
    model: Any = routed.backbone
    row = random_ids(1, 7)
    padded = torch.cat([row, torch.ones(1, 5, dtype=torch.long)], 1)
    mask = torch.tensor([[1] * 7 + [0] * 5])
    with torch.no_grad(), routed.tracing() as with_padding:
        batched = model(input_ids=padded, attention_mask=mask).logits[:, :7]
    with torch.no_grad(), routed.tracing() as without:
        single = model(input_ids=row).logits
    torch.testing.assert_close(batched, single, rtol=1e-5, atol=1e-5)
    assert with_padding.tokens == without.tokens == 7
    assert with_padding.skip_rate() == without.skip_rate()


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_generation_with_a_cache_decides_as_one_full_forward(family: str) -> None:
    routed = tiny_routed(family)
    model: Any = routed.backbone
    prompt = random_ids(1, 6)
    with routed.tracing(keep_masks=True) as step_by_step:
        generated = model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=1)
    assert generated.shape[1] == 14
    with torch.no_grad(), routed.tracing(keep_masks=True) as at_once:
        logits = model(input_ids=generated).logits[0]
    assert generated[0, 6:].tolist() == logits[5:-1].argmax(-1).tolist()
    assert step_by_step.tokens == 13  # the last token is never fed back
    for key, decided in masks_of(at_once).items():
        assert torch.equal(masks_of(step_by_step)[key], decided[:-1])


def test_generation_from_a_left_padded_batch_equals_single_prompts() -> None:
    routed = tiny_routed()
    model: Any = routed.backbone
    rows = [random_ids(1, n, seed=n)[0] for n in (3, 8)]
    ids = torch.stack([torch.cat([torch.ones(8 - len(r), dtype=torch.long), r]) for r in rows])
    mask = torch.stack([torch.arange(8) >= 8 - len(r) for r in rows]).long()
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    with routed.tracing() as trace:
        batched = model.generate(ids, attention_mask=mask, **settings)
    for row, prompt in enumerate(rows):
        alone = model.generate(prompt[None], **settings)
        assert batched[row, 8:].tolist() == alone[0, len(prompt) :].tolist()
    assert trace.tokens == 3 + 8 + 2 * 5  # padding is left out of the prefill; decoding adds one token a row


def test_skip_rates_exclude_padding() -> None:
    routed = tiny_routed()
    model: Any = routed.backbone
    ids = random_ids(2, 10)
    mask = torch.tensor([[1] * 10, [0] * 6 + [1] * 4])
    with torch.no_grad(), routed.tracing(keep_masks=True) as trace:
        model(input_ids=ids, attention_mask=mask)
    assert trace.tokens == 14
    for (layer, part), kept in masks_of(trace).items():
        assert kept.shape[0] == 14
        assert trace.layer_rates(part)[layer].item() == pytest.approx(1 - kept.float().mean().item(), abs=1e-6)
    with torch.no_grad(), routed.tracing() as unmasked:
        model(input_ids=ids)
    assert unmasked.skip_rate().mean != trace.skip_rate().mean, "the padding would not have mattered"


def test_argmax_in_inference_is_repeatable_and_ignores_the_random_state() -> None:
    routed = tiny_routed()
    model: Any = routed.backbone
    ids = random_ids(2, 8)
    with torch.no_grad():
        torch.manual_seed(1)
        first = model(input_ids=ids).logits
        torch.manual_seed(2)
        second = model(input_ids=ids).logits
    assert torch.equal(first, second)


def test_a_cleared_gate_decides_by_argmax_again() -> None:
    routed = tiny_routed()
    model: Any = routed.backbone
    ids = random_ids(1, 8)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        noise = logistic_noise(0, 0, [0], 8, routed.total_groups, torch.device("cpu"))
        routed.set_gate(Gumbel(torch.tensor(1.0), noise))
        noisy = model(input_ids=ids).logits
        routed.set_gate(None)
        after = model(input_ids=ids).logits
    assert not torch.equal(before, noisy)
    assert torch.equal(before, after)


def test_training_gate_without_noise_is_the_argmax_gate() -> None:
    routed = tiny_routed()
    model: Any = routed.backbone
    ids = random_ids(2, 8)
    with torch.no_grad():
        inference = model(input_ids=ids).logits
        routed.set_gate(Gumbel(torch.tensor(0.7), torch.zeros(2, 8, routed.total_groups)))
        training = model(input_ids=ids).logits
    torch.testing.assert_close(training, inference, rtol=1e-5, atol=1e-5)


def test_each_decision_reads_its_own_slice_of_the_noise() -> None:
    """Overwhelming noise in one decision's slice forces that decision and no other."""
    routed = tiny_routed()
    model: Any = routed.backbone
    ids = random_ids(1, 5)
    widths = [(key, d.router.groups) for key, d in routed.decisions.items()]
    assert sum(w for _, w in widths) == routed.total_groups == 12
    start = 0
    for key, width in widths:
        noise = torch.full((1, 5, routed.total_groups), 1e6)
        noise[..., start : start + width] = -1e6
        routed.set_gate(Gumbel(torch.tensor(1.0), noise))
        with torch.no_grad(), routed.tracing() as trace:
            model(input_ids=ids)
        for layer in range(2):
            for part in ("attention", "ffn"):
                assert trace.layer_rates(part)[layer].item() == (1.0 if (layer, part) == key else 0.0)
        start += width


def test_dense_block_and_detach_give_the_backbone_back() -> None:
    model = tiny_model()
    ids = random_ids(1, 8)
    with torch.no_grad():
        dense = model(input_ids=ids).logits
        names = list(model.state_dict())
        routed = RoutedModel.attach(model, tiny_plan())
        shake_routers(routed)
        assert list(model.state_dict()) == names, "routers must not become parameters of the backbone"
        assert not torch.equal(model(input_ids=ids).logits, dense)
        with routed.dense():
            assert torch.equal(model(input_ids=ids).logits, dense)
        assert not torch.equal(model(input_ids=ids).logits, dense)
        routed.detach()
        assert torch.equal(model(input_ids=ids).logits, dense)
    RoutedModel.attach(model, tiny_plan()).detach()


def test_attaching_twice_is_refused() -> None:
    model = tiny_model()
    RoutedModel.attach(model, tiny_plan())
    with pytest.raises(RuntimeError, match="already carries routers"):
        RoutedModel.attach(model, tiny_plan())


def test_layer_mode_skips_both_parts_with_one_decision() -> None:
    routed = tiny_routed(mode="layer")
    assert sorted(routed.routers.state_dict()) == sorted(
        f"{layer}.shared.{name}" for layer in (0, 1) for name in ("down.weight", "down.bias", "up.weight", "up.bias")
    )
    model: Any = routed.backbone
    ids = random_ids(2, 10)
    with torch.no_grad(), routed.tracing(keep_masks=True) as trace:
        model(input_ids=ids)
    masks = masks_of(trace)
    for layer in (0, 1):
        assert torch.equal(masks[layer, "attention"], masks[layer, "ffn"])
    assert trace.skip_rate().attention == trace.skip_rate().ffn


@pytest.mark.parametrize("mode", ["token", "layer"])
def test_skipping_a_whole_layer_leaves_the_residual_as_it_was(mode: str) -> None:
    routed = tiny_routed(mode=mode)
    model: Any = routed.backbone
    with torch.no_grad():
        for decision in routed.decisions.values():
            for parameter in decision.router.parameters():
                parameter.zero_()
            decision.router.up.bias[1] = 1.0
        hidden = model.model(input_ids=random_ids(1, 5), output_hidden_states=True).hidden_states
    assert torch.equal(hidden[0], hidden[1])


def test_equal_logits_execute() -> None:
    """A router of zeros decides nothing: the model must then run dense."""
    routed = tiny_routed()
    model: Any = routed.backbone
    ids = random_ids(1, 6)
    with torch.no_grad():
        for parameter in routed.parameters():
            parameter.zero_()
        logits = model(input_ids=ids).logits
        with routed.dense():
            assert torch.equal(model(input_ids=ids).logits, logits)


def test_overridden_layers_have_no_router_and_run_dense() -> None:
    routed = tiny_routed(overrides={0: LayerOverride(parts="none"), 1: LayerOverride(parts="ffn", ffn_group_size=32)})
    assert {key.rsplit(".", 2)[0] for key in routed.routers.state_dict()} == {"1.ffn"}
    assert routed.total_groups == 2
    model: Any = routed.backbone
    with torch.no_grad(), routed.tracing() as trace:
        model(input_ids=random_ids(1, 6))
    assert trace.layer_rates("ffn")[0].item() == 0
    assert trace.layer_rates("ffn")[1].item() > 0
    assert trace.skip_rate().attention is None


def test_mask_groups_drops_what_is_not_finite_in_a_skipped_group() -> None:
    x = torch.tensor([[1.0, 2.0, float("nan"), float("inf")]])
    assert mask_groups(x, torch.tensor([[True, False]])).tolist() == [[1.0, 2.0, 0.0, 0.0]]


def test_mask_groups_multiplies_float_masks_group_by_group() -> None:
    x = torch.arange(1.0, 7.0).reshape(1, 6)
    assert mask_groups(x, torch.tensor([[0.0, 1.0, 0.0]])).tolist() == [[0, 0, 3, 4, 0, 0]]


def test_saving_a_routed_backbone_writes_the_plain_model(tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    routed = tiny_routed()
    model: Any = routed.backbone
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert list(again.state_dict()) == list(model.state_dict())
    ids = random_ids(1, 6)
    with torch.no_grad(), routed.dense():
        torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits)

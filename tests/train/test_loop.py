from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_models import VOCABULARY, random_ids, tiny_model, tiny_plan
from widecli.errors import WideError
from widecli.model.budget import Budget
from widecli.model.routed import RoutedModel
from widecli.recipe.schema import TrainSection
from widecli.train.loop import Trainer

BUDGET = Budget("rate", 0.9)


def padded_fetch(step: int, rows: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Sequences of different lengths; padding is the end token 1, and the mask goes by length."""
    ids = torch.stack([random_ids(1, 10, seed=100 * step + row)[0] for row in rows])
    lengths = torch.tensor([10 - (row * 3) % 8 for row in rows])
    valid = torch.arange(10)[None] < lengths[:, None]
    return ids.masked_fill(~valid, 1), valid


def plain_fetch(step: int, rows: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    return torch.stack([random_ids(1, 10, seed=100 * step + row)[0] for row in rows]), None


def trainer(
    fetch: Any = plain_fetch, budget: Budget = BUDGET, model: Any = None, plan: Any = None, **train: Any
) -> Trainer:
    routed = RoutedModel.attach(model or tiny_model(), plan or tiny_plan(), seed=0)
    settings = TrainSection(**{"steps": 6, "batch_size": 4, "compile": False, "learning_rate": 1e-2, **train})
    return Trainer(routed, budget, settings, fetch, 10)


def values(made: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in made.parameters.items()}


@pytest.mark.parametrize("fetch", [plain_fetch, padded_fetch])
def test_steps_do_not_depend_on_the_micro_batch(fetch: Any) -> None:
    """The target is far above any rate seen, so that every micro-batch pulls the same way."""
    whole, cut = trainer(fetch, micro_batch_size=4), trainer(fetch, micro_batch_size=1)
    for one, other in zip(whole.run(0, 3), cut.run(0, 3), strict=True):
        assert one.lm_loss == pytest.approx(other.lm_loss, rel=1e-5)
        assert one.budget_distance == pytest.approx(other.budget_distance, rel=1e-5)
        assert one.skip_ffn == pytest.approx(other.skip_ffn, rel=1e-5)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
    for name, value in values(whole).items():
        torch.testing.assert_close(values(cut)[name], value, rtol=1e-3, atol=1e-4)


def test_the_loss_is_a_mean_over_the_predictions_of_the_whole_batch() -> None:
    """Not a mean of means: rows of different length must weigh by their tokens."""
    from widecli.model.gate import Gumbel, logistic_noise

    made = trainer(padded_fetch, micro_batch_size=1)
    first = next(iter(made.run(0, 1)))
    again = trainer(padded_fetch)
    ids, valid = padded_fetch(0, range(4))
    assert valid is not None
    noise = logistic_noise(0, 0, range(4), 10, again.routed.total_groups, torch.device("cpu"))
    again.routed.set_gate(Gumbel(torch.tensor(5.0), noise))
    backbone: Any = again.routed.backbone
    with torch.no_grad(), again.routed.tracing() as trace:
        logits = backbone(input_ids=ids, attention_mask=valid).logits
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    counted = (valid[:, :-1] & valid[:, 1:]).flatten()
    assert first.lm_loss == pytest.approx(losses[counted].mean().item(), rel=1e-5)
    assert first.skip_attention == pytest.approx(trace.skip_rate().attention, rel=1e-5)


@pytest.mark.parametrize("plan", [{}, {"mode": "layer"}, {"mode": "token"}, {"parts": "ffn"}, {"tap": "normalised"}])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_reach_every_router(plan: dict[str, Any], checkpointing: bool) -> None:
    made = trainer(plan=tiny_plan(**plan), activation_checkpointing=checkpointing)
    seen: dict[str, Tensor] = {}
    for name, parameter in made.parameters.items():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: p.grad.clone()}))
    next(iter(made.run(0, 1)))
    assert seen.keys() == made.parameters.keys()
    assert all(bool(g.any()) and bool(g.isfinite().all()) for g in seen.values())


def test_activation_checkpointing_recomputes_with_the_same_noise() -> None:
    plain, recomputed = trainer(), trainer(activation_checkpointing=True)
    for one, other in zip(plain.run(0, 3), recomputed.run(0, 3), strict=True):
        assert one.lm_loss == pytest.approx(other.lm_loss, rel=1e-6)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
    for name, value in values(plain).items():
        torch.testing.assert_close(values(recomputed)[name], value)


@pytest.mark.slow
def test_compiled_layers_train_as_eager_ones() -> None:
    import shutil

    if shutil.which("g++") is None and shutil.which("c++") is None:
        pytest.skip("torch.compile on a CPU needs a C++ compiler")
    eager, compiled = trainer(), trainer(compile=True)
    for one, other in zip(eager.run(0, 2), compiled.run(0, 2), strict=True):
        assert one.lm_loss == pytest.approx(other.lm_loss, rel=1e-4)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-3)
    for name, value in values(eager).items():
        torch.testing.assert_close(values(compiled)[name], value, rtol=1e-2, atol=1e-3)


def test_only_the_routers_change() -> None:
    model = tiny_model()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    made = trainer(model=model)
    start = values(made)
    list(made.run(0, 2))
    assert all(torch.equal(model.state_dict()[name], p) for name, p in before.items())
    assert all(not torch.equal(start[name], value) for name, value in values(made).items())
    assert all(p.grad is None for p in model.parameters())


def test_a_step_is_a_function_of_the_state_and_the_step_number() -> None:
    """2 N steps at once equal N steps and N more in a fresh trainer that got weights and moments, bit for bit."""
    unbroken = trainer(padded_fetch)
    list(unbroken.run(0, 6))
    first = trainer(padded_fetch)
    list(first.run(0, 3))
    second = trainer(padded_fetch)
    with torch.no_grad():
        for name, parameter in second.parameters.items():
            parameter.copy_(first.parameters[name])
            second.optimizer.state[parameter] = {
                key: value.clone() for key, value in first.optimizer.state[first.parameters[name]].items()
            }
    torch.manual_seed(99)  # whatever the process drew in between must not matter
    list(second.run(3, 6))
    assert all(torch.equal(values(unbroken)[name], value) for name, value in values(second).items())


def test_records_follow_the_schedules() -> None:
    records = list(trainer(steps=6, warmup_ratio=0.5, temperature_start=4.0, temperature_end=1.0).run(0, 6))
    assert [r.step for r in records] == [1, 2, 3, 4, 5, 6]
    assert [r.temperature for r in records] == pytest.approx([4.0, 3.4, 2.8, 2.2, 1.6, 1.0])
    assert [r.learning_rate for r in records][:3] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2])
    assert all(r.tokens_per_second > 0 for r in records)


def test_a_record_leaves_out_a_part_that_is_not_routed() -> None:
    record = next(iter(trainer(plan=tiny_plan(parts="attention")).run(0, 1)))
    assert record.skip_ffn is None and record.skip_attention is not None


def test_training_moves_the_skip_rate_to_the_budget() -> None:
    made = trainer(budget=Budget("rate", 0.8), steps=40, learning_rate=2e-2)
    records = list(made.run(0, 40))
    assert abs(records[0].budget_distance) > 0.2
    assert sum(r.budget_distance for r in records[-5:]) / 5 < 0.08


def test_a_loss_that_is_not_finite_stops_with_the_step() -> None:
    made = trainer()
    backbone: Any = made.routed.backbone

    def spoiled(step: int, rows: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        if step == 2:
            backbone.model.norm.weight.fill_(float("nan"))
        return plain_fetch(step, rows)

    made.fetch = spoiled
    done = []
    with pytest.raises(WideError, match=r"not finite at step 3 \(loss nan.*start another run") as caught:
        for record in made.run(0, 6):
            done.append(record.step)
    assert done == [1, 2]
    assert caught.value.exit_code == 1


def test_the_gradient_is_clipped_and_its_norm_before_that_is_reported() -> None:
    made = trainer(max_grad_norm=1e-3)
    record = next(iter(made.run(0, 1)))
    assert record.grad_norm > 1e-3 and math.isfinite(record.grad_norm)


def test_a_broken_graph_is_noticed_in_the_first_step() -> None:
    made = trainer()
    made.parameters["0.ffn.down.weight"].requires_grad_(False)
    with pytest.raises(WideError, match=r"no gradient reached 0\.ffn\.down\.weight \(1 tensors\)"):
        next(iter(made.run(0, 1)))


def test_afterwards_the_backbone_evaluates_and_decides_by_argmax() -> None:
    made = trainer(activation_checkpointing=True)
    backbone: Any = made.routed.backbone
    list(made.run(0, 1))
    assert not backbone.training
    ids = random_ids(3, 7)  # another shape than the noise of training had
    with torch.no_grad():
        assert torch.equal(backbone(input_ids=ids).logits, backbone(input_ids=ids).logits)


def test_the_target_rises_with_the_ramp() -> None:
    made = trainer(budget=Budget("rate", 0.9, start_share=0.5, ramp_ratio=0.5), steps=4)
    targets = [made._budget_at(step).sparsity for step in range(4)]
    assert targets == pytest.approx([0.45, 0.675, 0.9, 0.9])
    record = next(iter(made.run(0, 1)))
    rate = (record.skip_attention + record.skip_ffn) / 2
    assert record.budget_distance == pytest.approx(abs(0.45 - rate), abs=1e-6)


def test_running_out_of_memory_halves_the_micro_batch_and_changes_nothing_else() -> None:
    calm, hungry = (trainer(micro_batch_size=4, scale_features=False) for _ in range(2))

    def refuse(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].shape[0] > 1:
            raise torch.OutOfMemoryError("out of memory")

    hungry.routed.decoder.register_forward_pre_hook(refuse, with_kwargs=True)
    for one, other in zip(calm.run(0, 2), hungry.run(0, 2), strict=True):
        assert one.lm_loss == pytest.approx(other.lm_loss, rel=1e-5)
    assert hungry.micro_batch_size == 1


def test_one_sequence_that_does_not_fit_ends_in_a_sentence() -> None:
    made = trainer(scale_features=False)

    def refuse(module: Any, args: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    made.routed.decoder_layers()[0].register_forward_pre_hook(refuse)
    with pytest.raises(WideError, match="one sequence does not fit"):
        next(iter(made.run(0, 1)))


def test_ids_of_the_tests_fit_the_vocabulary() -> None:
    assert int(random_ids(4, 100).max()) < VOCABULARY


def test_scaled_features_are_undone_afterwards() -> None:
    """Training on scaled features must leave routers that act on bare ones, step by step and at the end."""
    from widecli.model.router import plain_state

    made = trainer(steps=3)
    ids = random_ids(2, 8)
    for _ in made.run(0, 3):
        stored = plain_state(made.routed.routers)
    assert all(torch.equal(stored[name], value) for name, value in made.routed.routers.state_dict().items())
    with torch.no_grad(), made.routed.tracing() as trace:
        made.routed.decoder(input_ids=ids)
    fresh = RoutedModel.attach(tiny_model(), tiny_plan())
    fresh.routers.load_state_dict(stored)
    with torch.no_grad(), fresh.tracing() as again:
        fresh.decoder(input_ids=ids)
    assert again.group_rates("ffn") == trace.group_rates("ffn")

"""The second stage's training step: what learns, what drops, and what teaches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_models import random_ids, shake_routers, tiny_model, tiny_plan
from widecli.errors import WideError
from widecli.model.adapter import Adapter
from widecli.model.budget import Budget
from widecli.model.routed import RoutedModel
from widecli.recipe.schema import LoraSection, TrainSection
from widecli.train.loop import Trainables, Trainer


def padded_fetch(step: int, rows: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    ids = torch.stack([random_ids(1, 10, seed=100 * step + row)[0] for row in rows])
    lengths = torch.tensor([10 - (row * 3) % 8 for row in rows])
    valid = torch.arange(10)[None] < lengths[:, None]
    return ids.masked_fill(~valid, 1), valid


def trainer(
    model: Any = None, *, dropout: float = 0.3, routers: bool = True, distill: bool = False, **train: Any
) -> Trainer:
    model = tiny_model() if model is None else model
    adapter = Adapter.new(model, LoraSection(rank=4, alpha=8, dropout=dropout), seed=3)
    routed = RoutedModel.attach(model, tiny_plan())
    shake_routers(routed)
    settings = TrainSection(**{"steps": 6, "batch_size": 4, "compile": False, "learning_rate": 1e-2, **train})
    trainables = Trainables(routers=routers, adapter=adapter, adapter_learning_rate=1e-2, distill=distill)
    return Trainer(routed, Budget("rate", 0.9), settings, padded_fetch, 10, trainables)


def values(made: Trainer) -> dict[str, Tensor]:
    assert made.adapter is not None
    tensors = {**dict(made.routed.routers.named_parameters()), **made.adapter.named_parameters()}
    return {name: p.detach().clone() for name, p in tensors.items()}


def test_routers_and_adapter_change_and_nothing_else() -> None:
    model = tiny_model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    made = trainer(model)
    start = values(made)
    list(made.run(0, 2))
    assert all(not torch.equal(start[name], value) for name, value in values(made).items())
    now = {name.replace(".base_layer", ""): p for name, p in model.named_parameters() if ".lora_" not in name}
    assert now.keys() == before.keys() and all(torch.equal(now[name], p) for name, p in before.items())


def test_frozen_routers_stay_and_decide_as_in_inference() -> None:
    made = trainer(routers=False, dropout=0.0)
    start = values(made)
    ids, valid = padded_fetch(0, range(4))
    with torch.no_grad(), made.routed.tracing() as trace:
        made.routed.decoder(input_ids=ids, attention_mask=valid, use_cache=False)
    first, *_ = made.run(0, 2)
    changed = {name for name, value in values(made).items() if not torch.equal(start[name], value)}
    assert changed == {name for name in start if ".lora_" in name}
    assert first.skip_attention == pytest.approx(trace.skip_rate().attention, rel=1e-5)
    assert first.temperature is None and first.learning_rate is None and first.lora_learning_rate is not None


def test_the_two_learning_rates_follow_one_schedule() -> None:
    made = trainer(learning_rate=0.5, warmup_ratio=0.5)
    made.trainables = Trainables(True, made.adapter, 0.1)
    records = list(made.run(0, 3))
    assert [r.lora_learning_rate for r in records] == pytest.approx([0.01 * 10 / 3, 0.02 * 10 / 3, 0.1])
    assert [r.learning_rate for r in records] == pytest.approx([0.5 / 3, 1 / 3, 0.5])


@pytest.mark.parametrize("routers", [True, False])
def test_recomputed_layers_drop_and_decide_the_same(routers: bool) -> None:
    plain, recomputed = (trainer(routers=routers, activation_checkpointing=on) for on in (False, True))
    for one, other in zip(plain.run(0, 3), recomputed.run(0, 3), strict=True):
        assert one.lm_loss == pytest.approx(other.lm_loss, rel=1e-6)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
    for name, value in values(plain).items():
        torch.testing.assert_close(values(recomputed)[name], value)


def test_dropout_belongs_to_seed_and_step_not_to_the_process() -> None:
    """Else a resumed run would drop otherwise than an unbroken one."""
    losses = []
    for disturb, seed in ((0, 0), (99, 0), (0, 1)):
        made = trainer(dropout=0.5, routers=False, seed=seed, activation_checkpointing=bool(disturb))
        for p in made.parameters.values():
            p.data.fill_(0.1)
        torch.manual_seed(disturb)
        losses.append([record.lm_loss for record in made.run(2, 4)])
        assert torch.initial_seed() == disturb, "the process's own generator is left alone"
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_without_dropout_steps_do_not_depend_on_the_micro_batch() -> None:
    whole, cut = (trainer(dropout=0.0, distill=True, micro_batch_size=size) for size in (4, 1))
    for one, other in zip(whole.run(0, 3), cut.run(0, 3), strict=True):
        assert one.lm_loss == pytest.approx(other.lm_loss, rel=1e-5)
        assert one.distill_loss == pytest.approx(other.distill_loss, rel=1e-4)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-3)


def test_distillation_pulls_to_the_dense_model_without_its_adapter() -> None:
    model = tiny_model()
    ids, valid = padded_fetch(0, range(4))
    assert valid is not None
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=valid).logits[:, :-1].log_softmax(-1)
    made = trainer(model, distill=True, routers=False, dropout=0.0)
    for p in made.parameters.values():
        p.data.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=valid).logits[:, :-1].log_softmax(-1)
    counted = valid[:, :-1] & valid[:, 1:]
    divergence = F.kl_div(found, wanted, log_target=True, reduction="none").sum(-1)[counted].mean()
    cross_entropy = F.nll_loss(found[counted], ids[:, 1:][counted])
    (record,) = made.run(0, 1)
    assert record.distill_loss == pytest.approx(divergence.item(), rel=1e-4)
    assert record.lm_loss == pytest.approx(cross_entropy.item(), rel=1e-4)


def test_distillation_lowers_the_divergence() -> None:
    made = trainer(distill=True, dropout=0.0, steps=30, warmup_ratio=0.0)
    made.fetch = lambda step, rows: padded_fetch(0, rows)
    made.budget = Budget("rate", 0.4, weight=0.0)
    losses = [record.distill_loss for record in made.run(0, 30)]
    assert all(loss is not None for loss in losses)
    assert sum(losses[-3:]) < 0.6 * sum(losses[:3])  # type: ignore[arg-type]


def test_a_bf16_backbone_trains_fp32_matrices() -> None:
    made = trainer(tiny_model().to(torch.bfloat16))
    start = values(made)
    records = list(made.run(0, 2))
    assert all(r.lm_loss < float("inf") for r in records)
    moved = values(made)
    assert {value.dtype for value in moved.values()} == {torch.float32}
    assert all(not torch.equal(start[name], moved[name]) for name in start)


def test_an_adapter_that_gets_no_gradient_is_noticed() -> None:
    made = trainer()
    assert made.adapter is not None
    with made.adapter.disabled(), pytest.raises(WideError, match="adapter"):
        list(made.run(0, 1))


@pytest.mark.slow
def test_one_graph_serves_all_layers_and_trains_as_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two: the student's and the teacher's. Traced only; generating code for it would take minutes."""
    from torch._dynamo.utils import counters

    from widecli.model import loss

    monkeypatch.setattr(loss, "_compiled_distillation", lambda: loss.chunk_distillation)
    eager, compiled = (trainer(distill=True, compile=on) for on in (False, True))
    compiled_layers = compiled.routed.compiled_layers
    compiled.routed.compiled_layers = lambda on, **o: compiled_layers(on, backend="aot_eager", **o)  # type: ignore[method-assign,assignment]
    torch.compiler.reset()
    counters.clear()
    for one, other in zip(eager.run(0, 1), compiled.run(0, 1), strict=True):
        assert one.lm_loss == pytest.approx(other.lm_loss, rel=1e-4)
        assert one.distill_loss == pytest.approx(other.distill_loss, rel=1e-3)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-3)
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]

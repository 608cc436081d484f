from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiny_models import FAMILIES, random_ids, tiny_model, tiny_plan
from widecli.errors import UsageError
from widecli.model.adapter import Adapter
from widecli.model.channel_order import arrange, present_order, refuse_disorder, stored_order
from widecli.model.plan import ModelShape
from widecli.model.routed import RoutedModel
from widecli.recipe.schema import LoraSection


def random_order(seed: int = 0, layers: int = 2, channels: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(channels, generator=generator) for _ in range(layers)]).int()


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=random_ids(2, 9)).logits
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("changes", [{}, {"mlp_bias": True}], ids=["plain", "biased"])
def test_the_dense_model_stays_what_it_is(family: str, changes: dict[str, bool]) -> None:
    if changes and family not in ("llama", "smollm3"):
        pytest.skip("this family has no biases in its MLP")
    model = tiny_model(family, **changes)
    before, down = logits(model), model.model.layers[0].mlp.down_proj.weight.clone()
    order = random_order()
    arrange(model, order)
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, down[:, order[0].long()])
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)


def test_orders_do_not_compose() -> None:
    model = tiny_model()
    weights = {name: p.clone() for name, p in model.named_parameters()}
    first, second = random_order(1), random_order(2)
    arrange(model, first)
    arrange(model, second)
    assert torch.equal(present_order(model), second)  # type: ignore[arg-type]
    assert torch.equal(
        model.model.layers[1].mlp.up_proj.weight, weights["model.layers.1.mlp.up_proj.weight"][second[1].long()]
    )
    arrange(model, None)
    assert present_order(model) is None
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


def test_a_second_attachment_begins_from_the_stored_order() -> None:
    model = tiny_model()
    weights = {name: p.clone() for name, p in model.named_parameters()}
    routed = RoutedModel.attach(model, tiny_plan(grouping="clustered"))
    routed.regroup(random_order())
    routed.detach()
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, weights["model.layers.0.mlp.up_proj.weight"])
    RoutedModel.attach(model, tiny_plan())
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


def test_an_adapter_moves_with_its_channels_and_is_stored_in_the_base_models_order(tmp_path: Path) -> None:
    from peft import PeftModel

    model = tiny_model()
    adapter = Adapter.new(model, LoraSection(rank=4, dropout=0.0), seed=0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapter.named_parameters().values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    before = logits(model)
    arrange(model, random_order())
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
    adapter.save(tmp_path / "adapter", "some/model")
    alone = PeftModel.from_pretrained(tiny_model(), str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(alone), before, rtol=1e-4, atol=1e-4)
    # and back onto a model whose channels are in another order
    other = tiny_model()
    arrange(other, random_order(7))
    again = Adapter.load(other, tmp_path / "adapter")
    torch.testing.assert_close(logits(other), before, rtol=1e-4, atol=1e-4)
    for name, tensor in again.state().items():
        torch.testing.assert_close(tensor, adapter.state()[name])


def test_what_is_no_permutation_is_refused_by_name() -> None:
    shape = ModelShape.from_config(tiny_model().config)
    refuse_disorder(stored_order(shape), shape, "this file")
    damaged = stored_order(shape)
    damaged[1, 3] = 5
    with pytest.raises(UsageError, match="this file is damaged: the channels of layer 1 are no permutation"):
        refuse_disorder(damaged, shape, "this file")
    for other in (stored_order(shape)[:1], stored_order(shape)[:, :32], stored_order(shape).long()):
        with pytest.raises(UsageError, match="belongs to another model"):
            refuse_disorder(other, shape, "this file")


def test_quantised_weights_are_refused_before_anything_moves() -> None:
    model = tiny_model()
    mlp = model.model.layers[0].mlp
    mlp.gate_proj.weight = torch.nn.Parameter(mlp.gate_proj.weight.to(torch.int8), requires_grad=False)
    up = mlp.up_proj.weight.clone()
    with pytest.raises(UsageError, match=r"quantised.*routing.grouping=contiguous"):
        arrange(model, random_order())
    assert torch.equal(mlp.up_proj.weight, up) and present_order(model) is None

from __future__ import annotations

from typing import Any

import pytest
import torch

from tiny_models import random_ids, tiny_model, tiny_plan
from widecli.model.routed import RoutedModel
from widecli.model.router import Router


def made(tap: str = "residual", seed: int = 0) -> Router:
    router = Router(8, 3, 2, tap)  # type: ignore[arg-type]
    router.reset(torch.Generator().manual_seed(seed))
    return router


def test_logits_are_two_linear_maps_and_nothing_else() -> None:
    router = made()
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_()
    x = torch.randn(2, 5, 8)
    logits = router(x)
    assert logits.shape == (2, 5, 3, 2)
    w1, b1, w2, b2 = router.down.weight, router.down.bias, router.up.weight, router.up.bias
    expected = (x @ w1.T + b1) @ w2.T + b2
    torch.testing.assert_close(logits.flatten(-2), expected)


def test_the_router_stays_fp32_under_autocast_and_for_bf16_input() -> None:
    router = made()
    x = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = router(x)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, router(x))
    low = router(x.bfloat16())
    assert low.dtype == torch.float32
    assert torch.equal(low, router(x.bfloat16().float()))


def test_routers_of_a_bf16_backbone_are_fp32_and_get_fp32_gradients() -> None:
    model: Any = tiny_model().to(torch.bfloat16)
    routed = RoutedModel.attach(model, tiny_plan())
    assert {p.dtype for p in routed.parameters()} == {torch.float32}
    seen: list[torch.Tensor] = []
    for decision in routed.decisions.values():
        decision.router.register_forward_hook(lambda _, __, out: seen.append(out))
    noise = torch.zeros(2, 6, routed.total_groups)
    from widecli.model.gate import Gumbel

    routed.set_gate(Gumbel(torch.tensor(1.0), noise))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=random_ids(2, 6)).logits
    logits.float().square().mean().backward()
    assert logits.dtype == torch.bfloat16
    assert len(seen) == 4 and {s.dtype for s in seen} == {torch.float32}
    assert {p.grad.dtype for p in routed.parameters() if p.grad is not None} == {torch.float32}


def test_a_random_start_depends_on_the_seed_alone() -> None:
    assert all(torch.equal(a, b) for a, b in zip(made(seed=3).parameters(), made(seed=3).parameters(), strict=True))
    assert not torch.equal(made(seed=3).down.weight, made(seed=4).down.weight)
    assert not bool(made().up.bias.any() or made().down.bias.any())


def test_the_random_start_keeps_the_variance_of_its_input() -> None:
    router = Router(512, 256, 128)
    router.reset(torch.Generator().manual_seed(0))
    out = router(torch.randn(256, 512, generator=torch.Generator().manual_seed(1)))
    assert out.var().item() == pytest.approx(1.0, rel=0.15)


def test_the_normalised_tap_does_not_see_the_scale_of_the_residual() -> None:
    x = torch.randn(4, 8)
    torch.testing.assert_close(made("normalised")(x), made("normalised")(x * 50), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(made("residual")(x), made("residual")(x * 50))


def test_rescaling_changes_the_weights_and_not_the_function() -> None:
    router = made()
    x = torch.randn(5, 8) * torch.logspace(-2, 2, 8)
    before, weight = router(x), router.down.weight.detach().clone()
    router.rescale(x.square().mean(0).sqrt())
    assert not torch.equal(router.down.weight, weight)
    torch.testing.assert_close(router(x), before, rtol=1e-6, atol=1e-6)
    assert torch.equal(router.plain_down_weight(), weight), "powers of two: exact"
    router.rescale(torch.full((8,), 3.0))
    router.rescale(None)
    assert torch.equal(router.down.weight, weight)
    assert torch.equal(router(x), before)


def test_a_checkpoint_holds_plain_weights_while_features_are_scaled() -> None:
    from widecli.model.router import plain_state

    routers = torch.nn.ModuleDict({"0": torch.nn.ModuleDict({"ffn": made()})})
    plain = {name: value.clone() for name, value in routers.state_dict().items()}
    for router in (m for m in routers.modules() if isinstance(m, Router)):
        router.rescale(torch.logspace(-2, 2, 8))
    stored = plain_state(routers)
    assert stored.keys() == plain.keys()
    assert all(torch.equal(stored[name], value) for name, value in plain.items())

"""RMSNorm and the router's decision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import wide_kernels as wk


def example(rows: int = 6, size: int = 48, rank: int = 8, groups: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "x": normal(rows, size) * 10,
        "norm_weight": normal(size),
        "w1": normal(rank, size) / 7,
        "b1": normal(rank),
        "w2": normal(2 * groups, rank) / 3,
        "b2": normal(2 * groups),
    }


def difference(given: dict[str, Tensor], tap: str = "residual") -> Tensor:
    """Execute logit - skip logit in float64 [T, N_G]."""
    x = given["x"].double()
    if tap == "normalised":
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    hidden = x @ given["w1"].double().t() + given["b1"].double()
    logits = hidden @ given["w2"].double().t() + given["b2"].double()
    return logits[:, 0::2] - logits[:, 1::2]


def test_w1_in_two_parts_is_as_good_as_fp32(device: str) -> None:
    """With x = 1 in one place the first product is w1 itself: compare the sign against a bias one part in 2^22 away."""
    given = {name: tensor.to(device) for name, tensor in example(48, size=48, rank=1, groups=2).items()}
    weights = torch.rand(48, generator=torch.Generator().manual_seed(1)).to(device) + 1
    given |= {"x": torch.eye(48, device=device).half(), "norm_weight": given["norm_weight"].half()}
    given |= {"w1": weights[None, :], "b1": torch.zeros(1, device=device)}
    given |= {"w2": torch.tensor([[1.0], [0.0], [-1.0], [0.0]], device=device)}
    for token in (0, 17, 47):
        bias = float(weights[token])
        given["b2"] = torch.tensor([-bias * (1 - 2**-21), 0, bias * (1 + 2**-21), 0], device=device)
        mask = wk.norm_route(**given, eps=1e-5, backend="triton")[1]
        assert mask[token].tolist() == [True, True]


def test_the_norm_is_llamas_and_the_router_reads_the_raw_stream() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    given = example()
    norm = LlamaRMSNorm(48, eps=1e-5)
    norm.weight.data.copy_(given["norm_weight"])
    y, mask = wk.norm_route(**given, eps=1e-5, backend="torch")
    torch.testing.assert_close(y, norm(given["x"]), rtol=0, atol=0)
    logits = (given["x"] @ given["w1"].t() + given["b1"]) @ given["w2"].t() + given["b2"]
    assert torch.equal(mask, logits[:, 0::2] >= logits[:, 1::2])
    assert 0 < int(mask.sum()) < mask.numel()


def test_the_normalised_tap_is_that_of_the_calibrated_routers() -> None:
    from widecli.model.router import Router

    given = example()
    router = Router(48, groups=5, rank=8, tap="normalised")
    names = {"down.weight": "w1", "down.bias": "b1", "up.weight": "w2", "up.bias": "b2"}
    router.load_state_dict({key: given[name] for key, name in names.items()}, strict=False)
    logits = router(given["x"])
    _, mask = wk.norm_route(**given, eps=1e-2, tap="normalised", backend="torch")
    assert torch.equal(mask, logits[..., 0] >= logits[..., 1])
    assert not torch.equal(mask, wk.norm_route(**given, eps=1e-2, backend="torch")[1])


@pytest.mark.parametrize("tap", ["residual", "normalised"])
@pytest.mark.parametrize("rows", [1, 20, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton_gives_the_same_norm_and_decision(rows: int, dtype: torch.dtype, tap: str, device: str) -> None:
    given = {name: tensor.to(device) for name, tensor in example(rows, size=336, rank=20, groups=70).items()}
    given |= {"x": given["x"].to(dtype), "norm_weight": given["norm_weight"].to(dtype)}
    expected, _ = wk.norm_route(**given, eps=1e-5, tap=tap, backend="torch")
    y, mask = wk.norm_route(**given, eps=1e-5, tap=tap, backend="triton")
    torch.testing.assert_close(y, expected, rtol=2e-3 if dtype is torch.float16 else 1e-5, atol=1e-5)
    z = difference(given, tap)
    # A decision may flip where the two logits agree to fp32 rounding, the two-part split of w1 included.
    flipped = (mask != (z >= 0)) & (z.abs() > 1e-6 * z.abs().max())
    assert not bool(flipped.any())


@pytest.mark.parametrize(
    ("size", "rank", "bypass"), [(336, 20, 32), (48, 8, 1), (48, 8, 5), (64, 4, 128), (128, 64, 32)]
)
@pytest.mark.parametrize("rows", [1, 3, 20, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_bypass_reads_what_the_part_reads(
    rows: int, size: int, rank: int, bypass: int, dtype: torch.dtype, device: str
) -> None:
    given = {name: tensor.to(device) for name, tensor in example(rows, size, rank, groups=7).items()}
    given |= {"x": given["x"].to(dtype), "norm_weight": given["norm_weight"].to(dtype)}
    generator = torch.Generator().manual_seed(2)
    down = (torch.randn(bypass, size, generator=generator) / size**0.5).to(device)
    folded = (down * given["norm_weight"]).to(dtype)
    y, mask, reduced = wk.norm_route(**given, eps=1e-5, bypass=folded, early=True, backend="triton")
    plain = wk.norm_route(**given, eps=1e-5, backend="triton")
    torch.testing.assert_close(y, plain[0], rtol=2e-3 if dtype is torch.float16 else 1e-5, atol=1e-5)
    assert torch.equal(mask, plain[1])  # no two of these logits come close
    # in fp16 the two round the norm's weight and its output in other places
    close = {"rtol": 0, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0, "atol": 1e-2}
    torch.testing.assert_close(reduced, y @ down.to(dtype).t(), **close)
    expected = wk.norm_route(**given, eps=1e-5, bypass=folded, backend="torch")[2]
    torch.testing.assert_close(reduced, expected, rtol=1e-3 if dtype is torch.float16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize(("rank", "bypass"), [(16, 16), (32, 32), (32, 5), (16, 0), (16, 24), (20, 20)])
@pytest.mark.parametrize("tap", ["residual", "normalised"])
@pytest.mark.parametrize("rows", [1, 20, 70])
def test_pieces_beside_a_bypass_say_what_they_say_apart(
    rows: int, rank: int, bypass: int, tap: str, device: str
) -> None:
    given = {name: tensor.to(device) for name, tensor in example(rows, 336, rank, groups=7).items()}
    given |= {name: given[name].half() for name in ("x", "norm_weight")}
    given["w1"] = wk.in_pieces(given["w1"], torch.float16)
    folded = torch.randn(bypass, 336, generator=torch.Generator().manual_seed(2)).to(device).half() / 16
    apart = wk.norm_route(**given, eps=1e-5, tap=tap, bypass=folded if bypass else None, backend="torch")
    if bypass:
        given["w1"], folded = wk.side_by_side(given["w1"], folded)
        assert torch.equal(folded, given["w1"].as_strided((bypass, 336), (336, 1), 3 * rank * 336))
    together = wk.norm_route(**given, eps=1e-5, tap=tap, bypass=folded if bypass else None, backend="triton")
    assert len(together) == len(apart) == (3 if bypass else 2)
    for ours, theirs in zip(together, apart, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=1e-5)  # no two of these logits come close


def test_what_does_not_fit_together_is_refused() -> None:
    pieces = torch.zeros(3, 4, 16, dtype=torch.float16)
    for bypass in (torch.zeros(2, 8).half(), torch.zeros(2, 16), torch.zeros(16).half()):
        with pytest.raises(wk.UnsupportedError, match="side_by_side"):
            wk.side_by_side(pieces, bypass)


def test_a_bypass_of_usual_rank_does_not_take_the_row_kernel_away() -> None:
    from wide_kernels.norm_route.configs import row_config

    for widest in (16, 32, 64, 128):
        config = row_config(1, 4096, widest, torch.bfloat16, torch.device("cpu"))
        assert config is not None and config["BD"] >= 64


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_tie_executes(backend: str, device: str) -> None:
    given = {name: tensor.to(device) for name, tensor in example().items()}
    given |= {"w2": torch.zeros_like(given["w2"]), "b2": torch.zeros_like(given["b2"])}
    assert bool(wk.norm_route(**given, eps=1e-5, backend=backend)[1].all())


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_rows_give_no_rows(backend: str, device: str) -> None:
    given = {name: tensor.to(device) for name, tensor in example(rows=0).items()}
    y, mask = wk.norm_route(**given, eps=1e-5, backend=backend)
    assert (y.shape, mask.shape, mask.dtype) == ((0, 48), (0, 5), torch.bool)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"w1": torch.ones(8, 48).half()}, "routers are float32 so that ties are rare, w1 is torch.float16"),
        ({"tap": "embedding"}, "tap must be one of residual, normalised, got 'embedding'"),
        ({"early": "no"}, "norm_route: early must be True or False, got 'no'"),
        ({"w1": torch.ones(8, 47)}, "D of w1 must be 48, got 47"),
        ({"b1": torch.ones(7)}, "size of b1 must be 8, got 7"),
        ({"w2": torch.ones(9, 8), "b2": torch.ones(9)}, "two rows a group, got 9"),
        ({"norm_weight": torch.ones(40)}, "size of norm_weight must be 48, got 40"),
        ({"bypass": torch.ones(4, 40)}, "D of bypass must be 48, got 40"),
        ({"bypass": torch.ones(0, 48)}, "a bypass has at least one row"),
        ({"bypass": torch.ones(4, 48).half()}, "bypass is torch.float16"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changed: dict[str, Any], complaint: str) -> None:
    with pytest.raises(wk.UnsupportedError, match=complaint):
        wk.norm_route(**(example() | changed), eps=1e-5)

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


@pytest.mark.parametrize("rows", [1, 20, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton_gives_the_same_norm_and_decision(rows: int, dtype: torch.dtype, device: str) -> None:
    given = {name: tensor.to(device) for name, tensor in example(rows, size=80, rank=20, groups=70).items()}
    given |= {"x": given["x"].to(dtype), "norm_weight": given["norm_weight"].to(dtype)}
    expected, decided = wk.norm_route(**given, eps=1e-5, backend="torch")
    y, mask = wk.norm_route(**given, eps=1e-5, backend="triton")
    torch.testing.assert_close(y, expected, rtol=2e-3 if dtype is torch.float16 else 1e-5, atol=1e-5)
    # A decision may flip where both logits agree to fp32 rounding: with 42 000 of them at most a handful.
    assert int((mask != decided).sum()) <= rows * 70 // 5000


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
        ({"w1": torch.ones(8, 47)}, "D of w1 must be 48, got 47"),
        ({"b1": torch.ones(7)}, "size of b1 must be 8, got 7"),
        ({"w2": torch.ones(9, 8), "b2": torch.ones(9)}, "two rows a group, got 9"),
        ({"norm_weight": torch.ones(40)}, "size of norm_weight must be 48, got 40"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changed: dict[str, Any], complaint: str) -> None:
    with pytest.raises(wk.UnsupportedError, match=complaint):
        wk.norm_route(**(example() | changed), eps=1e-5)

"""The engine's element-wise kernels against their torch forms (Triton's interpreter without a GPU)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from widecli.engine import fused, fused_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_cpu(*tensors: Tensor) -> list[Tensor]:
    return [t.cpu().clone() for t in tensors]


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("width", [48, 2560])
def test_activation_of_rows_that_stand_apart(activation: str, width: int) -> None:
    wide = torch.randn(5, 2 * width + 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    gate_up = wide[:, : 2 * width]
    found = fused_triton.activate_gate(gate_up, activation)
    torch.testing.assert_close(found.cpu(), fused.activate_gate(gate_up.cpu(), activation), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (8, 8, 32), (32, 8, 128), (4, 1, 80)])
def test_rotation_writes_its_slots_and_no_others(heads: int, kv_heads: int, size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = 3
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * size, generator=generator).to(DEVICE)
    parts = qkv.split([heads * size, kv_heads * size, kv_heads * size], -1)
    q, k, v = (part.view(rows, -1, size) for part in parts)
    cos, sin = (torch.randn(rows, size, generator=generator).to(DEVICE) for _ in range(2))
    caches = [torch.full((11, kv_heads, size), float("nan"), device=DEVICE) for _ in range(2)]
    slots = torch.tensor([7, 0, 10], device=DEVICE)
    expected = on_cpu(*caches)
    rotated = fused.rotate_and_store(*on_cpu(q, k, v, cos, sin), *expected, slots.cpu())
    found = fused_triton.rotate_and_store(q, k, v, cos, sin, *caches, slots)
    torch.testing.assert_close(found.cpu(), rotated, rtol=1e-5, atol=1e-6)
    for cache, wanted in zip(caches, expected, strict=True):
        torch.testing.assert_close(cache.cpu(), wanted, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_no_rows() -> None:
    assert fused_triton.activate_gate(torch.empty(0, 32, device=DEVICE), "silu").shape == (0, 16)

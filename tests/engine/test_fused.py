"""The engine's element-wise kernels against their torch forms (Triton's interpreter without a GPU)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from widecli.engine import fused, fused_triton
from widecli.engine.fused import Places
from widecli.engine.weights import Linear, Norm

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
    places = Places(cos, sin, caches[0], caches[1], torch.tensor([7, 0, 10], device=DEVICE))
    expected = copied(places)
    rotated = fused.rotate_and_store(*on_cpu(q, k, v), expected)
    found = fused_triton.rotate_and_store(q, k, v, places)
    torch.testing.assert_close(found.cpu(), rotated, rtol=1e-5, atol=1e-6)
    assert_same_caches(places, expected)


def copied(places: Places) -> Places:
    return Places(*on_cpu(places.cos, places.sin, places.k_slots, places.v_slots, places.slots))


def assert_same_caches(found: Places, expected: Places, tolerance: float = 1e-5) -> None:
    for name in ("k_slots", "v_slots"):
        cache, wanted = getattr(found, name).cpu(), getattr(expected, name)
        torch.testing.assert_close(cache, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [0, 1, 2])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "depth"), [(6, 3, 64, 144), (2, 1, 16, 2064), (4, 2, 12, 48)])
def test_a_row_is_projected_rotated_and_stored_at_once(
    heads: int, kv_heads: int, size: int, depth: int, groups: int, bias: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    width = (heads + 2 * kv_heads) * size
    linear = Linear(normal(width, depth) / depth**0.5, normal(width) if bias else None)
    mask = torch.tensor([[True, False][:groups]], device=DEVICE).view(1, groups)
    x = normal(1, depth)
    caches = [torch.full((5, kv_heads, size), float("nan"), device=DEVICE, dtype=dtype) for _ in range(2)]
    places = Places(normal(1, size), normal(1, size), *caches, torch.tensor([3], device=DEVICE))
    expected = copied(places)
    parts = F.linear(x.double(), linear.weight.double(), None if linear.bias is None else linear.bias.double())
    parts = parts.to(dtype).cpu()
    q, k, v = (part.view(1, -1, size) for part in parts.split([heads * size, kv_heads * size, kv_heads * size], -1))
    if groups:
        q = q.masked_fill(~mask.cpu().repeat_interleave(heads // groups, 1)[..., None], 0)
        linear.weight[: heads * size].view(groups, -1)[~mask[0]] = float("nan")  # nobody reads them
    rotated = fused.rotate_and_store(q, k, v, expected)
    per_group = heads * size // max(1, groups)
    found = fused_triton.project_and_store(x, linear, mask, per_group, (heads, kv_heads, size), places)
    tolerance = 1e-5 if dtype is torch.float32 else 4e-3
    torch.testing.assert_close(found.cpu(), rotated, rtol=tolerance, atol=tolerance)
    assert_same_caches(places, expected, tolerance)


@pytest.mark.parametrize(("rows", "size"), [(1, 4096), (5, 576), (3, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_norm_is_llamas(rows: int, size: int, dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(rows, size + 8, generator=generator).to(DEVICE, dtype)  # rows stand apart
    theirs = LlamaRMSNorm(size, eps=1e-5).to(DEVICE, dtype)
    theirs.weight.data.copy_(torch.randn(size, generator=generator))
    found = fused_triton.normalise(wide[:, :size], Norm(theirs.weight.data, 1e-5))
    tolerance = 1e-5 if dtype is torch.float32 else 2e-3  # their mean is summed in another order
    torch.testing.assert_close(found, theirs(wide[:, :size]), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("rows", "groups"), [(1, 300), (3, 128), (5, 7)])
def test_counting_adds_what_active_rows_execute(rows: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(4)
    mask = torch.rand(rows, groups, generator=generator) < 0.5
    active = torch.tensor([True, False, True, True, False])[:rows]
    executed, tokens = torch.randint(9, (groups,), generator=generator), torch.tensor(7)
    found = [t.to(DEVICE) for t in (executed.clone(), tokens.clone())]
    fused_triton.count_executed(mask.to(DEVICE), active.to(DEVICE), *found)
    fused.count_executed(mask, active, executed, tokens)
    assert torch.equal(found[0].cpu(), executed) and torch.equal(found[1].cpu(), tokens)


def test_no_rows() -> None:
    assert fused_triton.activate_gate(torch.empty(0, 32, device=DEVICE), "silu").shape == (0, 16)
    weight = torch.ones(32, device=DEVICE)
    assert fused_triton.normalise(torch.empty(0, 32, device=DEVICE), Norm(weight, 1e-5)).shape == (0, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "size"), [(1, 70_001), (3, 2048), (2, 40), (4, 1)])
def test_the_first_of_the_likeliest_tokens_is_taken_and_counted(rows: int, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    wide = torch.randn(rows, size + 3, generator=generator).to(dtype)
    logits = wide[:, :size]
    logits[0, size // 2 :] = logits[0].max() + 1  # many that are alike, in several parts
    logits[-1, size // 3 :: 7] = float("inf")
    token, lengths = torch.full((rows,), -1), torch.arange(rows)
    found = [t.to(DEVICE) for t in (token.clone(), lengths.clone())]
    fused.take_likeliest(logits, token, lengths)
    fused_triton.take_likeliest(wide.to(DEVICE)[:, :size], *found)
    firsts = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert found[0].tolist() == token.tolist() == firsts
    assert found[1].tolist() == lengths.tolist() == [row + 1 for row in range(rows)]
    fused_triton.take_likeliest(wide.to(DEVICE)[:, :size], found[0], None)
    assert found[1].tolist() == lengths.tolist(), "only where they are given"


def test_what_is_no_number_is_seen_among_logits() -> None:
    logits = torch.zeros(2, 3000)
    logits[0, 2500] = float("nan")
    logits[1] = float("-inf")
    token = torch.full((2,), -1, device=DEVICE)
    fused_triton.take_likeliest(logits.to(DEVICE), token, None)
    assert token.tolist() == [2500, 0] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("size", [64, 80])
def test_positions_of_one_more_token(size: int) -> None:
    tables = (torch.randn(9, size), torch.randn(9, size))
    lengths, first_slots = torch.tensor([0, 8, 3]), torch.tensor([0, 9, 18])
    expected = fused.positions(lengths, first_slots, tables)
    cos, sin = (table.to(DEVICE) for table in tables)
    found = fused_triton.positions(lengths.to(DEVICE), first_slots.to(DEVICE), (cos, sin))
    assert expected[2].tolist() == [0, 17, 21] and expected[3].tolist() == [1, 9, 4]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)

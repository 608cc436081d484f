"""Routed attention, prefill and decode, against a loop over tokens and heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import wide_kernels as wk
from wide_kernels import dispatch
from wide_kernels.attention_decode import launch as decode_launch


def example(
    tokens: int = 5, keys: int = 9, heads: int = 6, kv_heads: int = 2, size: int = 64, groups: int = 3
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, k, v, mask) of two sequences, float64."""
    generator = torch.Generator().manual_seed(tokens + keys + size)
    q, k, v = (
        torch.randn(2, length, count, size, generator=generator, dtype=torch.float64)
        for length, count in ((tokens, heads), (keys, kv_heads), (keys, kv_heads))
    )
    return q, k, v, torch.rand(2 * tokens, groups, generator=generator) < 0.6


def token_by_token(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, first: list[list[int]], end: list[list[int]]
) -> Tensor:
    """Query t of sequence b sees keys first[b][t] .. end[b][t] - 1."""
    batch, tokens, heads, size = q.shape
    o = torch.zeros_like(q)
    for b in range(batch):
        for t in range(tokens):
            for head in range(heads):
                seen = slice(first[b][t], end[b][t])
                group = head // (heads // mask.shape[1])
                if not mask[b * tokens + t, group] or first[b][t] >= end[b][t]:
                    continue
                kv = head // (heads // k.shape[2])
                weights = torch.softmax(k[b, seen, kv] @ q[b, t, head] / size**0.5, 0)
                o[b, t, head] = weights @ v[b, seen, kv]
    return o


@pytest.mark.parametrize(("heads", "kv_heads", "groups"), [(6, 2, 3), (6, 2, 2), (4, 4, 4), (4, 1, 1), (6, 3, 6)])
@pytest.mark.parametrize("size", [64, 96, 128, 256])
def test_prefill_attends_causally_at_the_end_of_the_keys(heads: int, kv_heads: int, groups: int, size: int) -> None:
    q, k, v, mask = example(5, 9, heads, kv_heads, size, groups)
    o = wk.attention_prefill(q, k, v, wk.route_layout(mask))
    torch.testing.assert_close(o, token_by_token(q, k, v, mask, [[0] * 5] * 2, [list(range(5, 10))] * 2))


def test_prefill_takes_a_chunk_anywhere_and_leaves_out_left_padding() -> None:
    q, k, v, mask = example()
    layout = wk.route_layout(mask)
    starts, pads = torch.tensor([0, 3]), torch.tensor([2, 0])
    o = wk.attention_prefill(q, k, v, layout, q_start=starts, kv_start=pads)
    ends = [[s + t + 1 for t in range(5)] for s in (0, 3)]
    torch.testing.assert_close(o, token_by_token(q, k, v, mask, [[2] * 5, [0] * 5], ends))
    assert not o[0, :2].any()  # they stand before the first real key
    assert bool(torch.isfinite(o).all())


def test_prefill_without_causality_sees_all_real_keys() -> None:
    q, k, v, mask = example()
    o = wk.attention_prefill(q, k, v, wk.route_layout(mask), causal=False, kv_start=torch.tensor([1, 0]))
    torch.testing.assert_close(o, token_by_token(q, k, v, mask, [[1] * 5, [0] * 5], [[9] * 5] * 2))


def test_prefill_in_chunks_of_queries_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from wide_kernels.attention_prefill import reference

    q, k, v, mask = example()
    whole = wk.attention_prefill(q, k, v, wk.route_layout(mask))
    monkeypatch.setattr(reference, "CHUNK_SCORES", 2 * 9 * 2)  # two queries at a time
    torch.testing.assert_close(wk.attention_prefill(q, k, v, wk.route_layout(mask)), whole)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_decode_sees_the_filled_part_of_the_cache(scale: float | None) -> None:
    q, k, v, mask = example(tokens=1)
    lengths, pads = torch.tensor([4, 9]), torch.tensor([1, 0])
    o = wk.attention_decode(q, k, v, mask, lengths, scale, kv_start=pads)
    scaled = q if scale is None else q * scale * 64**0.5
    torch.testing.assert_close(o, token_by_token(scaled, k, v, mask, [[1], [0]], [[4], [9]]))


def test_decode_of_an_empty_cache_gives_zeros() -> None:
    q, k, v, mask = example(tokens=1)
    o = wk.attention_decode(q, k, v, torch.ones_like(mask), torch.tensor([0, 3]))
    assert not o[0].any()
    assert o[1].any()


def test_a_skipped_query_is_zero_even_if_its_values_are_not_numbers() -> None:
    q, k, v, mask = example(tokens=1)
    mask[0] = False
    q[0] = float("nan")
    assert not wk.attention_decode(q, k, v, mask)[0].any()
    assert not wk.attention_prefill(q, k, v, wk.route_layout(mask))[0].any()


Q, K, V, MASK = example()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"k": K[:, :, :0], "v": V[:, :, :0]}, "H_k = 0 KV heads do not divide H_q = 6"),
        ({"k": K[..., :32]}, "d of k must be 64, got 32"),
        ({"v": V[:, :4]}, "k and v must have one shape"),
        ({"q_start": torch.tensor([0.0, 1.0])}, "q_start must be int64 or int32"),
        ({"kv_start": torch.tensor([0])}, "size of kv_start, one entry a sequence, must be 2, got 1"),
        ({"layout": wk.route_layout(MASK[:4], backend="torch")}, r"rows of the layout \(B\*T\) must be 10, got 4"),
        ({"layout": wk.route_layout(MASK[:, [0, 1, 2, 0]], backend="torch")}, "4 groups do not divide H_q = 6"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(arguments: dict[str, Any], complaint: str) -> None:
    given = {"q": Q, "k": K, "v": V, "layout": wk.route_layout(MASK, backend="torch")}
    with pytest.raises(wk.UnsupportedError, match=complaint):
        wk.attention_prefill(**(given | arguments))


@pytest.mark.parametrize(
    ("size", "backend", "complaint"),
    [
        (40, "triton", "head_dim must be a multiple of 16, got 40"),
        (512, "triton", "head_dim must be at most 256, got 512"),
    ],
)
def test_heads_that_the_kernels_cannot_hold_are_refused_by_name(size: int, backend: str, complaint: str) -> None:
    q, k, v, mask = (tensor.float() for tensor in example(tokens=1, size=size))
    with pytest.raises(wk.UnsupportedError, match=complaint):
        wk.attention_decode(q, k, v, mask.bool(), backend=backend)
    with pytest.raises(wk.UnsupportedError, match=complaint):
        wk.attention_prefill(q, k, v, wk.route_layout(mask.bool(), backend="torch"), backend=backend)


def test_keys_are_one_matrix_or_are_not() -> None:
    from wide_kernels.attention_prefill.launch import rows_of_keys

    cache = torch.zeros(3, 20, 2, 64)
    assert rows_of_keys(cache) == 20
    assert rows_of_keys(cache[:, :9]) == 20  # the filled part of a cache
    assert rows_of_keys(cache[:1, 2:9]) == 7
    assert rows_of_keys(torch.zeros(3, 20, 6, 64)[:, :, 2:4]) == 20  # a part of a fused projection
    assert rows_of_keys(torch.zeros(3, 2, 20, 64).transpose(1, 2)) is None  # heads before keys
    assert rows_of_keys(torch.zeros(3, 20, 64, 2).transpose(2, 3)) is None


def test_heads_come_in_packets_or_do_not() -> None:
    from wide_kernels.attention_decode.launch import in_packets

    cache = torch.zeros(3, 20, 2, 64)
    assert in_packets(cache) and in_packets(cache[1:, 3:9])
    assert in_packets(torch.zeros(3, 2, 20, 64).transpose(1, 2))  # heads before keys
    assert in_packets(torch.zeros(1, 1, 2, 64).as_strided((1, 1, 2, 64), (7, 5, 64, 1)))  # nothing is 7 or 5 apart
    assert not in_packets(torch.zeros(3, 20, 2, 72)[..., :64])
    assert not in_packets(torch.zeros(3, 20, 64, 2).transpose(2, 3))
    assert not in_packets(torch.zeros(3, 20, 2, 128)[..., 4:])


@pytest.mark.parametrize(
    ("batch", "keys", "kv_heads", "reason"),
    [
        (1, 4096, 8, None),
        (1, 65536, 8, None),
        (2, 8192, 8, None),
        (1, 4095, 8, "it does not pay for less than 4096 keys at batch 1, got 4095"),
        (2, 8191, 8, "it does not pay for less than 8192 keys at batch 2, got 8191"),
        (3, 65536, 8, "it does not pay for more than 16 pairs of sequence and KV head, got 24"),
        (1, 65536, 32, "it does not pay for more than 16 pairs of sequence and KV head, got 32"),
    ],
)
def test_auto_decodes_in_one_launch_on_hopper_where_that_was_faster(
    batch: int, keys: int, kv_heads: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_capability", lambda index: (9, 0))
    monkeypatch.setattr(dispatch, "TRITON_VERSION", (3, 6))
    monkeypatch.setattr(decode_launch, "multiprocessors", lambda device: 132)
    with FakeTensorMode():  # sizes and strides of a GPU's tensors, no GPU
        q = torch.empty(batch, 1, 32, 128, dtype=torch.bfloat16, device="cuda:0")
        k = torch.empty(batch, keys, kv_heads, 128, dtype=torch.bfloat16, device="cuda:0")
        mask = torch.empty(batch, 8, dtype=torch.bool, device="cuda:0")
        found = wk.explain("attention_decode", q, k, k, mask)
        by_name = wk.explain("attention_decode", q, k, k, mask, backend="gluon")
    assert found.backend == ("gluon" if reason is None else "triton")
    assert found.refused == ({} if reason is None else {"gluon": reason})
    assert reason is None or f"not gluon: {reason}" in str(found)
    assert by_name.backend == "gluon"  # it could run


def test_decode_takes_one_token_a_sequence() -> None:
    with pytest.raises(wk.UnsupportedError, match="must be 1, got 5"):
        wk.attention_decode(Q, K, V, MASK)

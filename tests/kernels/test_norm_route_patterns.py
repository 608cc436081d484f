"""RMSNorm and the router's choice among patterns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import wide_kernels as wk

BACKENDS = ["torch", "triton"]


def example(
    rows: int = 6, size: int = 48, rank: int = 8, segments: int = 2, count: int = 5, width: int = 7
) -> dict[str, Tensor]:
    """Arguments; the numbers are a permutation, and there is a pattern more than numbers."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    numbers = torch.stack([torch.randperm(count, generator=generator) for _ in range(segments)])
    return {
        "x": normal(rows, size) * 10,
        "norm_weight": normal(size),
        "w1": normal(rank, size) / 7,
        "b1": normal(rank),
        "w2": normal(segments, count, rank) / 3,
        "b2": normal(segments, count),
        "numbers": numbers.to(torch.int32),
        "patterns": torch.rand(segments, count + 1, width, generator=generator) < 0.5,
    }


def scores(given: dict[str, Tensor], tap: str = "residual") -> Tensor:
    """Of every pattern in float64 [S, T, C]."""
    x = given["x"].double()
    if tap == "normalised":
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    hidden = x @ given["w1"].double().t() + given["b1"].double()
    return hidden @ given["w2"].double().mT + given["b2"].double()[:, None]


@pytest.mark.parametrize("tap", ["residual", "normalised"])
@pytest.mark.parametrize(
    ("rows", "segments", "count", "width"), [(1, 1, 64, 70), (20, 3, 5, 7), (70, 2, 150, 16), (3, 5, 1, 300)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton_gives_the_same_norm_and_choice(
    rows: int, segments: int, count: int, width: int, dtype: torch.dtype, tap: str, device: str
) -> None:
    given = {name: t.to(device) for name, t in example(rows, 336, 20, segments, count, width).items()}
    given |= {"x": given["x"].to(dtype), "norm_weight": given["norm_weight"].to(dtype)}
    expected, *_ = wk.norm_route_patterns(**given, eps=1e-5, tap=tap, backend="torch")
    y, ids, mask = wk.norm_route_patterns(**given, eps=1e-5, tap=tap, backend="triton")
    torch.testing.assert_close(y, expected, rtol=2e-3 if dtype is torch.float16 else 1e-5, atol=1e-5)
    assert ids.shape == (segments, rows) and ids.dtype is torch.int32
    found = scores(given, tap)
    places = given["numbers"].argsort(1).gather(1, ids.long())
    # A choice may differ where two scores agree to fp32 rounding.
    lost = found.amax(-1) - found.gather(-1, places[..., None]).squeeze(-1)
    assert float(lost.max()) <= 1e-6 * float(found.abs().max())
    chosen = [patterns[numbers.long()] for patterns, numbers in zip(given["patterns"], ids, strict=True)]
    assert mask is not None and torch.equal(mask, torch.cat(chosen, 1))
    without = wk.norm_route_patterns(**(given | {"patterns": None}), eps=1e-5, tap=tap, backend="triton")
    assert torch.equal(without[0], y) and torch.equal(without[1], ids) and without[2] is None


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("tap", ["residual", "normalised"])
def test_w1_in_pieces_decides_alike(tap: str, rows: int, device: str) -> None:
    dtype = torch.float16 if device == "cpu" else torch.bfloat16
    given = {name: t.to(device) for name, t in example(rows, 336, 20).items()}
    given |= {"x": given["x"].to(dtype), "norm_weight": given["norm_weight"].to(dtype)}
    pieces = wk.in_pieces(given["w1"], dtype)
    found = scores(given, tap)
    for backend in BACKENDS:
        y, ids, _ = wk.norm_route_patterns(**given, eps=1e-5, tap=tap, backend=backend)
        again = wk.norm_route_patterns(**(given | {"w1": pieces}), eps=1e-5, tap=tap, backend=backend)
        assert torch.equal(again[0], y)
        for picked in (ids, again[1]):
            places = given["numbers"].argsort(1).gather(1, picked.long())
            lost = found.amax(-1) - found.gather(-1, places[..., None]).squeeze(-1)
            assert float(lost.max()) <= 1e-6 * float(found.abs().max())


def test_pieces_in_bf16_are_the_whole_weight() -> None:
    weight = torch.randn(7, 30, generator=torch.Generator().manual_seed(2)) * torch.logspace(-6, 6, 30)
    pieces = wk.in_pieces(weight, torch.bfloat16)
    assert pieces.dtype is torch.bfloat16 and pieces.shape == (3, 7, 30)
    assert torch.equal(pieces.double().sum(0), weight.double())


def test_pieces_in_fp16_miss_the_weight_by_less_than_its_smallest_number() -> None:
    weight = torch.randn(7, 30, generator=torch.Generator().manual_seed(2)) * torch.logspace(-6, 3, 30)
    pieces = wk.in_pieces(weight, torch.float16)
    assert float((pieces.double().sum(0) - weight.double()).abs().max()) < 6e-8


def test_what_has_no_pieces_is_refused() -> None:
    with pytest.raises(wk.UnsupportedError, match=r"must be float32 \[r, D\], got torch.float16 \[2, 3\]"):
        wk.in_pieces(torch.ones(2, 3).half(), torch.float16)
    with pytest.raises(wk.UnsupportedError, match=r"pieces are bfloat16 or float16, got torch\.float32"):
        wk.in_pieces(torch.ones(2, 3), torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [5, 150])
def test_of_equal_scores_the_first_is_taken(count: int, backend: str, device: str) -> None:
    given = {name: tensor.to(device) for name, tensor in example(count=count).items()}
    given |= {"w2": torch.zeros_like(given["w2"]), "b2": torch.zeros_like(given["b2"])}
    for best in ([0, 0], [3, 1], [4, 2], [count - 1, count - 2]):
        for segment, first in enumerate(best):
            given["b2"][segment] = 1.0
            given["b2"][segment, :first] = 0.5
        ids = wk.norm_route_patterns(**given, eps=1e-5, backend=backend)[1]
        expected = torch.stack([numbers[first] for numbers, first in zip(given["numbers"], best, strict=True)])
        assert torch.equal(ids, expected[:, None].expand_as(ids))


def test_early_is_yes_or_no() -> None:
    with pytest.raises(wk.UnsupportedError, match="norm_route_patterns: early must be True or False, got 'no'"):
        wk.norm_route_patterns(**example(count=5), eps=1e-5, early="no")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # NumPy's, from the interpreter
@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_that_are_no_numbers_still_pick_a_pattern(backend: str, device: str) -> None:
    given = {name: tensor.to(device) for name, tensor in example(count=70).items()}
    given["x"][2] = torch.nan
    clean = wk.norm_route_patterns(**(given | {"x": given["x"].nan_to_num()}), eps=1e-5, backend=backend)
    y, ids, mask = wk.norm_route_patterns(**given, eps=1e-5, backend=backend)
    rest = [0, 1, 3, 4, 5]
    assert torch.equal(ids[:, rest], clean[1][:, rest]) and torch.equal(y[rest], clean[0][rest])
    assert bool(((ids >= 0) & (ids < 70)).all()) and mask is not None


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_give_no_rows(backend: str, device: str) -> None:
    given = {name: tensor.to(device) for name, tensor in example(rows=0).items()}
    y, ids, mask = wk.norm_route_patterns(**given, eps=1e-5, backend=backend)
    assert (y.shape, ids.shape, ids.dtype) == ((0, 48), (2, 0), torch.int32)
    assert mask is not None and (mask.shape, mask.dtype) == ((0, 14), torch.bool)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"w2": torch.ones(2, 5, 8).half()}, "routers are float32 so that ties are rare, w2 is torch.float16"),
        ({"tap": "embedding"}, "tap must be one of residual, normalised, got 'embedding'"),
        ({"w1": torch.ones(8, 47)}, "D of w1 must be 48, got 47"),
        ({"w1": torch.ones(2, 8, 48)}, "the number of pieces of w1 must be 3, got 2"),
        ({"w1": torch.ones(3, 8, 48)}, "only a 16-bit x takes w1 in pieces, x is torch.float32; give w1 whole"),
        ({"w1": torch.ones(3, 8, 48).half()}, "w1 is torch.float16, the first operand is torch.float32; cast one"),
        ({"w2": torch.ones(5, 8)}, r"w2 must be \[S, C, r\], got 2 dimensions"),
        ({"w2": torch.ones(2, 5, 9)}, "r of w2 must be 8, got 9"),
        ({"w2": torch.ones(2, 0, 8)}, "there must be segments and patterns"),
        ({"b2": torch.ones(2, 4)}, r"b2 must be \[2, 5\], got \[2, 4\]"),
        ({"numbers": torch.ones(2, 5)}, "numbers must be int32, got torch.float32; cast"),
        ({"patterns": torch.ones(2, 6, 7)}, r"patterns must be bool \(True = execute\), got torch.float32"),
        ({"patterns": torch.ones(3, 6, 7, dtype=torch.bool)}, "S of patterns must be 2, got 3"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changed: dict[str, Any], complaint: str) -> None:
    with pytest.raises(wk.UnsupportedError, match=complaint):
        wk.norm_route_patterns(**(example() | changed), eps=1e-5)

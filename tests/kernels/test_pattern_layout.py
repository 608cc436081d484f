"""The layout of tokens that follow patterns, on every backend, and the order of similar patterns."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import wide_kernels as wk
from wide_kernels.pattern_layout import MOST_PATTERNS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ("torch", "triton")


def decision(rows: int, count: int, groups: int, seed: int, power: float = 1.0) -> tuple[Tensor, Tensor]:
    """(ids, patterns); a power above 1 prefers small ids."""
    generator = torch.Generator().manual_seed(seed)
    ids = (torch.rand(rows, generator=generator) ** power * count).to(torch.int32)
    patterns = torch.rand(count, groups, generator=generator) < 0.3
    return ids.to(DEVICE), patterns.to(DEVICE)


def check(ids: Tensor, patterns: Tensor, backend: str) -> None:
    """Compare a layout with what its description says, in plain Python."""
    layout = wk.pattern_layout(ids, patterns, backend=backend)
    assert {tensor.dtype for tensor in (layout.order, layout.lists, layout.listed, layout.mixed)} == {torch.int32}
    numbers, bits = ids.tolist(), patterns.tolist()
    rows, groups = len(numbers), patterns.shape[1]
    order = sorted(range(rows), key=numbers.__getitem__)
    assert layout.order.tolist() == order
    assert torch.equal(layout.ids, ids) and torch.equal(layout.mask, patterns[ids.long()])
    assert (layout.rows, layout.groups) == (rows, groups)
    assert layout.count is not None and layout.count.dtype is torch.int32
    assert layout.count.tolist() == [sum(bits[number][group] for number in numbers) for group in range(groups)]
    assert len(layout.lists) == len(layout.listed) == len(layout.mixed) == -(-rows // 128)
    for tile in range(-(-rows // 128)):
        halves = [order[start : min(start + 64, tile * 128 + 128)] for start in (tile * 128, tile * 128 + 64)]
        held = [{numbers[r] for r in half} for half in halves]
        entries = [
            group * 4 + sum((1 << half) * any(bits[number][group] for number in held[half]) for half in (0, 1))
            for group in range(groups)
        ]
        run, skip = [entry for entry in entries if entry % 4], [entry for entry in entries if entry % 4 == 0]
        assert layout.lists[tile].tolist() == run + skip
        assert int(layout.listed[tile]) == len(run)
        assert int(layout.mixed[tile]) == sum((len(held[half]) > 1) << half for half in (0, 1))


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(0, 400),
    count=st.integers(1, 300),
    groups=st.integers(1, 20),
    seed=st.integers(0, 99),
    power=st.sampled_from([1.0, 4.0]),
)
def test_rows_are_sorted_by_pattern_and_tiles_list_what_they_run(
    rows: int, count: int, groups: int, seed: int, power: float
) -> None:
    check(*decision(rows, count, groups, seed, power), "torch")


@pytest.mark.parametrize(
    ("rows", "count", "groups", "power"),
    [
        (0, 3, 5, 1.0),
        (1, 1, 1, 1.0),
        (700, 300, 9, 2.0),
        (128, 2, 3, 1.0),
        (129, 100, 37, 4.0),
        (300, 17, 5, 1.0),
        (257, 1, 16, 1.0),
    ],
)
def test_triton_makes_the_same_layout(rows: int, count: int, groups: int, power: float) -> None:
    check(*decision(rows, count, groups, 1, power), "triton")


def test_a_layout_can_be_copied_and_compared() -> None:
    ids, patterns = decision(9, 3, 4, 0)
    for layout in (wk.pattern_layout(ids, patterns), wk.route_layout(patterns[ids.long()])):
        again = copy.deepcopy(layout)
        assert layout == layout and layout != again and len({layout, again}) == 2
        assert all(
            torch.equal(getattr(layout, field.name), getattr(again, field.name))
            for field in dataclasses.fields(layout)
            if isinstance(getattr(layout, field.name), Tensor)
        )


def test_on_a_cpu_ids_out_of_range_are_refused() -> None:
    patterns = torch.ones(3, 2, dtype=torch.bool)
    for bad in (3, -1):
        with pytest.raises(wk.UnsupportedError, match=f"ids must lie in 0..2, got {bad}"):
            wk.pattern_layout(torch.tensor([0, bad, 1], dtype=torch.int32), patterns, backend="torch")


def test_triton_clamps_ids_out_of_range() -> None:
    _, patterns = decision(1, 3, 4, 2)
    ids = torch.tensor([0, 77, -5, 1], dtype=torch.int32, device=DEVICE)
    layout = wk.pattern_layout(ids, patterns, backend="triton")
    expected = wk.pattern_layout(ids.clamp(0, 2), patterns, backend="torch")
    assert all(map(torch.equal, layout.tensors, expected.tensors))


IDS, PATTERNS = torch.zeros(4, dtype=torch.int32), torch.ones(3, 2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("ids", "patterns", "complaint"),
    [
        (IDS.long(), PATTERNS, "ids must be int32, got torch.int64; cast"),
        (IDS[None], PATTERNS, r"ids must be \[T\], got 2 dimensions"),
        (IDS, PATTERNS.float(), r"patterns must be bool \(True = execute\), got torch.float32"),
        (IDS, PATTERNS[0], r"patterns must be \[C, N_G\], got 1 dimensions"),
        (IDS, PATTERNS[:0], r"there must be patterns and groups, got patterns of shape \[0, 2\]"),
        (IDS, PATTERNS[:, :0], r"there must be patterns and groups, got patterns of shape \[3, 0\]"),
        (IDS, PATTERNS.to("meta"), "patterns is on meta, the first operand on cpu; move one"),
    ],
)
def test_what_is_no_decision_is_refused(ids: Tensor, patterns: Tensor, complaint: str) -> None:
    with pytest.raises(wk.UnsupportedError, match=complaint):
        wk.pattern_layout(ids, patterns)


def test_more_patterns_than_triton_counts_are_left_to_torch() -> None:
    ids, patterns = decision(9, MOST_PATTERNS + 1, 2, 3)
    assert "at most 4096 patterns, got 4097" in wk.explain("pattern_layout", ids, patterns).refused["triton"]
    with pytest.raises(wk.UnsupportedError, match="at most 4096 patterns, got 4097"):
        wk.pattern_layout(ids, patterns, backend="triton")


def walked(patterns: Tensor) -> int:
    """Groups in which neighbours differ."""
    return int((patterns[:-1] != patterns[1:]).sum())


def test_similar_patterns_become_neighbours() -> None:
    steps = torch.arange(40)[:, None] > torch.arange(39)[None, :]  # each has one group more than the one before
    shuffled = steps[torch.randperm(40, generator=torch.Generator().manual_seed(0))]
    order = wk.similar_order(shuffled)
    assert order.dtype is torch.int64
    assert torch.equal(shuffled[order], steps)


@pytest.mark.parametrize("seed", range(6))
def test_a_chain_of_a_few_patterns_is_nearly_as_short_as_any(seed: int) -> None:
    patterns = torch.rand(6, 12, generator=torch.Generator().manual_seed(seed)) < 0.5
    shortest = min(walked(patterns[list(order)]) for order in itertools.permutations(range(6)))
    found = wk.similar_order(patterns)
    assert sorted(found.tolist()) == list(range(6))
    assert walked(patterns[found]) <= 1.1 * shortest


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_few_patterns_have_an_order_too(count: int) -> None:
    assert sorted(wk.similar_order(torch.ones(count, 3, dtype=torch.bool)).tolist()) == list(range(count))


def test_only_patterns_have_a_similar_order() -> None:
    with pytest.raises(wk.UnsupportedError, match="must be bool"):
        wk.similar_order(torch.ones(3, 2))
    with pytest.raises(wk.UnsupportedError, match=r"must be \[C, N_G\], got 1 dimensions"):
        wk.similar_order(torch.ones(3, dtype=torch.bool))

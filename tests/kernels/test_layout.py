"""The layout of a mask, on every backend."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import wide_kernels as wk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ("torch", "triton")


def random_mask(rows: int, groups: int, density: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(rows, groups, generator=generator) < density).to(DEVICE)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 700),
    groups=st.integers(1, 40),
    density=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_each_group_lists_its_rows_then_the_others_both_ascending(
    backend: str, rows: int, groups: int, density: float, seed: int
) -> None:
    mask = random_mask(rows, groups, density, seed)
    layout = wk.route_layout(mask, backend=backend)
    assert layout.index.dtype == layout.count.dtype == torch.int32
    assert torch.equal(layout.count.long(), mask.sum(0))
    for group in range(groups):
        run = mask[:, group].nonzero()[:, 0].tolist()
        skip = (~mask[:, group]).nonzero()[:, 0].tolist()
        assert layout.index[group].tolist() == run + skip
    assert (layout.rows, layout.groups) == (rows, groups)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_make_an_empty_layout(backend: str) -> None:
    layout = wk.route_layout(torch.zeros(0, 3, dtype=torch.bool, device=DEVICE), backend=backend)
    assert layout.index.shape == (3, 0)
    assert layout.count.tolist() == [0, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_transposed_mask_gives_the_layout_of_its_values(backend: str) -> None:
    mask = random_mask(5, 70, 0.5, 1).t()
    expected = wk.route_layout(mask.contiguous(), backend="torch")
    layout = wk.route_layout(mask, backend=backend)
    assert torch.equal(layout.index, expected.index)


@pytest.mark.parametrize(
    ("mask", "complaint"),
    [
        (torch.ones(4, 2), "must be bool"),
        (torch.ones(4, dtype=torch.bool), r"must be \[T, N_G\], got 1 dimensions"),
        (torch.ones(4, 0, dtype=torch.bool), "no groups"),
    ],
)
def test_what_is_no_mask_is_refused(mask: torch.Tensor, complaint: str) -> None:
    with pytest.raises(wk.UnsupportedError, match=complaint):
        wk.route_layout(mask)

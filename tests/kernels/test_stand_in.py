"""What stands in for skipped groups: its sums in `gemm_k` and `compensate`, what they read, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import wide_kernels as wk
from wide_kernels.tuning.table import force

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Sums of up to 1024 products of size 1 in another order; with fp16 operands u reduced is rounded to fp16 once (5e-4 of
# each product), as everything that is stored.
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-4}, torch.float16: {"rtol": 2e-3, "atol": 2e-2}}


def example(
    rows: int,
    groups: int,
    rank: int,
    width: int = 16,
    columns: int = 48,
    means: bool = True,
    dtype: torch.dtype = torch.float32,
    share: float = 0.5,
) -> dict[str, Any]:
    """Arguments of `gemm_k`, with NaN in every hidden group that a token skips."""
    generator = torch.Generator().manual_seed(rows + groups)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    mask = torch.rand(rows, groups, generator=generator) < share
    h = normal(rows, groups, width)
    h[~mask] = torch.nan
    up = normal(columns, rank) if rank else None
    weight = wk.stand_in_weight(normal(groups, columns) if means else None, up, groups, dtype)
    cast = [t.to(DEVICE, dtype) for t in (h.flatten(1), normal(columns, groups * width), normal(rows, columns))]
    reduced = normal(rows, rank).to(DEVICE, dtype) if rank else None
    found = dict(zip(("h", "weight", "residual"), cast, strict=True))
    return found | {"mask": mask.to(DEVICE), "stand_in": wk.StandIn(weight.to(DEVICE), reduced)}


def without(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != "stand_in"}


@pytest.mark.parametrize(("rank", "means"), [(0, True), (3, True), (3, False), (32, False)])
def test_torch_adds_a_mean_for_each_skipped_group_and_the_bypass_for_their_share(rank: int, means: bool) -> None:
    given = example(7, 5, rank, means=means)
    weight, reduced = given["stand_in"]
    assert weight.shape == (48, 16 if rank < 12 else 48)
    expected = wk.gemm_k(**without(given), backend="torch")
    for t in range(7):
        skipped = [g for g in range(5) if not given["mask"][t, g]]
        for g in skipped:
            expected[t] += weight[:, g]
        if reduced is not None:
            expected[t] += len(skipped) / 5 * (weight[:, 5 : 5 + rank] @ reduced[t])
    torch.testing.assert_close(wk.gemm_k(**given, backend="torch"), expected, rtol=1e-5, atol=1e-5)
    if not means:
        assert not weight[:, :5].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("groups", "width", "rank", "means"),
    [
        (28, 16, 32, True),
        (3, 128, 32, True),
        (6, 64, 0, True),
        (8, 48, 128, False),
        (1, 32, 5, True),
        (2, 512, 8, True),
    ],
)
@pytest.mark.parametrize(("rows", "early"), [(1, False), (1, True), (5, False), (5, True), (40, True)])
def test_triton_adds_what_torch_does(
    rows: int, groups: int, width: int, rank: int, means: bool, early: bool, dtype: torch.dtype
) -> None:
    given = example(rows, groups, rank, width, means=means, dtype=dtype)
    expected = wk.gemm_k(**given, backend="torch")
    y = wk.gemm_k(**given, early=early, backend="triton")
    torch.testing.assert_close(y, expected, **CLOSE[dtype])


@pytest.mark.parametrize("listed", [0, 1])
@pytest.mark.parametrize(("chunks", "rank"), [(16, 128), (64, 32)])
def test_one_row_in_steps_shorter_than_what_stands_in(chunks: int, rank: int, listed: int) -> None:
    given = example(1, 28, rank, columns=16)
    expected = wk.gemm_k(**given, backend="torch")
    with force("vector_k", {"BC": chunks, "LISTED": listed}):
        torch.testing.assert_close(wk.gemm_k(**given, backend="triton"), expected, **CLOSE[torch.float32])


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("rows", [5, 140])
def test_splits_share_out_what_stands_in(rows: int, splits: int) -> None:
    given = example(rows, 80, 70)  # 160 columns, three steps of 64
    expected = wk.gemm_k(**given, backend="torch")
    with force("few_rows_k", {"SPLITS": splits, "BN": 32, "BK": 16}):
        y = wk.gemm_k(**given, deterministic=True, backend="triton")
    torch.testing.assert_close(y, expected, **CLOSE[torch.float32])


@pytest.mark.parametrize("accumulate", ["fp32", "deterministic"])
@pytest.mark.slow
def test_many_rows_start_from_what_stands_in(accumulate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from wide_kernels.gemm_k import triton

    monkeypatch.setattr(triton, "FEW_FIXED_ROWS", 0)
    for sizes in ({"groups": 7, "rank": 32, "columns": 80}, {"groups": 3, "rank": 0}, {"groups": 2, "rank": 5}):
        given = example(150, **sizes, means=sizes["rank"] != 5)
        layout = wk.route_layout(given.pop("mask"))
        expected = wk.gemm_k(**given, layout=layout, backend="torch")
        y = wk.gemm_k(**given, layout=layout, deterministic=accumulate == "deterministic", backend="triton")
        torch.testing.assert_close(y, expected, **CLOSE[torch.float32])


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("rows", [1, 5])
def test_where_nothing_is_skipped_the_product_is_the_same_bit_for_bit(rows: int, backend: str) -> None:
    given = example(rows, 9, 32, share=1.0)
    assert torch.equal(wk.gemm_k(**given, backend=backend), wk.gemm_k(**without(given), backend=backend))


@pytest.mark.parametrize(("rows", "residual"), [(1, False), (1, True), (5, False), (5, True), (140, False)])
def test_where_everything_is_skipped_it_is_all_there_is(rows: int, residual: bool) -> None:
    given = example(rows, 9, 32, share=0.0)
    weight, reduced = given["stand_in"]
    expected = weight[:, :9].sum(1) + reduced @ weight[:, 9:41].t()
    if residual:
        expected = expected + given["residual"]
    else:
        del given["residual"]
    torch.testing.assert_close(wk.gemm_k(**given, backend="triton"), expected, **CLOSE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("groups", "rank", "columns"), [(24, 32, 80), (3, 0, 48), (112, 32, 144), (1, 128, 16)])
@pytest.mark.parametrize("rows", [1, 70])
def test_compensate_adds_what_gemm_k_does(rows: int, groups: int, rank: int, columns: int, dtype: torch.dtype) -> None:
    given = example(rows, groups, rank, columns=columns, dtype=dtype)
    stand_in, residual, mask = (given[name] for name in ("stand_in", "residual", "mask"))
    zeros = torch.zeros(rows, groups * 16, dtype=dtype, device=DEVICE)
    expected = wk.gemm_k(zeros, given["weight"], residual=residual, mask=mask, stand_in=stand_in, backend="torch")
    before = residual.clone()
    for form in ({"mask": mask}, {"layout": wk.route_layout(mask)}):
        y = wk.compensate(residual, stand_in, **form, backend="triton")
        torch.testing.assert_close(y, expected, **CLOSE[dtype])
    assert torch.equal(residual, before)


@pytest.mark.parametrize(("groups", "rank", "columns"), [(24, 32, 80), (3, 0, 48), (112, 32, 144), (16, 0, 16)])
def test_very_many_rows_walk_along_the_columns(
    groups: int, rank: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wide_kernels.compensate import configs

    monkeypatch.setattr(configs, "WALKING_ROWS", 64)
    given = example(200, groups, rank, columns=columns, dtype=torch.float16)
    stand_in, residual, mask = (given[name] for name in ("stand_in", "residual", "mask"))
    assert configs.walk_config(200, columns, stand_in.weight.shape[1], torch.float16, residual.device) is not None
    expected = wk.compensate(residual, stand_in, mask=mask, backend="torch")
    y = wk.compensate(residual, stand_in, mask=mask, backend="triton")
    torch.testing.assert_close(y, expected, **CLOSE[torch.float16])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_rows_give_no_rows(backend: str) -> None:
    given = example(3, 2, 4)
    stand_in = wk.StandIn(given["stand_in"].weight, given["stand_in"].reduced[:0])
    some = {name: given[name][:0] for name in ("residual", "mask")}
    assert wk.compensate(**some, stand_in=stand_in, backend=backend).shape == (0, 48)
    h, weight = given["h"][:0], given["weight"]
    assert wk.gemm_k(h, weight, **some, stand_in=stand_in, backend=backend).shape == (0, 48)


def test_masks_and_rows_that_stand_apart() -> None:
    given = example(4, 10, 8)
    expected = wk.gemm_k(**given, backend="torch")
    weight, reduced = given["stand_in"]
    apart = torch.zeros(4, 16, device=DEVICE)
    apart[:, ::2] = reduced
    given |= {"mask": given["mask"].t().contiguous().t(), "stand_in": wk.StandIn(weight, apart[:, ::2])}
    for rows in (1, 4):
        some = {name: given[name][:rows] for name in ("h", "residual", "mask")}
        stand_in = wk.StandIn(weight, apart[:rows, ::2])
        y = wk.gemm_k(**some, weight=given["weight"], stand_in=stand_in, early=True, backend="triton")
        torch.testing.assert_close(y, expected[:rows], **CLOSE[torch.float32])


def test_gradients_reach_what_stands_in() -> None:
    given = example(4, 2, 4, columns=16)
    given["h"] = torch.nan_to_num(given["h"])
    standing, reduced = (tensor.double().requires_grad_() for tensor in given["stand_in"])
    h, weight, residual = (given[name].double().requires_grad_() for name in ("h", "weight", "residual"))

    def projected(h: Tensor, weight: Tensor, residual: Tensor, standing: Tensor, reduced: Tensor) -> Tensor:
        stand_in = wk.StandIn(standing, reduced)
        return wk.gemm_k(h, weight, mask=given["mask"], residual=residual, stand_in=stand_in, backend="torch")

    assert torch.autograd.gradcheck(projected, (h, weight, residual, standing, reduced), fast_mode=True)

    def compensated(residual: Tensor, standing: Tensor, reduced: Tensor) -> Tensor:
        return wk.compensate(residual, wk.StandIn(standing, reduced), mask=given["mask"], backend="torch")

    assert torch.autograd.gradcheck(compensated, (residual, standing, reduced))


GIVEN = example(3, 2, 4)
WEIGHT, REDUCED = GIVEN["stand_in"]


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"stand_in": wk.StandIn(WEIGHT[:, :4].contiguous(), REDUCED)}, "2 groups and 4 of the bypass, got 4"),
        ({"stand_in": wk.StandIn(WEIGHT[:32], REDUCED)}, "N of the weight of stand_in must be 48, got 32"),
        ({"stand_in": wk.StandIn(WEIGHT, REDUCED[:2])}, "T of the reduced of stand_in must be 3, got 2"),
        ({"stand_in": wk.StandIn(WEIGHT.half(), REDUCED)}, "weight of stand_in is torch.float16"),
        ({"stand_in": wk.StandIn(WEIGHT, REDUCED.half())}, "reduced of stand_in is torch.float16"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changed: dict[str, Any], complaint: str) -> None:
    with pytest.raises(wk.UnsupportedError, match=f"gemm_k: .*{complaint}"):
        wk.gemm_k(**(GIVEN | changed))
    given = {name: value for name, value in (GIVEN | changed).items() if name not in ("h", "weight")}
    with pytest.raises(wk.UnsupportedError, match=f"compensate: .*{complaint}"):
        wk.compensate(**given)


def test_triton_wants_columns_that_fill_tiles() -> None:
    narrow = wk.StandIn(WEIGHT[:, :7].contiguous(), REDUCED)
    with pytest.raises(wk.UnsupportedError, match="P of the weight of stand_in must be a multiple of 16, got 7"):
        wk.gemm_k(**(GIVEN | {"stand_in": narrow}), backend="triton")


@pytest.mark.parametrize(("mean", "up"), [(None, None), (torch.ones(2, 8), torch.ones(9, 4)), (torch.ones(3, 8), None)])
def test_weights_that_do_not_fit_are_not_packed(mean: Tensor | None, up: Tensor | None) -> None:
    with pytest.raises(wk.UnsupportedError, match="stand_in_weight"):
        wk.stand_in_weight(mean, up, 2, torch.float32)

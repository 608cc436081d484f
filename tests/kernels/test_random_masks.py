"""Random masks to measure with: how many groups they skip is not left to chance."""

from __future__ import annotations

import pytest
import torch

from wide_kernels.random_masks import random_masks


@pytest.mark.parametrize("groups", [3, 8, 28, 112])
@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.3, 0.5, 0.7, 1.0])
def test_few_rows_skip_the_share_asked_for_too(sparsity: float, groups: int) -> None:
    found = []
    for number in range(0, 64, 2):  # one row in the 32 layers of a model, where two parts decide
        generator = torch.Generator().manual_seed(number)
        mask = random_masks((1, groups), sparsity, number, generator, torch.device("cpu"))
        skipped, asked = int((~mask).sum()), sparsity * groups
        assert skipped == round(asked) if abs(asked - round(asked)) < 1e-9 else abs(skipped - asked) < 1
        found.append((~mask).double().mean())
    assert float(torch.stack(found).mean()) == pytest.approx(sparsity, abs=0.1 / groups)
    rows = random_masks((512, groups), sparsity, 5, torch.Generator().manual_seed(5), torch.device("cpu"))
    assert float((~rows).double().mean()) == pytest.approx(sparsity, abs=0.01 / groups)
    assert rows.double().mean(0).sub(1 - sparsity).abs().max() < 0.1, "each group as often as the others"


@pytest.mark.parametrize(("density", "groups", "skipped"), [(0.9, 10, 1), (0.8, 40, 8), (0.9, 200, 20), (0.8, 8, 2)])
def test_a_row_alone_skips_the_nearest_number(density: float, groups: int, skipped: int) -> None:
    mask = random_masks((1, groups), 1 - density, 0, None, torch.device("cpu"))
    assert int((~mask).sum()) == skipped

"""Random masks to measure with: how many groups they skip is not left to chance."""

from __future__ import annotations

import pytest
import torch

from wide_kernels.benchmarks.masks import random_masks


@pytest.mark.parametrize("groups", [3, 8, 28, 112])
@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.3, 0.5, 0.7, 1.0])
def test_few_rows_skip_the_share_asked_for_too(sparsity: float, groups: int) -> None:
    found = []
    for number in range(0, 64, 2):  # one row in the 32 layers of a model, where two parts decide
        generator = torch.Generator().manual_seed(number)
        mask = random_masks((1, groups), sparsity, number, generator, torch.device("cpu"))
        assert abs(int((~mask).sum()) - sparsity * groups) < 1
        found.append((~mask).double().mean())
    assert float(torch.stack(found).mean()) == pytest.approx(sparsity, abs=0.1 / groups)
    rows = random_masks((512, groups), sparsity, 5, torch.Generator().manual_seed(5), torch.device("cpu"))
    assert float((~rows).double().mean()) == pytest.approx(sparsity, abs=0.01 / groups)
    assert rows.double().mean(0).sub(1 - sparsity).abs().max() < 0.1, "each group as often as the others"

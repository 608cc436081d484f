from __future__ import annotations

from pathlib import Path

import pytest

from stored_runs import speed_point, write_evaluation, write_pair, write_profile


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A small study: dense, two sparsities, three seeds at one of them, a token-mode run, a profile."""
    folder = tmp_path / "runs"
    write_evaluation(folder, "dense", perplexity=20.0, accuracy=0.5)
    write_pair(folder, "s25", sparsity=0.25, perplexity=24.0, accuracy=0.48)
    for seed, perplexity in enumerate((50.0, 53.0, 56.0)):
        write_pair(folder, f"s50-seed{seed}", seed=seed, perplexity=perplexity, accuracy=0.44 + 0.01 * seed)
    write_pair(folder, "s50-token", mode="token", perplexity=200.0, accuracy=0.35, sparsity=0.45)
    write_profile(folder, "s25", of="s25", points=[speed_point("ttft", 1.2), speed_point("tpot", 1.1)])
    return folder

"""Without a GPU, Triton kernels run in Triton's interpreter; see tests/conftest.py."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels under test run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _no_backend_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WIDE_KERNELS_BACKEND", raising=False)

"""Shared fixtures. No test talks to the Hub or to W&B, and none writes outside its own folder."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Read once at import by the Hub's libraries: set before any test module imports them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "disabled"
# where transformers copies the code that comes with a model
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="modules-of-models-")
atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tiny tensors: more threads only get into each other's way, and one thread makes results repeatable.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if not torch.cuda.is_available():
    # Triton decides at its import, by whichever test comes first, whether kernels run in its slow interpreter. The
    # tests of the kernels themselves want that; all others take the torch backend (tests/kernels lifts it for its own).
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["WIDE_KERNELS_BACKEND"] = "torch"

# The same examples in every run: a change is judged by its own failures. HYPOTHESIS_PROFILE=hunt looks for new ones.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("hunt", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder with real text and evaluation sets: `WIDE_TEST_DATA`, else `shared/data` beside the checkout."""
    named = os.environ.get("WIDE_TEST_DATA")
    root = Path(named) if named else REPOSITORY.parent / "shared" / "data"
    if not root.is_dir():
        pytest.skip(f"no test data at {root}: name its folder in WIDE_TEST_DATA")
    return root


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Caches of the product lie in a temporary folder, and flags of the developer's shell don't leak in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "xdg-cache"))
    for name in ("WIDE_DEBUG", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_DIR", "WANDB_PROJECT", "WANDB_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    yield

"""Choosing a backend: by argument, by environment, by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import wide_kernels as wk
from wide_kernels import dispatch
from wide_kernels.dispatch import Problem, choose

CPU = torch.device("cpu")


@pytest.fixture
def compiled_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a user's process: no interpreter."""
    monkeypatch.setattr(dispatch, "interpreted", lambda: False)


def test_importing_the_package_imports_neither_torch_nor_triton(repository: Path) -> None:
    code = "import sys, wide_kernels; print([m for m in ('torch', 'triton', 'widecli') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repository / "kernels", capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there_whatever_was_imported_before() -> None:
    from wide_kernels.gemm_mn.launch import gated_mlp_up, gemm_mn

    assert wk.gemm_mn is gemm_mn
    assert wk.gated_mlp_up is gated_mlp_up
    assert all(callable(getattr(wk, name)) for name in wk.__all__)
    with pytest.raises(AttributeError, match="no attribute 'gemm'"):
        _ = wk.gemm


@pytest.mark.usefixtures("compiled_only")
def test_auto_takes_torch_on_a_cpu_and_explain_says_why() -> None:
    problem = Problem("gemm_k", CPU, torch.float32)
    assert choose(problem, "auto") == "torch"
    mask = torch.ones(2, 2, dtype=torch.bool)
    explanation = wk.explain("gemm_k", torch.ones(2, 32), torch.ones(16, 32), mask=mask)
    assert explanation.backend == "torch"
    assert explanation.refused["triton"] == "it needs a CUDA device, the tensors are on cpu"
    assert "gemm_k runs on torch" in str(explanation)


@pytest.mark.usefixtures("compiled_only")
def test_a_backend_named_by_hand_refuses_instead_of_falling_back() -> None:
    with pytest.raises(wk.UnsupportedError, match="the triton backend cannot run this: it needs a CUDA device"):
        choose(Problem("gemm_k", CPU, torch.float32), "triton")


def test_auto_passes_over_a_slower_backend_that_can_still_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "interpreted", lambda: True)
    problem = Problem("gemm_k", CPU, torch.float32, passed_over={"triton": "it is slower here"})
    assert choose(problem, "auto") == "torch"
    assert dispatch._decide(problem, "auto").refused["triton"] == "it is slower here"
    assert choose(problem, "triton") == "triton"


def test_the_environment_names_a_backend_and_an_argument_overrules_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "interpreted", lambda: True)
    problem = Problem("gemm_k", CPU, torch.float32)
    monkeypatch.setenv("WIDE_KERNELS_BACKEND", "torch")
    assert choose(problem, "auto") == "torch"
    assert choose(problem, "triton") == "triton"
    monkeypatch.setenv("WIDE_KERNELS_BACKEND", "cutlass")
    with pytest.raises(wk.UnsupportedError, match="no backend 'cutlass'; choose one of auto, torch, triton, gluon"):
        choose(problem, "auto")


@pytest.mark.parametrize(
    ("problem", "complaint"),
    [
        (Problem("gemm_k", CPU, torch.float64), "takes float16, bfloat16, float32, not float64"),
        (Problem("gemm_k", CPU, torch.bfloat16), "interpreter multiplies bfloat16 wrongly"),
        (Problem("gemm_k", CPU, torch.float32, {"N": 40}), "N must be a multiple of 16, got 40"),
        (Problem("gemm_k", CPU, torch.float32, {}, ("weight",)), "weight must be contiguous"),
        (Problem("attention_decode", CPU, torch.float32, refused={"triton": "too long"}), "run this: too long"),
    ],
)
def test_what_triton_cannot_take_is_named(problem: Problem, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "interpreted", lambda: True)
    with pytest.raises(wk.UnsupportedError, match=complaint):
        choose(problem, "triton")
    assert choose(problem, "auto") == "torch"


def test_an_old_gpu_is_refused_by_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_capability", lambda index: (7, 5))
    problem = Problem("gemm_k", torch.device("cuda", 0), torch.float16)
    with pytest.raises(wk.UnsupportedError, match=r"8\.0 or newer, this GPU has 7\.5"):
        choose(problem, "triton")
    dispatch._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="runs on the torch backend, which skips nothing"):
        assert choose(problem, "auto") == "torch"


def test_gluon_wants_hopper_a_new_triton_half_precision_and_what_the_operator_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = torch.device("cuda", 0)
    refusal = dispatch._REFUSALS["gluon"]
    assert refusal(Problem("gemm_mn", CPU, torch.float16)) == "it needs a Hopper GPU, the tensors are on cpu"
    monkeypatch.setattr(dispatch, "TRITON_VERSION", (3, 10))
    monkeypatch.setattr(dispatch, "_capability", lambda index: (9, 0))
    assert refusal(Problem("gemm_mn", gpu, torch.float16)) is None
    assert refusal(Problem("gemm_mn", gpu, torch.float32)) == "it takes float16, bfloat16, not float32"
    assert refusal(Problem("gemm_mn", gpu, torch.float16, refused={"gluon": "rows"})) == "rows"
    assert "contiguous" in str(refusal(Problem("gemm_mn", gpu, torch.float16, strided=("weight",))))
    monkeypatch.setattr(dispatch, "TRITON_VERSION", (3, 5))
    assert refusal(Problem("gemm_mn", gpu, torch.float16)) == "it needs Triton 3.6 or newer, this is 3.5"
    monkeypatch.setattr(dispatch, "_capability", lambda index: (10, 0))
    assert "9.0 (Hopper), this GPU has 10.0" in str(refusal(Problem("gemm_mn", gpu, torch.float16)))


def test_backends_and_operators_are_listed() -> None:
    available = wk.available_backends()
    assert set(available) == set(dispatch.OPERATORS)
    assert all(backends[-1] == "torch" for backends in available.values())
    with pytest.raises(wk.UnsupportedError, match="no operator 'gemm_q'; choose one of route_layout"):
        wk.explain("gemm_q")


def test_the_library_knows_nothing_of_the_product(repository: Path) -> None:
    sources = (repository / "kernels" / "wide_kernels").rglob("*.py")
    assert [path.name for path in sources if "widecli" in path.read_text(encoding="utf-8")] == []

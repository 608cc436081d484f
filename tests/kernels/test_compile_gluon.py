"""The Gluon kernels compile for Hopper, with the Triton of this Python or of the one in WIDE_TRITON36_PYTHON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from wide_kernels.dispatch import GLUON_SINCE, TRITON_VERSION

pytestmark = pytest.mark.slow

SHARED_BYTES = 227 << 10  # what a program may use


@pytest.fixture(scope="module")
def compiled(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    python = os.environ.get("WIDE_TRITON36_PYTHON")
    if python is None and TRITON_VERSION < GLUON_SINCE:
        pytest.skip("needs Triton 3.6 or newer here, or in the Python named by WIDE_TRITON36_PYTHON")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": str(repository / "kernels"),
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
    }
    script = Path(__file__).with_name("compile_gluon.py")
    done = subprocess.run(
        [python or sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)["kernels"]
    return found


def test_every_kernel_fits_into_shared_memory(compiled: dict[str, Any]) -> None:
    assert len(compiled) >= 8
    assert {name: kernel["shared"] for name, kernel in compiled.items() if kernel["shared"] > SHARED_BYTES} == {}


def test_rows_are_gathered_weights_come_by_tma_and_products_run_on_warpgroups(compiled: dict[str, Any]) -> None:
    products = {name: kernel for name, kernel in compiled.items() if not name.startswith("attention")}
    for mark in ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg", "cp.async.cg.shared"):
        assert [name for name, kernel in products.items() if not kernel[mark]] == [], mark


def test_decode_attention_copies_keys_in_packets_and_reads_what_others_publish_past_the_first_cache(
    compiled: dict[str, Any],
) -> None:
    decode = {name: kernel for name, kernel in compiled.items() if name.startswith("attention_decode")}
    assert len(decode) == 3
    for mark in ("cp.async.cg.shared", "ldmatrix", "mma.sync", "ld.volatile.global.v4"):
        assert [name for name, kernel in decode.items() if not kernel[mark]] == [], mark
    assert [name for name, kernel in decode.items() if kernel["shared"] <= 64 << 10] == []  # the ring is deep


def test_gate_and_up_are_one_product(compiled: dict[str, Any]) -> None:
    fused = compiled["gated_mlp_up 128"]
    assert fused["m64n256k16"] == fused["wgmma.mma_async"] > 0


def test_partial_sums_are_added_16_bytes_at_a_time(compiled: dict[str, Any]) -> None:
    assert [name for name, kernel in compiled.items() if kernel["add.noftz.v8.bf16"]] == [
        name for name in compiled if name.startswith("gemm_k")
    ]

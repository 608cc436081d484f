"""The Triton kernels compile for GPUs that this machine doesn't have, tensor cores and pipelines included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

# What a program may use: 227 KB on Hopper, 163 KB on A100.
SHARED_BYTES = {"sm_90": 227 << 10, "sm_80": 163 << 10}


@pytest.fixture(scope="module", params=list(SHARED_BYTES))
def compiled(
    request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": os.pathsep.join(str(repository / folder) for folder in ("kernels", "src")),
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
    }
    script = Path(__file__).with_name("compile_only.py")
    done = subprocess.run(
        [sys.executable, str(script), request.param], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_kernel_compiles_and_fits_into_shared_memory(compiled: dict[str, Any]) -> None:
    limit = SHARED_BYTES[compiled["target"]]
    assert len(compiled["kernels"]) > 15
    assert {name: k["shared"] for name, k in compiled["kernels"].items() if k["shared"] > limit} == {}


def test_products_run_on_tensor_cores(compiled: dict[str, Any]) -> None:
    one_by_one = ("norm_route 1 ", "norm_route in pieces 1 ")  # one row would fill a sixteenth of a tensor core
    products = {name: k for name, k in compiled["kernels"].items() if name.startswith(("tile", "few", "norm_route"))}
    products = {name: k for name, k in products.items() if not name.startswith(one_by_one)}
    assert [name for name, k in products.items() if not k["mma"]] == []
    if compiled["target"] == "sm_90":
        assert [name for name, k in products.items() if name.startswith(("tile", "few_rows")) and not k["wgmma"]] == []


def test_scattered_sums_are_added_16_bytes_at_a_time(compiled: dict[str, Any]) -> None:
    sums = {name: k for name, k in compiled["kernels"].items() if name.startswith("tile_k")}  # others count by atomics
    adds = {name: k["narrowest_add"] for name, k in sums.items() if k["narrowest_add"]}
    if compiled["target"] == "sm_90":
        assert adds == {"tile_k atomic=True *fp32 bfloat16": 4, "tile_k atomic=True *bf16 bfloat16": 8}


def test_loads_for_a_few_rows_are_pipelined(compiled: dict[str, Any]) -> None:
    # Three stages in flight at least: (64 + 16) x 128 x 2 bytes each.
    assert compiled["kernels"]["few_rows_k 16 bfloat16"]["shared"] >= 3 * 20480


def test_one_row_reads_weights_16_bytes_at_a_time(compiled: dict[str, Any]) -> None:
    # 4 columns x 128 or 256 chunks of 16 bytes over 128 threads, and the row itself; the first step stands apart.
    steps = {"vector_k early=True": 10, "vector_k early=False": 10, "vector_mn gated=False": 10}
    # what stands in for skipped groups is narrower: 16 chunks x 4 columns, of which each thread takes half a chunk
    steps |= {"vector_k early=True standing": 10}
    for name, loads in (steps | {"vector_mn dense": 20, "vector_mn gated=True": 10}).items():
        assert compiled["kernels"][f"{name} bfloat16"]["16-byte loads"] >= loads


def test_no_two_threads_poll_the_same_word(compiled: dict[str, Any]) -> None:
    for name in ("norm_route 1", "norm_route in pieces 1"):
        assert compiled["kernels"][f"{name} bfloat16"]["copied"] == [False] * 2  # the first look, and in the loop
        # of the chunks, and of the one that gathers what the bypass reads
        assert compiled["kernels"][f"{name} bypass bfloat16"]["copied"] == [False] * 4


def test_no_copy_lands_in_what_products_in_flight_still_read(compiled: dict[str, Any]) -> None:
    # The compiler's own pipelines do so where threads read a tile that tensor cores read, too.
    found = {name: k["overwritten"] for name, k in compiled["kernels"].items() if k.get("overwritten")}
    assert found == {}


def test_a_copy_into_what_products_in_flight_read_is_found() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    from compile_only import overwritten

    def pipeline(slots: int, wait: str) -> str:
        return f"""
    %ring = ttg.local_alloc : () -> !ttg.memdesc<{slots}x64x64xbf16, #shared, #smem, mutable>
    %first = ttg.memdesc_index %ring[%c0] : !ttg.memdesc<{slots}x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
    %token = ttg.async_copy_global_to_local %pointers, %first mask %known : tensor<64x64x!tt.ptr<bf16>>
    %second = ttg.memdesc_index %ring[%c1] : !ttg.memdesc<{slots}x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
    %more = ttg.async_copy_global_to_local %pointers, %second mask %known : tensor<64x64x!tt.ptr<bf16>>
    %sum:2 = scf.for %i = %c0 to %c8 step %c1 iter_args(%acc = %zeros) -> (tensor<64x32xf32, #mma>)  : i32 {{
      %here = ttg.memdesc_index %ring[%i] : !ttg.memdesc<{slots}x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
      %next = ttng.warp_group_dot %here, %weight, %acc {{isAsync = true}} : !ttg.memdesc<64x64xbf16>
      {wait}
      %there = ttg.memdesc_index %ring[%k] : !ttg.memdesc<{slots}x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
      %last = ttg.async_copy_global_to_local %pointers, %there mask %known : tensor<64x64x!tt.ptr<bf16>>
      scf.yield %next : tensor<64x32xf32, #mma>
    }}
"""

    def waited(pendings: int) -> str:
        return f"%done = ttng.warp_group_dot_wait %next {{pendings = {pendings} : i32}} : tensor<64x32xf32, #mma>"

    assert overwritten(pipeline(2, waited(0))) == []
    assert overwritten(pipeline(2, waited(1))) == ["ring"]
    assert overwritten(pipeline(2, "")) == ["ring"]
    assert overwritten(pipeline(3, waited(1))) == []
    assert overwritten(pipeline(3, "")) == ["ring"], "the one of the step before is in flight, too"

"""Compiles the Triton kernels for a GPU that need not be there: `python compile_only.py sm_90` prints JSON.

Run in a process of its own: the kernels of a process are either compiled or interpreted. The sizes are those of
Llama-3.1-8B with groups of 128, the configurations the ones that the launchers choose.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from wide_kernels import compaction
from wide_kernels.gemm_k import configs as k_configs
from wide_kernels.gemm_k import sorting
from wide_kernels.gemm_k import triton as k_kernels
from wide_kernels.gemm_mn import configs as mn_configs
from wide_kernels.gemm_mn import triton as mn_kernels
from wide_kernels.norm_route import configs as norm_configs
from wide_kernels.norm_route import triton as norm_kernels

D, F, G, T, RANK = 4096, 14336, 128, 16384, 32
GROUPS = F // G
OPTIONS = ("num_warps", "num_stages")


def compiled(kernel: Any, types: str, values: dict[str, Any], target: GPUTarget) -> dict[str, Any]:
    """Compile `kernel` whose run-time arguments have these types, in order; the rest are compile-time `values`."""
    names = [name for name in kernel.arg_names if name not in values]
    assert len(names) == len(types.split()), f"{kernel.__name__}: {names}"
    given = dict(zip(names, types.split(), strict=True))
    signature = {name: given.get(name, "constexpr") for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): value for name, value in values.items() if name not in OPTIONS}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name.startswith("stride")
    }
    source = ASTSource(kernel, signature, constants, aligned)
    binary = triton.compile(source, target=target, options={key: values[key] for key in OPTIONS if key in values})
    return {"shared": binary.metadata.shared, "wgmma": "wgmma" in binary.asm["ptx"], "mma": "mma" in binary.asm["ptx"]}


def kernels(dtype: torch.dtype) -> dict[str, tuple[Any, str, dict[str, Any]]]:
    """Name -> (kernel, types of its run-time arguments, compile-time values)."""
    p = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
    precision = "ieee" if dtype is torch.float32 else "tf32"
    found: dict[str, tuple[Any, str, dict[str, Any]]] = {}
    mn: dict[str, Any] = {"N": F, "K": D, "G": G, "HAS_BIAS": True, "PRECISION": precision}
    for gated in (False, True):
        values = mn | {"GATED": gated, "ACTIVATION": "silu" if gated else "gelu"}
        types = " ".join([p] * 5)
        found[f"tile_mn gated={gated}"] = (
            mn_kernels.tile_kernel,
            f"{types} *i32 *i32 i32 i32",
            values | mn_configs.tile_config(T, D, G, gated, dtype),
        )
        for rows in (1, 64):
            found[f"few_rows_mn {rows} gated={gated}"] = (
                mn_kernels.few_rows_kernel,
                f"{types} *u8 i32 i32",
                values | mn_configs.few_rows_config(rows, D, G, gated, dtype),
            )
    k: dict[str, Any] = {"N": D, "K": F, "G": G, "PRECISION": precision}
    tile = k_configs.tile_config(T, D, G, dtype)
    for atomic, out in ((True, "*fp32"), (False, "*fp32"), (True, p)):
        found[f"tile_k atomic={atomic} {out}"] = (
            k_kernels.tile_kernel,
            f"{p} {p} {out} *i32 *i32 i32 i32 i32 i32 i32",
            k | {"S": k_configs.sorted_groups(T, GROUPS), "ATOMIC": atomic, "SLAB": 4} | tile,
        )
    for rows in (1, 64):
        found[f"few_rows_k {rows}"] = (
            k_kernels.few_rows_kernel,
            f"{p} {p} {p} {p} *fp32 *i32 *i64 *u8 i32 i32",
            k
            | {"N_G": GROUPS, "N_G_PADDED": 128, "HAS_RESIDUAL": True}
            | k_configs.few_rows_config(rows, D, G, GROUPS, dtype),
        )
    found["reduce_k"] = (
        k_kernels.reduce_kernel,
        f"*fp32 {p} {p} i32",
        {"HAS_RESIDUAL": True, "SPLITS": 4, "BLOCK": 512},
    )
    for rows in (1, T):
        found[f"norm_route {rows}"] = (
            norm_kernels.chunk_kernel,
            f"{p} {p} *fp32 *fp32 *fp32 *fp32 *fp32 *fp32 {p} *u8 *i32 i32 fp32",
            {"D": D, "R": RANK, "RP": RANK, "N_G": GROUPS, "NORMALISED": True, "TAP_EPS": 1e-6, "HALVES": "both"}
            | {"PARTS": 1 if dtype is torch.float32 else 2}
            | norm_configs.chunk_config(rows, D),
        )
    return found


def sorting_kernels() -> dict[str, tuple[Any, str, dict[str, Any]]]:
    """The kernels that only see masks."""
    place: dict[str, Any] = {"N_G": GROUPS, "HALVES": "both", "PARTS": compaction.PARTS}
    sort: dict[str, Any] = {"N_G": GROUPS, "S": 7, "BLOCK_T": sorting.BLOCK_ROWS, "num_warps": 8}
    return {
        f"layout {rows}": (
            compaction.place_kernel,
            "*u8 *i32 *i32 *i32 *i32 i32 i32",
            place | compaction.layout_config(rows, GROUPS),
        )
        for rows in (64, T)
    } | {
        "sort_count": (sorting.count_kernel, "*u8 *i32 i32 i32", sort),
        "sort_scan": (sorting.scan_kernel, "*i32 i32", {"BLOCK": sorting.SCAN, "num_warps": 8}),
        "sort_place": (sorting.place_kernel, "*u8 *i32 *i32 *i32 i32 i32", sort),
    }


def main() -> None:
    """Compile everything for the target named on the command line, in bf16 or the dtypes named after it."""
    target = GPUTarget("cuda", int(sys.argv[1].removeprefix("sm_")), 32)
    result: dict[str, Any] = {"triton": triton.__version__, "target": sys.argv[1], "kernels": {}}
    for name, (kernel, types, values) in sorting_kernels().items():
        result["kernels"][name] = compiled(kernel, types, values, target)
    for dtype in sys.argv[2:] or ["bfloat16"]:
        for name, (kernel, types, values) in kernels(getattr(torch, dtype)).items():
            result["kernels"][f"{name} {dtype}"] = compiled(kernel, types, values, target)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

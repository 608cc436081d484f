"""Compiles the Triton kernels for a GPU that need not be there: `python compile_only.py sm_90` prints JSON.

Run in a process of its own: the kernels of a process are either compiled or interpreted. The sizes are those of
Llama-3.1-8B with groups of 128, the configurations the ones that the launchers choose.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from wide_kernels import compaction
from wide_kernels.attention_decode import triton as decode_kernels
from wide_kernels.attention_prefill import configs as prefill_configs
from wide_kernels.attention_prefill import triton as prefill_kernels
from wide_kernels.compensate import configs as compensate_configs
from wide_kernels.compensate import triton as compensate_kernels
from wide_kernels.gemm_k import configs as k_configs
from wide_kernels.gemm_k import few_rows as k_few
from wide_kernels.gemm_k import one_row as k_one
from wide_kernels.gemm_k import sorting
from wide_kernels.gemm_k import triton as k_kernels
from wide_kernels.gemm_k.segments import TILE_ROWS
from wide_kernels.gemm_mn import configs as mn_configs
from wide_kernels.gemm_mn import few_rows as mn_few
from wide_kernels.gemm_mn import one_row as mn_one
from wide_kernels.gemm_mn import triton as mn_kernels
from wide_kernels.norm_route import configs as norm_configs
from wide_kernels.norm_route import few_rows as norm_rows
from wide_kernels.norm_route import triton as norm_kernels

D, F, G, T, RANK = 4096, 14336, 128, 16384, 32
GROUPS = F // G
BYPASS = 32  # rank of the bypass around skipped groups; with their means it makes STANDING columns
STANDING = GROUPS + BYPASS
OPTIONS = ("num_warps", "num_stages", "maxnreg")
ANYWHERE = torch.device("cpu")  # configurations that differ on a GPU at hand take that of none


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
        if signature[name].startswith("*") or name.startswith("stride") or name == "first_column"
    }
    source = ASTSource(kernel, signature, constants, aligned)
    binary = triton.compile(source, target=target, options={key: values[key] for key in OPTIONS if key in values})
    ptx = binary.asm["ptx"]
    adds = [int(width or 1) for width in re.findall(r"(?:red|atom)\.global\S*add(?:\.noftz)?(?:\.v(\d))?", ptx)]
    loads = len(re.findall(r"ld\.global\S*\.v4\.b32|cp\.async\.cg[^;]* 0x10,", ptx))
    return {
        "shared": binary.metadata.shared,
        "wgmma": "wgmma" in ptx,
        "mma": "mma" in ptx,
        "narrowest_add": min(adds, default=0),
        "16-byte loads": loads,
        "copied": copied(binary.asm["ttgir"]),
        "overwritten": overwritten(binary.asm["ttgir"]),
    }


def copied(ir: str) -> list[bool]:
    """Of each tensor that is polled, whether two threads hold the same element of it, and so may see two words."""
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<\{(.*)\}>", ir, re.MULTILINE))
    found = []
    for line in ir.splitlines():
        if "tt.load" in line and "isVolatile" in line and "tensor<" in line:
            shape, layout = re.search(r"tensor<([\dx]+)x!tt\.ptr<\w+>, (#\w+)>", line).groups()  # type: ignore[union-attr]
            held = math.prod(map(int, re.findall(r"\d+", layouts[layout].split("order")[0])))
            found.append(held > math.prod(map(int, shape.split("x"))))
    return found


def overwritten(ir: str) -> list[str]:
    """Buffers of load pipelines that are filled anew while a product of the tensor cores may still read them.

    A buffer has so many slots, and so many are filled ahead of the loop. A copy of step i fills the slot of step
    i + ahead. Products are in flight until a wait lets at most `pendings` of them be, from one step to the next.
    """
    buffer = r"%([\w#]+) = ttg.local_alloc : \(\) -> !ttg.memdesc<(\d+)x"
    part = r"%([\w#]+) = ttg.memdesc_(?:index|trans|reshape|subslice) %([\w#]+)"
    copy = r"ttg.async_copy_global_to_local %[\w#]+, %([\w#]+)"
    slots: dict[str, int] = {}
    buffer_of: dict[str, str] = {}
    ahead: dict[str, int] = {}
    found = set()
    lines = ir.splitlines()
    loops = [i for i, line in enumerate(lines) if " scf.for " in line]
    for i, line in enumerate(lines):
        if match := re.search(buffer, line):
            slots[match[1]] = int(match[2])
            buffer_of[match[1]] = match[1]
        elif match := re.search(part, line):
            buffer_of[match[1]] = buffer_of.get(match[2], "")
        elif match := re.search(copy, line):
            name = buffer_of[match[1]]
            ahead[name] = ahead.get(name, 0) + (not any(first < i < end_of(lines, first) for first in loops))
    for first in loops:
        body = lines[first + 1 : end_of(lines, first)]
        if any(" scf.for " in line for line in body):
            continue
        flying: list[tuple[int, set[str]]] = []  # products: their step, what they read
        for step in range(3):
            for line in body:
                if match := re.search(r"ttng.warp_group_dot (.*) \{?", line):
                    names = re.findall(r"%([\w#]+)", match[1])
                    reads = {buffer_of.get(name, "") for name in names} - {""}
                    flying.append((step, reads))
                elif match := re.search(r"warp_group_dot_wait.*pendings = (\d+)", line):
                    flying = flying[len(flying) - min(int(match[1]), len(flying)) :]
                elif match := re.search(copy, line):
                    name = buffer_of[match[1]]
                    for of, reads in flying:
                        if name in reads and (step + ahead[name] - of) % slots[name] == 0:
                            found.add(name)
    return sorted(found)


def end_of(lines: list[str], first: int) -> int:
    """The line that closes the block which the line `first` opens."""
    indent = re.match(r" *", lines[first])[0]  # type: ignore[index]
    return next(i for i in range(first + 1, len(lines)) if lines[i].startswith(indent + "}"))


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
        few = {name: value for name, value in values.items() if name not in ("N", "PRECISION")}
        one = {"GROUPS": GROUPS - 16, "ALWAYS": 16, "EARLY": False}
        found[f"vector_mn gated={gated}"] = (
            mn_one.vector_kernel,
            f"{types} *u8",
            few | one | mn_one.vector_config(D, G, gated, dtype, ANYWHERE),
        )
        found["vector_mn dense" + " gated" * gated] = (
            mn_one.vector_kernel,
            f"{types} *u8",
            few
            | {"G": F, "GROUPS": 0, "ALWAYS": 1, "EARLY": True}
            | mn_one.vector_config(D, F, gated, dtype, ANYWHERE),
        )
        for rows in (16, 64, 128):
            found[f"few_rows_mn {rows} gated={gated}"] = (
                mn_few.rows_kernel,
                f"{types} *u8 i32 i32",
                values | mn_few.rows_config(rows, D, G, gated, dtype, ANYWHERE),
            )
    k: dict[str, Any] = {"N": D, "K": F, "G": G, "PRECISION": precision}
    tile = k_configs.tile_config(T, D, G, dtype)
    for atomic, out in ((True, "*fp32"), (False, "*fp32"), (True, p)):
        found[f"tile_k atomic={atomic} {out}"] = (
            k_kernels.tile_kernel,
            f"{p} {p} {out} *i32 *i32 i32 i32 i32 i32 i32",
            k | {"S": k_configs.tile_order(T, GROUPS, G, dtype).segment, "ATOMIC": atomic, "SLAB": 4} | tile,
        )
    down: dict[str, Any] = {"K": F, "G": G, "HAS_RESIDUAL": True}
    standing = {"": {"P": 0, "RB": 0}, " standing": {"P": STANDING, "RB": BYPASS}}
    chunks = {"": {"PC": 0}, " standing": k_one.STANDING}
    for early, (name, stands) in itertools.product((False, True), standing.items()):
        found[f"vector_k early={early}{name}"] = (
            k_one.vector_kernel,
            f"{p} {p} {p} {p} *u8 {p} {p}",
            down | stands | chunks[name] | {"EARLY": early} | k_one.vector_config(D, F, G, dtype, ANYWHERE),
        )
    for rows, (name, stands) in itertools.product((16, 64, 128), standing.items()):
        sizes = down | stands | {"N": D, "NP": 128, "BP": k_few.STANDING_STEP, "EARLY": rows == 16}
        found[f"few_rows_k {rows}{name}"] = (
            k_few.rows_kernel,
            f"{p} {p} {p} {p} *fp32 *i32 *u8 {p} {p} i32 i32",
            sizes | {"PRECISION": precision} | k_few.rows_config(rows, D, F, G, dtype, ANYWHERE),
        )
    sizes = {"N_G": GROUPS, "RB": BYPASS, "P": STANDING, "NP": 128} | compensate_configs.left_config(STANDING, ANYWHERE)
    found["left_compensate"] = (compensate_kernels.left_kernel, f"*u8 {p} {p} i32", sizes)
    tiles = {"N": D, "HAS_RESIDUAL": True, "PRECISION": precision}
    for rows, width in itertools.product((1024, T), (STANDING, 48)):
        found[f"tile_compensate {rows} {width}"] = (
            compensate_kernels.tile_kernel,
            f"{p} {p} {p} {p} i32",
            tiles | {"P": width} | compensate_configs.tile_config(rows, D, width, dtype, ANYWHERE),
        )
        walk = compensate_configs.walk_config(rows, D, width, dtype, ANYWHERE)
        if walk is not None:
            found[f"walk_compensate {rows} {width}"] = (
                compensate_kernels.walk_kernel,
                f"{p} {p} {p} {p} i32",
                {"N": D, "HAS_RESIDUAL": True, "P": width} | walk,
            )
    norm: dict[str, Any] = {"D": D, "R": RANK, "RP": RANK, "NORMALISED": True, "TAP_EPS": 1e-6, "HALVES": "both"}
    norm["PARTS"] = 1 if dtype is torch.float32 else 2
    norm["N_G"] = GROUPS
    norm_types = "{x} {x} {w1} *fp32 *fp32 *fp32 {x} *fp32 *fp32 *fp32 {x} *u8 {x} *i32 i32 fp32"
    row_types = "{x} {x} {w1} *fp32 *fp32 *fp32 {x} *i32 {x} *u8 {x} i32 fp32"
    for rows, bypass in itertools.product((1, T), (0, BYPASS)):
        norm |= {"RB": bypass, "RBP": max(16, bypass)}
        one = norm_configs.row_config(rows, D, max(RANK, bypass), dtype, ANYWHERE)
        words = {"EARLY": True, "WORDS": 32 * 2 * (RANK + bypass) + 32}
        name = f"{rows}" + " bypass" * bool(bypass)
        chunk = one | words if one else {"PACKED": False} | norm_configs.chunk_config(rows, D, dtype, ANYWHERE)
        del chunk["TOGETHER"]  # the launcher's
        found[f"norm_route {name}"] = (
            norm_rows.row_kernel if one else norm_kernels.chunk_kernel,
            (row_types if one else norm_types).format(x=p, w1="*fp32"),
            norm | chunk,
        )
        if dtype is not torch.float32:
            found[f"norm_route in pieces {name}"] = (
                norm_rows.row_kernel if one else norm_kernels.chunk_kernel,
                (row_types if one else norm_types).format(x=p, w1=p),
                norm | {"PARTS": 3} | chunk,
            )
            if not one:
                found[f"norm_route packed {name}"] = (
                    norm_kernels.chunk_kernel,
                    norm_types.format(x=p, w1=p),
                    norm | chunk | {"PARTS": 3, "PACKED": True, "RBP": RANK},
                )
    return found


def engine_kernels(dtype: torch.dtype) -> dict[str, tuple[Any, str, dict[str, Any]]]:
    """The inference engine's own steps."""
    from widecli.engine import fused_triton as steps

    p = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
    heads: dict[str, Any] = {"HEADS": 32, "KV_HEADS": 8, "PDL": 0}
    places = f"{p} {p} {p} {p} {p} *i64"
    found: dict[str, tuple[Any, str, dict[str, Any]]] = {
        "normalise": (steps.normalise_kernel, f"{p} {p} {p} i32 fp32", {"SIZE": D, "PADDED": D, "PDL": 0}),
        "rotate": (
            steps.rotate_kernel,
            f"{p} {p} {p} {places} i32 i32 i32",
            heads | {"HALF": 64, "HALF_PADDED": 64, "AT_ONCE": steps.HEADS_AT_ONCE},
        ),
        "count": (steps.count_kernel, "*u8 *u8 *i64 *i64 i32 i32", {"BLOCK": steps.COUNTED_AT_ONCE}),
        "positions": (
            steps.positions_kernel,
            f"*i64 *i64 {p} {p} {p} {p} *i64 *i64",
            {"SIZE": 128, "PADDED": 128, "num_warps": 1},
        ),
        "candidates": (
            steps.candidate_kernel,
            f"{p} *fp32 *i32 i32 i32",
            {"PARTS": steps.VOCABULARY_PARTS, "BLOCK": steps.VOCABULARY_BLOCK},
        ),
        "likeliest": (
            steps.likeliest_kernel,
            "*fp32 *i32 *i64 *i64",
            {"PARTS": steps.VOCABULARY_PARTS, "COUNTS": True, "PDL": 0, "num_warps": 1},
        ),
    }
    for groups in (0, 8):
        sizes: dict[str, Any] = {"K": D, "G": 512, "GROUPS": groups, "SIZE": 128, "HAS_BIAS": True}
        found[f"project groups={groups}"] = (
            steps.project_kernel,
            f"{p} {p} {p} *u8 {places}",
            sizes | mn_one.vector_config(D, 128, False, dtype, ANYWHERE) | heads,
        )
    return found


def attention_kernels(dtype: torch.dtype) -> dict[str, tuple[Any, str, dict[str, Any]]]:
    """Prefill and decode of Llama-3.1-8B: 32 query heads, 8 KV heads, as many groups."""
    p = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
    precision = "ieee" if dtype is torch.float32 else "tf32"
    heads: dict[str, Any] = {"SHARED": 4, "GROUP": 4, "N_D": 128, "DP": 128, "HAS_KV_START": True}
    prefill = heads | {"H": 32, "CAUSAL": True, "HAS_Q_START": True, "ONE": False, "PRECISION": precision}
    decode = heads | {"H_K": 8, "HAS_KV_LEN": True, "PAIRS": 16, "BN": 32, "PROGRAMS": 264}
    return {
        "tile_prefill": (
            prefill_kernels.tile_kernel,
            f"{p} {p} {p} {p} *i32 *i32 *i32 *i64 *i64 i32 i32 i32 i32 fp32 {'i32 ' * 9}",
            prefill | prefill_configs.tile_config(T, 4, 4, 128, dtype),
        ),
        "few_decode": (
            decode_kernels.split_kernel,
            f"{p} {p} {p} *u8 *i64 *i64 *fp32 *fp32 *fp32 i32 i32 fp32 {'i32 ' * 8}",
            decode | {"BM": 16, "PRECISION": precision, "num_stages": 3, "PDL": False},
        ),
        "merge_decode": (
            decode_kernels.merge_kernel,
            f"{p} *u8 *i64 *i64 *fp32 *fp32 *fp32 i32 i32",
            decode | {"SLOTS": decode_kernels.MERGED, "PDL": False},
        ),
    }


def hopper_prefill(target: GPUTarget) -> dict[str, Any]:
    """The Gluon kernel, with the blocks that TMA fetches."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from wide_kernels.attention_prefill import gluon

    values: dict[str, Any] = {"H": 32, "SHARED": 4, "GROUP": 4, "D": 128, "CAUSAL": True, "HAS_Q_START": True}
    values |= {"HAS_KV_START": True, "ONE": False} | prefill_configs.hopper_config(T, 4, 4, 128)
    kernel = gluon.tile_kernel
    block = [values["BN"], values["D"]]
    blocks = f"tensordesc<bf16{block},{gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)!r}>"
    types = ["*bf16", blocks, blocks, "*bf16", *["*i32"] * 3, *["*i64"] * 2, *["i32"] * 4, "fp32", *["i32"] * 5]
    given = dict(zip([name for name in kernel.arg_names if name not in values], types, strict=True))
    signature = {name: given.get(name, "constexpr") for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): value for name, value in values.items()}
    source = GluonASTSource(kernel, signature, constants, {})
    binary = triton.compile(source, target=target, options={"num_warps": 4, "maxnreg": gluon.REGISTERS})
    return {"shared": binary.metadata.shared, "wgmma": "wgmma" in binary.asm["ptx"], "mma": "mma" in binary.asm["ptx"]}


def sorting_kernels() -> dict[str, tuple[Any, str, dict[str, Any]]]:
    """The kernels that only see decisions."""
    block: dict[str, Any] = {"N_G": GROUPS, "BLOCK_T": compaction.BLOCK_ROWS, "BLOCK_G": compaction.BLOCK_GROUPS}
    sort: dict[str, Any] = {"N_G": GROUPS, "S": 7, "BLOCK_T": sorting.BLOCK_ROWS}
    return {
        "layout_count": (compaction.count_kernel, "*u8 *i32 i32", block),
        "layout_place": (
            compaction.place_kernel,
            "*u8 *i32 *i32 *i32 i32 i32",
            block | {"BLOCK_P": compaction.BLOCK_PARTS},
        ),
        "sort_count": (sorting.count_kernel, "*u8 *i32 i32 i32", sort),
        "sort_place": (
            sorting.place_kernel,
            "*u8 *i32 *i32 *i32 *i32 i32 i32 i32",
            sort | {"BLOCK_P": sorting.BLOCK_PARTS, "HALF": TILE_ROWS // 2, "num_warps": 8},
        ),
    }


def main() -> None:
    """Compile everything for the target named on the command line, in bf16 or the dtypes named after it."""
    target = GPUTarget("cuda", int(sys.argv[1].removeprefix("sm_")), 32)
    result: dict[str, Any] = {"triton": triton.__version__, "target": sys.argv[1], "kernels": {}}
    for name, (kernel, types, values) in sorting_kernels().items():
        result["kernels"][name] = compiled(kernel, types, values, target)
    for dtype in sys.argv[2:] or ["bfloat16"]:
        kind = getattr(torch, dtype)
        found = kernels(kind) | engine_kernels(kind) | attention_kernels(kind)
        for name, (kernel, types, values) in found.items():
            if "PDL" in values and sys.argv[1] == "sm_90":
                values = values | {"PDL": 1}  # as the launchers choose where the GPU is one
            result["kernels"][f"{name} {dtype}"] = compiled(kernel, types, values, target)
    if sys.argv[1] == "sm_90":
        result["kernels"]["tile_prefill gluon"] = hopper_prefill(target)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

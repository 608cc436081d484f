"""Compiles the Gluon kernels for Hopper, which need not be there: `python compile_gluon.py` prints JSON.

Run in a process of its own, by a Python whose Triton has Gluon. The sizes are those of Llama-3.1-8B, the configurations
the ones that the launchers choose.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from wide_kernels.attention_decode import configs as decode_configs
from wide_kernels.attention_decode import gluon as decode_kernels
from wide_kernels.gemm_k import configs as k_configs
from wide_kernels.gemm_k import gluon as k_kernels
from wide_kernels.gemm_mn import configs as mn_configs
from wide_kernels.gemm_mn import gluon as mn_kernels

D, F, T = 4096, 14336, 16384
OPTIONS = ("num_warps", "maxnreg")


def compiled(kernel: Any, types: dict[str, str], values: dict[str, Any]) -> dict[str, Any]:
    """Compile `kernel` whose run-time arguments have these types; the rest are compile-time `values`."""
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in values.items() if name not in OPTIONS}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*")
        or name == "stride_h"
        or name.startswith(("stride_k", "stride_v", "stride_q"))
    }
    binary = triton.compile(
        GluonASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={key: values[key] for key in OPTIONS if key in values},
    )
    ptx = binary.asm["ptx"]
    marks = (
        "wgmma.mma_async",
        "m64n256k16",
        "cp.async.cg.shared",
        "cp.async.bulk.tensor",
        "setmaxnreg",
        "add.noftz.v8.bf16",
        "mma.sync",
        "ldmatrix",
        "ld.volatile.global.v4",
    )
    return {"shared": binary.metadata.shared} | {mark: ptx.count(mark) for mark in marks}


def gemm_mn(width: int, gated: bool, dtype: str) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """(kernel, types of its run-time arguments, compile-time values) of GEMM-MN with groups of `width`."""
    config = mn_configs.hopper_config(T, width, gated, torch.bfloat16)
    del config["BAND"]
    tile = f"tensordesc<{dtype}[{config['BN']}, {config['BK']}],{mn_kernels.SHARED.value!r}>"
    types = dict.fromkeys(("x", "bias", "out"), f"*{dtype}") | dict.fromkeys(("index", "tiles"), "*i32")
    types |= dict.fromkeys(("weight", "weight_up"), tile) | dict.fromkeys(("rows", "stride_units"), "i32")
    values = {"N": F, "K": D, "G": width, "GATED": gated, "HAS_BIAS": not gated}
    return mn_kernels.persistent_kernel, types, values | {"ACTIVATION": "silu" if gated else "relu"} | config


def gemm_k(width: int, stages: int, buffers: int) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """The same of GEMM-K."""
    config = k_configs.hopper_config(T, D, width) | {"STAGES": stages, "BUFFERS": buffers}
    groups = F // width
    length = k_configs.tile_order(T, groups, width, torch.bfloat16, hopper=True).segment
    types = dict.fromkeys(("h", "out"), "*bf16") | dict.fromkeys(("order", "patterns", "needed"), "*i32")
    types |= dict.fromkeys(("rows", "stride_h", "row_tiles"), "i32")
    types["weight"] = f"tensordesc<bf16[{config['BN']}, {k_configs.CHANNEL_STEP}],{mn_kernels.SHARED.value!r}>"
    values = {"N": D, "G": width, "S": length, "SEGMENTS": -(-groups // length), "SLAB": 4, "num_warps": 4}
    return k_kernels.persistent_kernel, types, values | config


def attention_decode(dtype: str, size: int, shared: int, batch: int) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """The same of decode attention with 8 KV heads of `size`, each of which `shared` query heads share."""
    config = decode_configs.hopper_config(torch.device("cpu")) | {"PROGRAMS": 132, "SLOTS": 128}
    kernel = decode_kernels.exchange_kernel
    types = dict.fromkeys(("q", "k", "v", "o"), f"*{dtype}") | {"mask": "*u8", "words": "*i32", "scale": "fp32"}
    types |= dict.fromkeys(("kv_len", "kv_start"), "*i64") | dict.fromkeys(("batch", "keys"), "i32")
    types |= {name: "i32" for name in kernel.arg_names if name.startswith("stride")}
    values = {"H_K": 8, "SHARED": shared, "GROUP": shared, "D": size, "HAS_KV_LEN": True, "HAS_KV_START": batch > 1}
    values |= {"STEP_K": 8 * size, "STEP_V": 8 * size}
    return kernel, types, values | {"PAIRS": 8 * batch, "ROWS": triton.next_power_of_2(shared)} | config


def main() -> None:
    """Compile everything."""
    kernels = {f"gemm_mn {width}": gemm_mn(width, False, "bf16") for width in (16, 128, 256)}
    kernels |= {f"gated_mlp_up {width}": gemm_mn(width, True, "fp16") for width in (64, 128)}
    kernels |= {f"gemm_k {width}": gemm_k(width, *ring) for width, ring in ((64, (4, 1)), (128, (3, 2)), (512, (3, 2)))}
    decode = {"bf16 128": ("bf16", 128, 4, 1), "fp16 128": ("fp16", 128, 4, 16), "bf16 64": ("bf16", 64, 3, 2)}
    kernels |= {f"attention_decode {name}": attention_decode(*sizes) for name, sizes in decode.items()}
    found = {name: compiled(*kernel) for name, kernel in kernels.items()}
    print(json.dumps({"triton": triton.__version__, "kernels": found}))


if __name__ == "__main__":
    main()

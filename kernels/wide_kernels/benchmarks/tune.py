"""Candidate configurations of each Triton kernel, timed against each other with the launcher as it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from wide_kernels.benchmarks.cases import Sizes, ffn_cases
from wide_kernels.benchmarks.parallel import WarmTask
from wide_kernels.benchmarks.timing import captured, interleaved
from wide_kernels.tuning.table import TUNED, force


def candidates(kernel: str) -> Iterator[dict[str, int]]:
    """Configurations worth a look; the ones that need too much shared memory fail and are left out."""
    if kernel in ("gemm_mn", "gated_mlp_up", "gemm_k"):
        tiles = [(128, 128, 4), (128, 128, 8), (256, 128, 8), (128, 64, 4)]
        tiles += [(128, 256, 8)] if kernel == "gemm_k" else [(64, 128, 4)]
        for (bm, bn, warps), stages in itertools.product(tiles, (3, 4)):
            yield {"BM": bm, "BN": bn, "BK": 64, "num_warps": warps, "num_stages": stages}
    elif kernel == "gemm_k_order":
        for segment, megabytes in itertools.product((4, 6, 7, 8), (16, 32, 64, 1024)):
            yield {"S": segment, "SLAB_MB": megabytes}
    elif kernel == "norm_route":
        for bm, bd, warps in itertools.product((16, 32, 64, 128), (128, 256, 512), (4, 8)):
            yield {"BM": bm, "BD": bd, "num_warps": warps}
    elif kernel == "route_layout":
        for block, wide, warps in itertools.product((128, 256, 512, 1024), (16, 32), (8, 16)):
            yield {"BLOCK_T": block, "BLOCK_G": wide, "num_warps": warps}
    else:
        for bn, bk, stages in itertools.product((16, 32), (128, 256), (3, 5)):
            yield {"BN": bn, "BK": bk, "num_warps": 4, "num_stages": stages}
        if kernel == "few_rows_k":
            for splits in (1, 2, 4, 8):
                yield {"BN": 16, "BK": 128, "num_warps": 4, "num_stages": 4, "SPLITS": splits}


def tune_tasks(kernel: str, sizes: Sizes) -> list[WarmTask]:
    """Compiling all candidates, for worker processes."""
    return [WarmTask(sizes, frozenset({TUNED[kernel]}), kernel, tuple(c.items())) for c in candidates(kernel)]


def tune(kernel: str, sizes: Sizes) -> list[dict[str, object]]:
    """Times of all candidates, best first, the built-in one among them under {}."""
    found: list[dict[str, object]] = []
    for config in [{}, *candidates(kernel)]:
        case = next(iter(ffn_cases(sizes, {TUNED[kernel]}, gather=False)))
        with force(kernel, config):
            try:
                error = case.check()
                times = interleaved({"routed": captured(case.routed)}, rounds=8)["routed"]
            except (RuntimeError, ValueError) as failure:
                found.append({"config": config, "failed": str(failure).splitlines()[0][:120]})
                continue
            except Exception as failure:  # Triton's OutOfResources derives from no common base
                found.append({"config": config, "failed": type(failure).__name__})
                continue
        found.append({"config": config, "p50_ms": times.p50_ms, "error": error})
        torch.cuda.empty_cache()
    return sorted(found, key=lambda entry: float(str(entry.get("p50_ms", "inf"))))

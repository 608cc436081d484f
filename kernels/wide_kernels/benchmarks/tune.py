"""Candidate configurations of each kernel, timed against each other with the launcher as it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from wide_kernels.benchmarks.cases import Sizes, ffn_cases
from wide_kernels.benchmarks.parallel import WarmTask
from wide_kernels.benchmarks.timing import captured, interleaved
from wide_kernels.tuning.disk import write_tuned
from wide_kernels.tuning.lookup import forget, token_bucket
from wide_kernels.tuning.table import TUNED, Key, force


def candidates(kernel: str) -> Iterator[dict[str, int]]:
    """Configurations worth a look; the ones that need too much shared memory fail and are left out."""
    if kernel in ("gemm_mn", "gated_mlp_up", "gemm_k"):
        tiles = [(128, 128, 4), (128, 128, 8), (256, 128, 8), (128, 64, 4)]
        tiles += [(128, 256, 8)] if kernel == "gemm_k" else [(64, 128, 4)]
        for (bm, bn, warps), stages in itertools.product(tiles, (3, 4)):
            yield {"BM": bm, "BN": bn, "BK": 64, "num_warps": warps, "num_stages": stages}
    elif kernel == "hopper_k":
        for bn, stages, buffers in ((256, 3, 2), (256, 4, 1), (256, 2, 2), (128, 4, 2), (128, 6, 2)):
            yield {"BN": bn, "STAGES": stages, "BUFFERS": buffers}
    elif kernel == "gemm_k_order":
        for segment, megabytes in itertools.product((4, 6, 7, 8), (16, 32, 64, 1024)):
            yield {"S": segment, "SLAB_MB": megabytes}
    elif kernel.startswith("vector"):
        for (bn, chunks), warps in itertools.product(itertools.product((2, 4, 8), (128, 256, 512)), (2, 4, 8)):
            for listed in (0, 1) if kernel == "vector_k" else (None,):
                yield {"BN": bn, "BC": chunks, "num_warps": warps} | ({} if listed is None else {"LISTED": listed})
    elif kernel == "norm_row":
        for bd, warps in itertools.product((64, 128, 256), (2, 4, 8)):
            yield {"BD": bd, "num_warps": warps}
    elif kernel == "norm_route":
        for bm, bd, warps, together in itertools.product((16, 32, 64, 128), (128, 256, 512), (4, 8), (1, 0)):
            yield {"BM": bm, "BD": bd, "num_warps": warps, "TOGETHER": together}
    else:
        for (bn, bk), stages in itertools.product(((64, 64), (64, 128), (128, 64), (128, 128)), (3, 4, 5)):
            for splits in (2, 4, 8) if kernel == "few_rows_k" else (0,):
                config = {"BN": bn, "BK": bk, "num_warps": bn // 16, "num_stages": stages}
                yield config | ({"SPLITS": splits} if splits else {})


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


def save(found: Sequence[tuple[str, Sizes, list[dict[str, object]]]]) -> Path | None:
    """Write the fastest configuration of each (kernel, point) that beat the built-in one; None if none did."""
    winners: dict[Key, Mapping[str, int]] = {}
    for kernel, sizes, entries in found:
        config = entries[0].get("config") if entries and "p50_ms" in entries[0] else None
        if isinstance(config, dict) and config:
            dtype = str(sizes.dtype).removeprefix("torch.")
            width = sizes.model.hidden_size if kernel.startswith("norm") else sizes.group
            winners[Key(kernel, token_bucket(sizes.rows), width, dtype)] = config
    if not winners:
        return None
    path = write_tuned(torch.cuda.get_device_name(), winners)
    forget()
    return path

"""How long only reading takes of what routed decode attention reads: `python -m wide_kernels.benchmarks.read_floor`.

Kernels that add up the keys and values of the executed heads and store 8 bytes a program, beside an empty launch, the
operator on each backend and the dense library calls, in one run: alone, and in a graph of several calls over as many
caches, as the layers of a model make them. What the operator takes beyond a reader is its own; below one it can't get.
One sequence, Llama-3.1-8B shapes, bf16, every other KV head skipped. Asynchronous copies into shared memory have read
about half a microsecond faster than these loads (reports/kernels/h200_decode.md).
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import wide_kernels as wk
from wide_kernels import bench
from wide_kernels.benchmarks import timing
from wide_kernels.benchmarks.attention_cases import AttentionSizes, libraries
from wide_kernels.benchmarks.shapes import MODELS
from wide_kernels.benchmarks.targets import MODEL
from wide_kernels.benchmarks.timing import Call
from wide_kernels.dispatch import multiprocessors

SCHEMA = "wide_kernels.decode/1"
KEYS_A_TILE = 64  # of the largest tile


@triton.jit
def empty_kernel(out):
    """Nothing: what a launch costs in this harness."""


@triton.jit
def read_kernel(
    k, v, mask, out, keys, active, heads,
    H_K: tl.constexpr, WORDS: tl.constexpr, BN: tl.constexpr, UNROLL: tl.constexpr, FROM_MASK: tl.constexpr,
):  # fmt: skip
    """Add up a run of tiles, BN keys of a head each; k and v: int32 views [keys, H_K, WORDS]; H_K at most 16.

    FROM_MASK: the executed heads are found from the mask before the first read, as the operator must; else they are
    given: `active` of them, 4 bits each in `heads`.
    """
    if FROM_MASK:
        head = tl.arange(0, H_K)
        on = (tl.load(mask + head) != 0).to(tl.int32)
        active = tl.sum(on, 0)
        heads = tl.sum(tl.where(on != 0, head.to(tl.int64) << (4 * (tl.cumsum(on, 0) - on)), 0), 0)
    program, programs = tl.program_id(0), tl.num_programs(0)
    blocks = keys // BN
    tiles = 2 * active * blocks
    stop = tiles * (program + 1) // programs
    key = tl.arange(0, BN)[:, None]
    word = tl.arange(0, WORDS)[None, :]
    total = tl.zeros((BN, WORDS), tl.int32)
    for first in range(tiles * program // programs, stop, UNROLL):
        for step in tl.static_range(UNROLL):
            tile = first + step  # keys and values of a block follow each other, then its head's next block
            row = tile // 2 % blocks * BN
            place = ((heads >> (4 * (tile // 2 // blocks))) & 15).to(tl.int32)
            source = tl.where(tile % 2 == 0, k, v) + row * (H_K * WORDS) + place * WORDS
            total += tl.load(source + key * (H_K * WORDS) + word, mask=key < tl.where(tile < stop, BN, 0), other=0)
    tl.store(out + program, tl.sum(tl.sum(total.to(tl.int64), 1), 0))  # right modulo 2^32


@dataclass(frozen=True)
class Reader:
    """One form: programs a multiprocessor, warps, keys a tile, tiles read at a time; `from_mask` as in the kernel."""

    each: int
    warps: int
    keys: int
    unroll: int
    from_mask: bool

    def __str__(self) -> str:
        heads = "heads found from the mask" if self.from_mask else "heads given"
        return f"read, {heads}, {self.each} x {self.warps} warps a processor, {self.keys} keys x {self.unroll}"

    def call(self, k: Tensor, v: Tensor, mask: Tensor, out: Tensor) -> Call:
        """Reads k and v [1, keys, H_k, d] where mask [1, H_k]; the sums of the programs in `out`, int64."""
        executed = mask[0].nonzero()[:, 0].tolist()
        heads = sum(head << (4 * rank) for rank, head in enumerate(executed))
        words = [x.view(torch.int32) for x in (k, v)]
        grid = (self.each * multiprocessors(k.device),)
        sizes = (*words[0].shape[2:], self.keys, self.unroll, self.from_mask)
        flags = mask.view(torch.uint8)
        arguments = (*words, flags, out, k.shape[1], len(executed), heads, *sizes)
        return lambda: read_kernel[grid](*arguments, num_warps=self.warps)


# The fastest forms of several dozen on an H200.
READERS = tuple(
    Reader(*form, from_mask)
    for from_mask in (False, True)
    for form in ((2, 8, 64, 4), (4, 8, 64, 4), (4, 4, 32, 8), (8, 4, 32, 4))
)


def check_reader(reader: Reader, k: Tensor, v: Tensor, mask: Tensor) -> None:
    """Raises RuntimeError unless the reader's sum is the sum of all words of the executed heads, modulo 2^32."""
    out = torch.zeros(reader.each * multiprocessors(k.device), dtype=torch.int64, device=k.device)
    reader.call(k, v, mask, out)()
    expected = sum(int(x.view(torch.int32)[0][:, mask[0]].long().sum()) for x in (k, v))
    if (int(out.sum()) - expected) % 2**32:
        raise RuntimeError(f"{reader}: it has not read what it should")


def candidates(caches: Sequence[tuple[Tensor, Tensor, Tensor]], mask: Tensor) -> dict[str, list[Call]]:
    """By name, a call on each cache: q [1, 1, H_q, d], k and v [1, keys, H_k, d]."""
    processors = multiprocessors(mask.device)
    out = torch.zeros(max(reader.each for reader in READERS) * processors, dtype=torch.int64, device=mask.device)
    found: dict[str, list[Call]] = {"empty launch": [lambda: empty_kernel[(processors,)](out) for _ in caches]}
    for reader in READERS:
        found[str(reader)] = [reader.call(k, v, mask, out) for _, k, v in caches]
    for name in ("triton", "gluon"):
        try:
            wk.explain("attention_decode", *caches[0], mask, backend=name)
        except wk.UnsupportedError:
            continue
        found[f"attention_decode, {name}"] = [
            lambda cache=cache, name=name: wk.attention_decode(*cache, mask, backend=name)  # type: ignore[misc]
            for cache in caches
        ]
    for name in libraries(*caches[0]):
        found[f"dense, {name}"] = [libraries(*cache)[name] for cache in caches]
    return found


def timed(calls: Mapping[str, list[Call]], rounds: int) -> list[dict[str, Any]]:
    """A row each: microseconds of one call, and of one of all calls in one graph."""

    def replays(count: int) -> dict[str, timing.Times]:
        graphs = {
            name: timing.captured(lambda each=each: [call() for call in each[:count]])  # type: ignore[misc]
            for name, each in calls.items()
        }
        return timing.interleaved(graphs, rounds)

    count = max(map(len, calls.values()))
    alone, many = replays(1), replays(count)
    return [
        {
            "what": name,
            "us": 1e3 * alone[name].p50_ms,
            "min_us": 1e3 * alone[name].min_ms,
            "us_in_graph": 1e3 * many[name].p50_ms / count,
        }
        for name in calls
    ]


def measure(keys: int, calls: int, rounds: int) -> dict[str, Any]:
    """Check the readers, then time everything; the record's `floor`."""
    torch.manual_seed(0)
    sizes = AttentionSizes(MODELS[MODEL], 1, 1, keys, 0.5, torch.bfloat16)
    model = sizes.model
    heads = model.num_key_value_heads
    caches = [
        (sizes.normal(1, model.num_attention_heads), sizes.normal(keys, heads), sizes.normal(keys, heads))
        for _ in range(calls)
    ]
    mask = torch.arange(heads, device=sizes.device)[None] % 2 == 0
    for reader in READERS:
        check_reader(reader, *caches[0][1:], mask)
    executed = int(mask.sum())
    return {
        "keys": keys,
        "calls": calls,
        "executed_heads": executed,
        "heads": heads,
        "bytes": 2 * executed * keys * model.head_dim * caches[0][1].element_size(),
        "rows": timed(candidates(caches, mask), rounds),
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m wide_kernels.benchmarks.read_floor", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--keys", type=int, default=16384, help="length of the cache (default 16384)")
    parser.add_argument("--calls", type=int, default=16, help="caches, and calls in a graph (default 16)")
    parser.add_argument("--rounds", type=int, default=40, help="timed turns of each candidate (default 40)")
    parser.add_argument("--out", type=Path, help="write the JSON record here instead of to stdout")
    arguments = parser.parse_args()
    if arguments.keys < 1 or arguments.keys % KEYS_A_TILE:
        parser.error(f"--keys must be a multiple of {KEYS_A_TILE}, got {arguments.keys}")
    for name in ("calls", "rounds"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    return arguments


def main() -> int:
    """Exit status: 0, or 2 when this machine or the arguments won't do."""
    arguments = parse()
    if not torch.cuda.is_available():
        bench.say("reading is timed on a CUDA GPU and this machine has none")
        return 2
    document = {"schema": SCHEMA, "environment": bench.environment(), "model": MODEL, "dtype": "bf16"}
    document["floor"] = floor = measure(arguments.keys, arguments.calls, arguments.rounds)
    bench.say(f"{floor['bytes'] / 1e6:.1f} MB: us alone, us of one of {floor['calls']} in a graph")
    for row in floor["rows"]:
        bench.say(f"{row['what']:72}{row['us']:8.2f}{row['us_in_graph']:8.2f}")
    bench.write(document, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m wide_kernels.bench`: are the kernels right on this GPU, and how fast beside the dense library calls?

Awkward cases are checked first; a wrong one ends the run. Then every point of the grid is timed: routed and dense calls
take turns as CUDA graphs, L2 flushed before each. A table goes to stderr as it grows, the record to --out or stdout.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wide_kernels.benchmarks.shapes import MODELS, model_shape
from wide_kernels.errors import UnsupportedError
from wide_kernels.tuning.table import TUNED

if TYPE_CHECKING:
    from wide_kernels.benchmarks.attention_cases import AttentionSizes
    from wide_kernels.benchmarks.cases import Sizes
    from wide_kernels.benchmarks.parallel import Outcome

FFN_OPS = ("route_layout", "gemm_mn", "gated_mlp_up", "gemm_k", "compensate", "norm_route", "ffn")
OPS = (*FFN_OPS, "attention_prefill", "attention_decode")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# (T, G, density): the reference point first, then the other group sizes, decode, shorter prompts, densities.
GRID = (
    (16384, 128, 0.5),
    (1, 128, 0.5),
    (16384, 512, 0.5),
    (16384, 64, 0.5),
    (4, 128, 0.5),
    (16384, 256, 0.5),
    (16384, 32, 0.5),
    (16384, 16, 0.5),
    (16, 128, 0.5),
    (64, 128, 0.5),
    (4096, 128, 0.5),
    (1024, 128, 0.5),
    (256, 128, 0.5),
    (16384, 128, 1.0),
    (16384, 128, 0.75),
    (16384, 128, 0.25),
    (16384, 128, 0.0),
)
SLOW_POINTS = 2  # of the grid, at which the torch backend, which skips nothing, is timed too


def say(text: str) -> None:
    """A line for people."""
    print(text, file=sys.stderr, flush=True)


def environment() -> dict[str, object]:
    """What the figures depend on; no host name, no user name."""
    import triton

    def first_line(*command: str) -> str | None:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name(),
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "power_limit": first_line("nvidia-smi", "--query-gpu=power.limit", "--format=csv,noheader"),
        "revision": first_line("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
        "arguments": [Path(argument).name if "/" in argument else argument for argument in sys.argv[1:]],
    }


def points(arguments: argparse.Namespace) -> list[Sizes]:
    """The grid for this model (groups must divide its intermediate size), or its recorded masks."""
    from wide_kernels.benchmarks.cases import Sizes
    from wide_kernels.benchmarks.masks import read_masks

    model, dtype = model_shape(arguments.model), DTYPES[arguments.dtype]
    if arguments.masks is None:
        grid = [point for point in arguments.points or GRID if model.intermediate_size % point[1] == 0]
        return [Sizes(model, rows, group, density, dtype) for rows, group, density in grid]
    found = []
    for name, mask in read_masks(arguments.masks).items():
        if name.endswith(".attention"):
            continue
        if model.intermediate_size % mask.shape[1]:
            raise UnsupportedError(f"{name}: {mask.shape[1]} groups do not divide {model.name}'s intermediate size")
        group, density = model.intermediate_size // mask.shape[1], round(float(mask.float().mean()), 3)
        found.append(Sizes(model, mask.shape[0], group, density, dtype, recorded=mask, masks=name))
    return found


def attention_points(arguments: argparse.Namespace) -> list[AttentionSizes]:
    """The grid of the attention operators asked for; points and recorded masks given by hand are for the FFN."""
    from wide_kernels.benchmarks.attention_cases import grid

    if arguments.points is not None or arguments.masks is not None:
        return []
    return grid(model_shape(arguments.model), DTYPES[arguments.dtype], set(arguments.ops))


def prepare(arguments: argparse.Namespace) -> Outcome:
    """In worker processes: check the awkward cases, compile what is timed afterwards."""
    from wide_kernels.benchmarks.parallel import WarmTask, check_tasks, run_all, usual_workers
    from wide_kernels.benchmarks.tune import tune_tasks

    tasks: list[Callable[[], Outcome]] = []
    if arguments.tune:
        for kernel, sizes in tuning_points(arguments):
            tasks += tune_tasks(kernel, sizes)
    elif not arguments.check_only:
        # Densities share their kernels: compile one of each.
        distinct = {(sizes.rows, sizes.group): sizes for sizes in points(arguments)}
        plain = [replace(sizes, recorded=None) for sizes in distinct.values()]
        tasks += [WarmTask(sizes, frozenset({op})) for sizes in plain for op in arguments.ops if op in FFN_OPS]
        tasks += [WarmTask(sizes) for sizes in attention_points(arguments)]
    tasks += check_tasks([DTYPES[name] for name in arguments.checked])
    return run_all(tasks, usual_workers() if arguments.workers is None else arguments.workers)


def tuning_points(arguments: argparse.Namespace) -> list[tuple[str, Sizes]]:
    """(kernel, point) pairs to tune: the points given, else one that the kernel is made for."""
    from wide_kernels.benchmarks.cases import Sizes

    found = []
    for kernel in arguments.tune:
        for rows, group, density in arguments.points or [(_usual_rows(kernel), 128, 0.5)]:
            sizes = Sizes(model_shape(arguments.model), rows, group, density, DTYPES[arguments.dtype])
            found.append((kernel, sizes))
    return found


def _usual_rows(kernel: str) -> int:
    if kernel.startswith(("vector", "norm_row")):
        return 1
    return 16 if kernel.startswith("few_rows") else 16384


def measure(arguments: argparse.Namespace, deadline: float) -> Iterator[dict[str, object]]:
    """One record for each case, or one that says what was left out when the time budget ended."""
    from wide_kernels.benchmarks.attention_cases import attention_case
    from wide_kernels.benchmarks.cases import ffn_cases
    from wide_kernels.benchmarks.masks import structure
    from wide_kernels.benchmarks.measure import measured
    from wide_kernels.benchmarks.whole_ffn import ffn_case

    kernels: dict[str, list[str]] = {}
    for where in attention_points(arguments):
        if time.monotonic() > deadline:
            yield {"left_out": str(where)}
            continue
        yield {
            "model": where.model.name,
            "dtype": arguments.dtype,
            "masks": "random",
            "batch": where.batch,
            "keys": where.keys,
            **measured(attention_case(where), arguments.rounds, kernels, slow_backends=False),
        }
        torch.cuda.empty_cache()
    for i, sizes in enumerate(points(arguments)):
        if time.monotonic() > deadline:
            yield {"left_out": f"T={sizes.rows} G={sizes.group} density={sizes.density:g}"}
            continue
        known = None if sizes.recorded is None else structure(sizes.recorded.to(sizes.device))
        cases = ffn_cases(sizes, set(arguments.ops), arguments.gather and i == 0)
        if "ffn" in arguments.ops:
            cases = chain(cases, map(ffn_case, [sizes]))  # made when it is its turn
        for case in cases:
            yield {
                "model": sizes.model.name,
                "dtype": arguments.dtype,
                "masks": sizes.masks,
                "structure": known,
                **measured(case, arguments.rounds, kernels, slow_backends=i < SLOW_POINTS),
            }
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def row(record: dict[str, object]) -> str:
    """One line of the table."""
    if "left_out" in record:
        return f"left out, the time budget ended: {record['left_out']}"
    routed, baselines, memory = record["routed"], record["baselines"], record["peak_extra_bytes"]
    assert isinstance(routed, dict) and isinstance(baselines, dict) and isinstance(memory, dict)
    others = "  ".join(
        f"{name} {times['p50_ms'] * 1e3:.1f} us {memory[name] / 2**20:.0f} MB" for name, times in baselines.items()
    )
    backends = record["backends"]
    assert isinstance(backends, dict)
    if len(backends) > 1:
        listed = (f"{name} {times['p50_ms'] * 1e3:.1f}" for name, times in backends.items())
        others += f"  [{record['backend']} of {', '.join(listed)} us]"
    return (
        f"{record['op']!s:21}{record['rows']:>6}{record['group_size']:>5}{record['density']:>6}"
        f"{routed['p50_ms'] * 1e3:>10.1f}{record['speedup']:>7.2f}x{record['tflops']:>7.0f}{record['error']:>9.1e}"
        f"{memory['routed'] / 2**20:>7.0f}  {others}"
    )


def point(text: str) -> tuple[int, int, float]:
    """T,G,density as numbers."""
    rows, group, density = text.split(",")
    return int(rows), int(group), float(density)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m wide_kernels.bench", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--model", default="llama-3.1-8b", help=f"{', '.join(MODELS)} or hidden x intermediate, 4096x14336"
    )
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--points", nargs="+", type=point, metavar="T,G,DENSITY", help="instead of the built-in grid")
    parser.add_argument("--masks", type=Path, help="safetensors file of recorded masks, bool [T, N_G]")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rounds", type=int, default=20, help="timed calls of each candidate (default 20)")
    parser.add_argument(
        "--seconds", type=float, default=165, help="start no further point after this time (default 165)"
    )
    parser.add_argument("--check", dest="checked", nargs="*", choices=DTYPES, default=["bf16", "fp16"], metavar="DTYPE")
    parser.add_argument("--no-check", dest="checked", action="store_const", const=[], help="skip the awkward cases")
    parser.add_argument("--check-only", action="store_true", help="time nothing")
    parser.add_argument("--no-gather", dest="gather", action="store_false", help="skip the gather-scatter form")
    parser.add_argument(
        "--tune", nargs="+", choices=TUNED, metavar="KERNEL", help=f"try configurations: {', '.join(TUNED)}"
    )
    parser.add_argument("--save", action="store_true", help="with --tune: keep the winners, for every later process")
    parser.add_argument("--workers", type=int, help="processes that check and compile ahead; 0: none but this one")
    parser.add_argument("--out", type=Path, help="write the JSON record here instead of to stdout")
    arguments = parser.parse_args()
    if arguments.save and not arguments.tune:
        parser.error("--save keeps what --tune finds; name kernels with --tune")
    return arguments


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Check, then time or tune; the record."""
    started = time.monotonic()
    document: dict[str, object] = {"schema": "wide_kernels.bench/1", "environment": environment()}
    say(" ".join(f"{key}={value}" for key, value in dict(document["environment"]).items()))  # type: ignore[call-overload]
    outcome = prepare(arguments)
    wrong = outcome.wrong
    document["checks"] = {"done": outcome.compared, "wrong": wrong, "dtypes": arguments.checked}
    took = time.monotonic() - started
    summary = f"checked {outcome.compared} results on awkward cases and compiled in {took:.0f} s, {len(wrong)} wrong"
    say("\n".join([summary, *wrong, *outcome.notes]))
    if arguments.check_only:
        return document
    deadline = started + arguments.seconds
    if arguments.tune:
        from wide_kernels.benchmarks.tune import save, tune

        timed = []
        tuned: dict[str, object] = {}
        for kernel, sizes in tuning_points(arguments):
            name = f"{kernel} T={sizes.rows} G={sizes.group}"
            if time.monotonic() > deadline:
                say(f"left out, the time budget ended: {name}")
                continue
            tuned[name] = entries = tune(kernel, sizes)
            timed.append((kernel, sizes, entries))
            say("\n".join([name, *(f"  {json.dumps(entry)}" for entry in entries)]))
        document["tuned"] = tuned
        if arguments.save:
            path = save(timed)
            say("nothing beat the built-in configurations" if path is None else f"the launchers now take {path}")
        return document
    from wide_kernels.benchmarks import targets

    say(f"{'operator':21}{'T':>6}{'G':>5}{'dens.':>6}{'us':>10}{'speed':>8}{'TF/s':>7}{'error':>9}{'MB':>7}  baselines")
    results: list[dict[str, Any]] = []
    for record in measure(arguments, deadline):
        results.append(record)
        say(row(record))
    document["results"] = results
    document["summary"] = entries = targets.summary(results)
    say("\n".join(targets.lines(entries)))
    document["seconds"] = round(time.monotonic() - started, 1)
    return document


def write(document: dict[str, Any], out: Path | None) -> None:
    """The record as JSON: to a file, all of it or nothing, else to stdout."""
    text = json.dumps(document, indent=1)
    if out is None:
        print(text)
        return
    partial = out.with_name(f"{out.name}.partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(out)


def main() -> int:
    """Exit status: 0, 1 when a result was wrong, 2 when this machine or the arguments won't do."""
    arguments = parse()
    if not torch.cuda.is_available():
        say("the benchmark needs a CUDA GPU and this machine has none; `wk.available_backends()` tells what runs here")
        return 2
    try:
        document = run(arguments)
    except UnsupportedError as error:
        say(str(error))
        return 2
    write(document, arguments.out)
    return 1 if document["checks"]["wrong"] else 0  # type: ignore[index]


if __name__ == "__main__":
    sys.exit(main())

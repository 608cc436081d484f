"""What makes a training step fast: the same step with one choice changed at a time.

    python -m widecli.train.speed smollm2_s50_g64 --out speed.json

With `--random`, and then under torchrun too: by how the backbone is held on one or more cards (see `scaling`).

Correct first: every variant's first loss must agree with the first variant's. Times are medians of blocks of steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from widecli.errors import WideError
from widecli.model import loss
from widecli.model.backbone import load_backbone, load_shape
from widecli.model.budget import Budget
from widecli.model.plan import RoutingPlan
from widecli.model.routed import RoutedModel
from widecli.profiling.environment import environment, without_home
from widecli.ranks import Ranks, joined
from widecli.recipe.load import resolve
from widecli.recipe.schema import Recipe
from widecli.train.loop import Trainer
from widecli.train.scaling import measure_all, show_beside

SCHEMA = "wide.train_speed/1"
LOSS_TOLERANCE = 0.02  # relative; bf16 against fp32 differs by about 0.5 % here


@dataclass(frozen=True)
class Variant:
    """One way to run the step."""

    name: str
    dtype: str
    compile: bool
    chunked: bool
    checkpointing: bool = False


VARIANTS = (
    Variant("fp32, eager, whole logits", "float32", compile=False, chunked=False),
    Variant("bf16, eager, whole logits", "bfloat16", compile=False, chunked=False),
    Variant("bf16, eager, chunked loss", "bfloat16", compile=False, chunked=True),
    Variant("bf16, compiled, whole logits", "bfloat16", compile=True, chunked=False),
    Variant("bf16, compiled, chunked loss", "bfloat16", compile=True, chunked=True),
    Variant("bf16, eager, chunked loss, activation checkpointing", "bfloat16", False, True, checkpointing=True),
)


def measure(recipe: Recipe, variant: Variant, steps: int) -> dict[str, Any]:
    """Run `steps` steps on random token ids; returns speed, peak memory and the first loss."""
    torch.compiler.reset()
    backbone = load_backbone(recipe.model.model_copy(update={"dtype": variant.dtype}))
    backbone.refuse_beyond_positions({"data.sequence_length": recipe.data.sequence_length})
    plan = RoutingPlan.from_recipe(recipe, backbone.shape)
    length = recipe.data.sequence_length
    routed = RoutedModel.attach(backbone.model, plan, seed=recipe.train.seed)
    settings = recipe.train.model_copy(
        update={"steps": steps, "compile": variant.compile, "activation_checkpointing": variant.checkpointing}
    )
    budget = Budget.from_section(recipe.budget, plan, backbone.shape, length)
    generator = torch.Generator().manual_seed(0)
    shape = (settings.batch_size, length)
    ids = torch.randint(0, backbone.shape.vocab_size, shape, generator=generator)

    def fetch(step: int, rows: Sequence[int]) -> tuple[Tensor, None]:
        return ids[list(rows)], None

    on_gpu = backbone.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with _chunk_size(variant.chunked):
        trainer = Trainer(routed, budget, settings, fetch, length)
        records = list(trainer.run(0, steps))
    routed.detach()
    result = {
        "variant": variant.name,
        "tokens_per_second": median(r.tokens_per_second for r in records[len(records) // 2 :]),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "first_loss": records[0].lm_loss,
        "micro_batch_size": trainer.micro_batch_size,
    }
    del backbone, routed, trainer
    gc.collect()
    return result


@contextmanager
def _chunk_size(chunked: bool) -> Iterator[None]:
    before = loss.CHUNK_BYTES
    loss.CHUNK_BYTES = before if chunked else 2**62
    try:
        yield
    finally:
        loss.CHUNK_BYTES = before


def main() -> None:
    """Measure every variant of a recipe's step, or every layout on these ranks, and write one JSON document."""
    parser = argparse.ArgumentParser(prog="python -m widecli.train.speed", description=__doc__)
    parser.add_argument("recipe", nargs="?", help="default: the schema's defaults")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--steps", type=int, help="default: 30, with --random 4")
    parser.add_argument("--random", action="store_true", help="random weights of the model's sizes, by layout")
    parser.add_argument("--layout", action="append", default=[], help="of --random; may be given again; default: all")
    parser.add_argument("--beside", type=Path, help="of --random: an earlier --out, of one card, to compare with")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    recipe = resolve(arguments.recipe, arguments.overrides, {}).recipe
    steps = arguments.steps or (4 if arguments.random else 30)
    with joined() as ranks:
        results = measure_all(recipe, steps, arguments.layout, ranks) if arguments.random else _variants(recipe, steps)
    document = document_of(recipe, steps, results, ranks)
    if arguments.beside and ranks.is_first:
        show_beside(results, json.loads(arguments.beside.read_text())["results"])
    if arguments.out and ranks.is_first:
        arguments.out.write_text(json.dumps(document, indent=2) + "\n")


def document_of(recipe: Recipe, steps: int, results: Sequence[dict[str, Any]], ranks: Ranks) -> dict[str, Any]:
    """What `--out` holds: the results, the model's sizes, the ranks, the command, and what they ran on.

    Earlier documents lack `command`, `shape` and `ranks`.
    """
    words = map(without_home, sys.argv[1:])
    return {
        "schema": SCHEMA,
        "command": " ".join([*_start(ranks), "-m", "widecli.train.speed", *map(shlex.quote, words)]),
        "recipe": recipe.model_dump(mode="json"),
        "shape": asdict(load_shape(recipe.model)),
        "ranks": ranks.size,
        "steps": steps,
        "results": list(results),
        "environment": environment(),
    }


def _start(ranks: Ranks) -> list[str]:
    """The words before `-m`: torchrun where a group of ranks was started."""
    if ranks.size == 1:
        return ["python"]
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))
    nodes = ["--nnodes", str(ranks.size // here)] if here < ranks.size else []
    return ["torchrun", *nodes, "--nproc-per-node", str(here)]


def _variants(recipe: Recipe, steps: int) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for variant in VARIANTS:
        results.append(measure(recipe, variant, steps))
        found = results[-1]
        memory = f", peak {found['peak_memory_bytes'] / 2**30:.1f} GiB" if found["peak_memory_bytes"] else ""
        print(f"{variant.name}: {found['tokens_per_second']:,.0f} tokens/s{memory}", flush=True)
        first = results[0]["first_loss"]
        if abs(found["first_loss"] - first) > LOSS_TOLERANCE * first:
            raise WideError(f"{variant.name} computes another loss: {found['first_loss']} instead of {first}")
    return results


if __name__ == "__main__":
    main()

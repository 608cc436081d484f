"""A training step on one or more cards: speed, peak memory and its estimate, by how the backbone is held.

    torchrun --nproc-per-node 2 -m widecli.train.speed llama-3.1-8b_s50_g64 train.batch_size=8 --random --out two.json

Random weights in the sizes of the recipe's model, the same on any number of ranks, and random text. Correct first:
every variant's first loss must agree with the first variant's.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from widecli.errors import WideError
from widecli.model.backbone import default_device, empty_model, load_shape, resolve_dtype
from widecli.model.budget import Budget
from widecli.model.plan import ModelShape, RoutingPlan
from widecli.model.routed import RoutedModel
from widecli.ranks import Ranks
from widecli.recipe import paper
from widecli.recipe.schema import Recipe
from widecli.train.estimate import Estimate, estimate
from widecli.train.loop import Trainer
from widecli.train.sharding import Sharding, allocate, shard_layers

LOSS_TOLERANCE = 0.02  # relative, in bf16


@dataclass(frozen=True)
class Layout:
    """One way to hold the backbone and its activations."""

    name: str
    sharding: Sharding | None = None
    checkpointing: bool = False

    def changed(self, recipe: Recipe) -> Recipe:
        """The recipe that says so."""
        held = {"shard": self.sharding.over if self.sharding else "none"}
        distributed = recipe.distributed.model_copy(
            update=held | {"offload": bool(self.sharding and self.sharding.offload)}
        )
        train = recipe.train.model_copy(update={"activation_checkpointing": self.checkpointing})
        return recipe.model_copy(update={"distributed": distributed, "train": train})


LAYOUTS = (
    Layout("whole"),
    Layout("whole, checkpointing", checkpointing=True),
    Layout("dealt", Sharding("full")),
    Layout("dealt, checkpointing", Sharding("full"), checkpointing=True),
    Layout("offloaded", Sharding("full", offload=True)),
    Layout("offloaded, checkpointing", Sharding("full", offload=True), checkpointing=True),
)


def layouts_for(ranks: Ranks, names: Sequence[str]) -> list[Layout]:
    """Those that make sense on so many ranks, or the named ones. Raises WideError for a stranger."""
    known = {layout.name: layout for layout in LAYOUTS}
    if strange := [name for name in names if name not in known]:
        raise WideError(f"there is no layout {strange[0]!r}; there are {'; '.join(known)}")
    if ranks.size > 1:
        fitting = list(LAYOUTS)
    elif torch.distributed.is_initialized():  # to deal to one card is to hold it whole
        fitting = [layout for layout in LAYOUTS if not layout.sharding or layout.sharding.offload]
    else:
        fitting = [layout for layout in LAYOUTS if not layout.sharding]
    return [known[name] for name in names] or fitting


def measure(recipe: Recipe, layout: Layout, steps: int, ranks: Ranks) -> dict[str, Any]:
    """Run `steps` steps; returns speed (all ranks), peak memory (the fullest card) beside its estimate, first loss."""
    torch.compiler.reset()
    device = default_device()
    on_gpu = device.type == "cuda"
    recipe = layout.changed(recipe)
    shape = load_shape(recipe.model)
    plan = RoutingPlan.from_recipe(recipe, shape)
    length = recipe.data.sequence_length
    dtype = resolve_dtype(recipe.model.dtype, device)
    if on_gpu:
        torch.cuda.empty_cache()
    model = random_backbone(shape, dtype, layout.sharding, device)
    routed = RoutedModel.attach(model, plan, seed=recipe.train.seed)
    settings = recipe.train.model_copy(update={"steps": steps})
    ids = torch.randint(0, shape.vocab_size, (settings.batch_size, length), generator=torch.Generator().manual_seed(0))

    def fetch(step: int, rows: Sequence[int]) -> tuple[Tensor, None]:
        return ids[list(rows)], None

    trainer = Trainer(routed, Budget.from_section(recipe.budget, plan, shape, length), settings, fetch, length)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    records = list(trainer.run(0, steps))
    routed.detach()
    peak = max(ranks.gather(torch.cuda.max_memory_allocated())) if on_gpu else None
    micro = recipe.train.model_copy(update={"micro_batch_size": trainer.micro_batch_size})
    figures = estimated(recipe.model_copy(update={"train": micro}), layout, dtype, ranks.size)
    speed = median(r.tokens_per_second for r in records[1:] or records)  # the first step compiles
    del model, routed, trainer
    gc.collect()
    return {
        "layout": layout.name,
        "ranks": ranks.size,
        "batch_size": settings.batch_size,
        "micro_batch_size": micro.micro_batch_size,
        "tokens_per_second": speed,
        "flops_per_second_a_card": figures.flops / figures.tokens * speed / ranks.size,
        "peak_memory_bytes": peak,
        "estimated_memory_bytes": figures.memory_bytes,
        "estimate_over_peak": figures.memory_bytes / peak if peak else None,
        "first_loss": records[0].lm_loss,
        "hours_for_the_papers_tokens": paper.TOKENS / speed / 3600,
    }


def estimated(recipe: Recipe, layout: Layout, dtype: torch.dtype, ranks: int) -> Estimate:
    """What `--dry-run` says of the recipe in that layout on so many cards."""
    recipe = layout.changed(recipe)
    shape = load_shape(recipe.model)
    plan = RoutingPlan.from_recipe(recipe, shape)
    return estimate(recipe, shape, plan, value_bytes=dtype.itemsize, ranks=ranks)


def random_backbone(shape: ModelShape, dtype: torch.dtype, sharding: Sharding | None, device: torch.device) -> Any:
    """A frozen Llama of these sizes; its weights depend on their names alone, not on who holds which part of them."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        **asdict(shape),  # in a config's own words
        max_position_embeddings=131072,
        tie_word_embeddings=shape.hidden_size < 4096,  # as `backbone_parameters` counts
    )
    model = empty_model(config, dtype)
    if sharding:
        shard_layers(model, sharding, device)
    allocate(model, sharding or Sharding("full"), device)
    _draw(model, device)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def _draw(model: nn.Module, device: torch.device) -> None:
    from torch.distributed.tensor import DTensor

    generator = torch.Generator(device)
    for name, parameter in model.named_parameters():
        generator.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little"))
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if "norm" in name:
            whole.fill_(1.0)
        else:
            whole.normal_(std=0.02, generator=generator)
        if isinstance(parameter, DTensor):
            mine = whole.chunk(parameter.device_mesh.size())[parameter.device_mesh.get_local_rank()]
            parameter.to_local().copy_(mine)
        else:
            parameter.copy_(whole)


def show_beside(results: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> None:
    """A line a layout: how much faster it is here than on what `others` were measured on. Raises WideError when the
    losses differ."""
    before = {found["layout"]: found for found in others}
    for found in results:
        # dealing weights to one card alone is holding them whole
        other = before.get(found["layout"]) or before.get(found["layout"].replace("dealt", "whole"))
        if other:
            if abs(found["first_loss"] - other["first_loss"]) > LOSS_TOLERANCE * other["first_loss"]:
                raise WideError(f"{found['layout']} computes {found['first_loss']} instead of {other['first_loss']}")
            ratio = found["tokens_per_second"] / other["tokens_per_second"]
            print(f"{found['layout']}: {ratio:.2f}x from {other['ranks']} to {found['ranks']} (was: {other['layout']})")


def measure_all(recipe: Recipe, steps: int, names: Sequence[str], ranks: Ranks) -> list[dict[str, Any]]:
    """Every layout, with a line for each as it is done. Raises WideError when one computes another loss."""
    results: list[dict[str, Any]] = []
    for layout in layouts_for(ranks, names):
        results.append(measure(recipe, layout, steps, ranks))
        found, first = results[-1], results[0]["first_loss"]
        if abs(found["first_loss"] - first) > LOSS_TOLERANCE * first:
            raise WideError(f"{layout.name} computes another loss: {found['first_loss']} instead of {first}")
        if ranks.is_first:
            print(_line(found), flush=True)
    return results


def _line(found: dict[str, Any]) -> str:
    memory = ""
    if found["peak_memory_bytes"]:
        peak, expected = (found[key] / 2**30 for key in ("peak_memory_bytes", "estimated_memory_bytes"))
        memory = f", peak {peak:.1f} GiB (estimated {expected:.1f}, {found['estimate_over_peak']:.2f} of it)"
    return (
        f"{found['ranks']} x {found['layout']}: {found['tokens_per_second']:,.0f} tokens/s, "
        f"{found['flops_per_second_a_card'] / 1e12:.0f} TFLOP/s a card{memory}, loss {found['first_loss']:.4f}, "
        f"the paper's tokens in {found['hours_for_the_papers_tokens']:.1f} h"
    )

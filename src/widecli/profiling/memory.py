"""Memory before it is allocated: weights, routers, cache and activations of a cell, and the largest batch that fits.

What is added for skipped groups counts with the routers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from wide_kernels.tuning.tiles import TILE
from widecli.engine.cache import cache_bytes, free_bytes
from widecli.engine.session import PREFILL_CHUNK_TOKENS
from widecli.errors import UsageError
from widecli.model.plan import ModelShape, RoutingPlan

GIB = 1024**3
USABLE = 0.9  # of the free memory: libraries' workspaces and the allocator's rounding need some


@dataclass(frozen=True)
class MemoryModel:
    """Bytes of one model serving one batch."""

    weights: int
    routers: int
    cache: int
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.routers + self.cache + self.activations

    def as_dict(self) -> dict[str, int]:
        """For JSON."""
        parts = ("weights", "routers", "cache", "activations", "total")
        return {f"{part}_bytes": getattr(self, part) for part in parts}


def weights_bytes(shape: ModelShape, dtype: torch.dtype, tied: bool) -> int:
    """Bytes of a dense model's weights."""
    width, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    layer = shape.hidden_size * (2 * width + 2 * kv + 3 * shape.intermediate_size + 2)
    ends = (1 if tied else 2) * shape.vocab_size * shape.hidden_size
    return (shape.num_hidden_layers * layer + ends + shape.hidden_size) * dtype.itemsize


def routers_bytes(shape: ModelShape, plan: RoutingPlan) -> int:
    """Bytes of a plan's routers, which are fp32."""
    total = 0
    for layer in plan.layers(shape):
        counts = [1] if layer.shared else [n for n in (layer.attention_groups, layer.ffn_groups) if n]
        total += sum(plan.rank * (shape.hidden_size + 1 + 2 * n) + 2 * n for n in counts)
    return 4 * total


def compensations_bytes(shape: ModelShape, plan: RoutingPlan, dtype: torch.dtype) -> int:
    """Bytes of what a plan adds for skipped groups, packed as the engine has it."""
    if plan.compensation is None:
        return 0
    rank = plan.compensation.rank
    counts = [n for layer in plan.layers(shape) for n in (layer.attention_groups, layer.ffn_groups) if n]
    columns = sum(-(-(n + rank) // TILE) * TILE + rank for n in counts)
    return columns * shape.hidden_size * dtype.itemsize


def activation_bytes(shape: ModelShape, rows: int, batch: int, dtype: torch.dtype) -> int:
    """Of the widest moment of a layer, and the logits: residual, normalised, gate and up, their product."""
    widest = 2 * shape.hidden_size + 3 * shape.intermediate_size
    return (rows * widest + 2 * batch * shape.vocab_size) * dtype.itemsize


def memory_model(
    shape: ModelShape,
    plan: RoutingPlan | None,
    batch: int,
    prompt: int,
    capacity: int,
    dtype: torch.dtype,
    *,
    tied: bool,
    prefills: bool = True,
) -> MemoryModel:
    """What serving needs; without `prefills` only decode steps run."""
    rows = min(batch * prompt, max(batch, PREFILL_CHUNK_TOKENS)) if prefills else batch
    return MemoryModel(
        weights=weights_bytes(shape, dtype, tied),
        routers=routers_bytes(shape, plan) + compensations_bytes(shape, plan, dtype) if plan else 0,
        cache=cache_bytes(shape, batch, capacity, dtype),
        activations=activation_bytes(shape, rows, batch, dtype),
    )


@dataclass(frozen=True)
class Demand:
    """What measuring holds at once: the weights, the routers of all variants, caches, recorded activations."""

    shape: ModelShape
    plans: Sequence[RoutingPlan]
    dtype: torch.dtype
    tied: bool
    loaded: bool
    shared_cache: bool
    prefills: bool

    def needed(self, batch: int, prompt: int, capacity: int) -> int:
        """Bytes still to be allocated for one cell."""
        base = memory_model(
            self.shape, None, batch, prompt, capacity, self.dtype, tied=self.tied, prefills=self.prefills
        )
        sides = 1 + len(self.plans)
        routers = sum(
            routers_bytes(self.shape, plan) + compensations_bytes(self.shape, plan, self.dtype) for plan in self.plans
        )
        routers = 0 if self.loaded else routers
        caches = base.cache * (1 if self.shared_cache else sides)
        # every recorded graph keeps its activations
        return (0 if self.loaded else base.weights) + routers + caches + base.activations * sides

    def check(self, batch: int, prompt: int, capacity: int, device: torch.device) -> None:
        """Raise UsageError when a cell does not fit in the free memory, naming the largest batch that does."""
        free = free_bytes(device)
        needed = self.needed(batch, prompt, capacity)
        if free is None or needed <= free * USABLE:
            return
        fits = self.largest_batch(prompt, capacity, free, batch)
        hint = f"the largest batch that fits is {fits}" if fits else "not even a batch of 1 fits; shorten the prompt"
        if not fits and not self.loaded and weights_bytes(self.shape, self.dtype, self.tied) > free * USABLE:
            hint = "not even the weights fit; take a smaller --shape"
        raise UsageError(
            f"batch {batch} with {capacity} tokens each needs {needed / GIB:.1f} GiB and {free / GIB:.1f} GiB are free "
            f"on {device}: {hint}"
        )

    def largest_batch(self, prompt: int, capacity: int, free: int, below: int) -> int:
        """The largest batch under `below` that fits in `free` bytes; 0 when none does."""
        low, high = 0, below
        while low < high:
            middle = (low + high + 1) // 2
            if self.needed(middle, prompt, capacity) <= free * USABLE:
                low = middle
            else:
                high = middle - 1
        return low

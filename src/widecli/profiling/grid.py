"""What a grid of cells will ask for, from the sizes alone: memory, bounds, time."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from widecli.engine.cache import cache_bytes, free_bytes
from widecli.profiling.bound import Pass, Phase, bound, peaks_of
from widecli.profiling.cells import Cell
from widecli.profiling.memory import USABLE, Demand, activation_bytes, memory_model
from widecli.profiling.subject import Outline, Settings

_REACH = {"cuda": 0.6, "cpu": 0.15}  # share of the bound that a first guess of the time takes for granted
_SETTING_UP = {"cuda": 8.0, "cpu": 0.5}  # seconds a cell: tuning, allocating
_RECORDED_PASSES = 4  # a session's plain passes around a recording: two to warm up, one to record, one counted
_COMPARING = {"cuda": 40.0, "cpu": 2.0}  # seconds a run: Hugging Face's model is compiled


def cells(settings: Settings, kept: Collection[Cell] = ()) -> list[Cell]:
    """The grid's cells in the order in which they are measured, without those that are kept."""
    every = [(batch, prompt) for prompt in settings.prompts for batch in settings.batches]
    return [cell for cell in every if cell not in kept]


def check(outline: Outline, settings: Settings, *, loaded: bool, kept: Collection[Cell] = ()) -> None:
    """Refuse a grid that the model or the memory cannot hold, before anything large is allocated."""
    needed = demand(outline, settings, loaded=loaded)
    for batch, prompt in cells(settings, kept):
        needed.check(batch, prompt, capacity_of(settings, prompt), outline.device)


def fitting_batches(outline: Outline, settings: Settings, free: int | None, *, loaded: bool) -> tuple[int, ...]:
    """Those of the batches whose cells all fit in `free` bytes."""
    if free is None:
        return settings.batches
    needed = demand(outline, settings, loaded=loaded)
    most = min(
        needed.largest_batch(prompt, capacity_of(settings, prompt), free, max(settings.batches))
        for prompt in settings.prompts
    )
    return tuple(batch for batch in settings.batches if batch <= most)


def capacity_of(settings: Settings, prompt: int) -> int:
    """Tokens a sequence may have in a cell."""
    return prompt + (settings.gen if "tpot" in settings.phases else 0)


def demand(outline: Outline, settings: Settings, *, loaded: bool) -> Demand:
    """What a cell holds at once. Random masks of all shares run on one session a plan."""
    return Demand(
        outline.shape,
        outline.plans,
        outline.dtype,
        outline.tied,
        loaded,
        shared_cache=settings.masks != "learned",
        prefills="ttft" in settings.phases or settings.masks == "learned",
    )


def fits_beside(outline: Outline, settings: Settings, batch: int, prompt: int) -> bool:
    """Whether a Hugging Face model on loaded weights has room for its cache and activations beside ours."""
    free = free_bytes(outline.device)
    if free is None:
        return True
    capacity = capacity_of(settings, prompt)
    theirs = cache_bytes(outline.shape, batch, capacity, outline.dtype)
    if "ttft" in settings.phases:  # in one piece
        theirs += activation_bytes(outline.shape, batch * prompt, batch, outline.dtype)
    return demand(outline, settings, loaded=True).needed(batch, prompt, capacity) + theirs <= free * USABLE


def expected_seconds(outline: Outline, settings: Settings, kept: Collection[Cell] = ()) -> float:
    """About how long the measurement takes, from the bounds."""
    left = cells(settings, kept)
    kind = outline.device.type
    peaks = peaks_of(outline.device, outline.dtype)
    sessions = 1 + len(outline.plans)
    sides = 1 + len(outline.plans) * max(1, len(settings.sparsities)) + settings.compare_hf
    total = _COMPARING[kind] if settings.compare_hf and left else 0.0
    for batch, prompt in left:
        for phase in settings.phases:
            once = bound(pass_of(outline, settings, phase, batch, prompt), peaks).seconds / _REACH[kind]
            turn = sides * once * (settings.gen - 1 if phase == "tpot" else 1)
            # two turns warm up, and what a variant skipped is counted in another one
            total += 3 * turn + max(settings.seconds, 3 * turn) + _RECORDED_PASSES * sessions * once
        total += _SETTING_UP[kind]
    return total


def estimates(outline: Outline, settings: Settings, kept: Collection[Cell] = ()) -> list[dict[str, Any]]:
    """Every cell's dense bound and the memory of one model, from the sizes alone."""
    peaks = peaks_of(outline.device, outline.dtype)
    return [
        {
            "phase": phase,
            "batch": batch,
            "prompt": prompt,
            "dense_bound_ms": 1e3 * bound(pass_of(outline, settings, phase, batch, prompt), peaks).seconds,
            "memory": memory_model(
                outline.shape,
                outline.plans[0],
                batch,
                prompt,
                capacity_of(settings, prompt),
                outline.dtype,
                tied=outline.tied,
                prefills="ttft" in settings.phases,
            ).as_dict(),
        }
        for batch, prompt in cells(settings, kept)
        for phase in settings.phases
    ]


def pass_of(outline: Outline, settings: Settings, phase: Phase, batch: int, prompt: int) -> Pass:
    """One prefill or decode step of a cell."""
    return Pass.of(outline.shape, phase, batch, prompt, settings.gen, outline.dtype.itemsize)

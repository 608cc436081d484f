"""From flags to a checked request: what to measure, over which grid, and everything refused before it costs time."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import torch

from widecli.engine.cache import free_bytes
from widecli.errors import UsageError
from widecli.model import checkpoint
from widecli.model.backbone import default_device, load_shape, resolve_dtype
from widecli.profiling import grid
from widecli.profiling.bound import Peaks, Phase, peaks_of, remember_peaks
from widecli.profiling.cells import MeasuredCells
from widecli.profiling.environment import code_hash, gpus, package_version
from widecli.profiling.subject import (
    Dense,
    Masks,
    Outline,
    Settings,
    Subject,
    load_checkpoint,
    load_dense,
    outline_of_shape,
    random_plans,
    subject_of_checkpoint,
    subject_of_shape,
    with_random_masks,
)
from widecli.recipe.schema import ModelSection, TrackSection

DTYPES = ("bfloat16", "float16", "float32")
_THROUGHPUT_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_SPARSITY = 0.5
_GROUP_SIZE = 64
_COMPENSATION = 32  # rank beside means: what a recipe has by default

T = TypeVar("T", int, float)


@dataclass(frozen=True)
class Flags:
    """The command line as it came; at most one of the first three."""

    checkpoint: Path | None
    shape: str | None
    model: str | None
    masks: str | None = None
    dtype: str | None = None
    text: str = ""
    batch: str | None = None
    prompt: str | None = None
    gen: int | None = None
    sparsity: str | None = None
    group_size: str | None = None
    compensation: str | None = None
    ttft: bool = False
    tpot: bool = False
    memory: bool = False
    energy: bool = False
    breakdown: bool = False
    throughput: bool = False
    compare_hf: bool = False
    dense: str = "own"
    seconds: float = 5.0
    beyond_positions: bool = False


@dataclass(frozen=True)
class RecordedRecipe:
    """What a run directory stores, and where the run is tracked."""

    text: str
    track: TrackSection


@dataclass(frozen=True)
class Request:
    """What to measure; `load` makes it."""

    flags: Flags
    outline: Outline
    settings: Settings
    checkpoint: Path | None
    config: Any = None  # the Hugging Face config of a shape
    by_memory: bool = False  # free memory chose the batches, not the command line

    @property
    def where(self) -> str:
        """Device and dtype for people."""
        device = self.outline.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
        return f"{name}, {_plain(self.outline.dtype)}"

    @property
    def run_name(self) -> str:
        """`<model or run>-<masks>-<hash8>`: of the command line alone, whatever memory is free."""
        what = [self.outline.name, str(self.checkpoint), _plain(self.outline.dtype), self.flags.text]
        settings = self.settings.as_dict() | ({"batches": _THROUGHPUT_BATCHES} if self.by_memory else {})
        digest = hashlib.sha256(json.dumps([what, settings], sort_keys=True).encode()).hexdigest()[:8]
        stem = self.outline.name.rstrip("/").rsplit("/", 1)[-1].lower()
        if self.checkpoint is not None:
            path = self.checkpoint.resolve()
            owner = path.parent.parent.name if path.parent.name == "checkpoints" else path.parent.name
            stem = f"{owner.removeprefix('calibrate-')}-{path.name}"
        return f"{stem}-{self.settings.masks}-{digest}"

    def continuing(self, recorded: Mapping[str, Any] | None) -> Request:
        """The request as a run that goes on understands it; `recorded` is that run's own `identity`.

        Batches that free memory chose stay those that it chose when the run began.
        """
        batches = _batches_of(recorded)
        if not self.by_memory or batches is None:
            return self
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, batches=batches))

    def check(self, kept: Collection[tuple[int, int]] = ()) -> None:
        """Refuse what the model or the memory cannot hold of the cells that are not kept; allocates nothing."""
        grid.check(self.outline, self.settings, loaded=False, kept=kept)

    def recipe(self, wandb: str | None) -> RecordedRecipe:
        """The checkpoint's recipe; of a shape or a dense model, one that names it."""
        from widecli.recipe.files import recipe_text
        from widecli.recipe.load import dump, load_stored, resolve

        if self.checkpoint is not None:
            text = recipe_text(self.checkpoint / "recipe.yaml")
            recipe = load_stored(self.checkpoint / "recipe.yaml")
        else:
            recipe = resolve(None, (), {"model.name": self.outline.name}).recipe
            text = dump(recipe)
        mode = recipe.track.wandb if wandb is None else wandb
        _refuse_other("--wandb", mode, get_args(TrackSection.model_fields["wandb"].annotation))
        track = TrackSection.model_validate({"wandb": mode, "project": recipe.track.project})
        return RecordedRecipe(text, track)

    def load(self, words: str) -> Subject:
        """Load or draw the weights. Raises UsageError for what only the model itself can tell."""
        if self.checkpoint is not None:
            outline, model = load_checkpoint(
                self.checkpoint, self.flags.dtype, self.settings, beyond_positions=self.flags.beyond_positions
            )
            subject = subject_of_checkpoint(outline, model, self.settings, words)
        elif self.flags.model is not None:
            section = ModelSection.model_validate(
                {
                    "name": self.flags.model,
                    "dtype": self.flags.dtype or "auto",
                    "beyond_positions": self.flags.beyond_positions,
                }
            )
            outline, model = load_dense(section, self.settings)
            assert model.backbone is not None
            subject = with_random_masks(outline, model.weights, self.settings, model.backbone.model)
        else:
            subject = subject_of_shape(self.outline, self.config, self.settings)
        longest = max(self.settings.prompts)
        subject.dense.check_length(grid.capacity_of(self.settings, longest))
        return subject

    def identity(self) -> dict[str, Any]:
        """What is measured, and on what: two runs that agree in this measure the same."""
        return {
            "model": self.outline.name,
            "checkpoint": None if self.checkpoint is None else checkpoint.content_hash(self.checkpoint),
            "text": self.flags.text if self.settings.masks == "learned" else None,
            "settings": json.loads(json.dumps(self.settings.as_dict())),
            "device": self.where,
            "threads": torch.get_num_threads() if self.outline.device.type == "cpu" else None,
            "batches chosen by": "free memory" if self.by_memory else "--batch",
            "code": code_hash(),
            **{name: package_version(name) for name in ("torch", "triton", "transformers")},
        }

    def bounded_by(self, cells: MeasuredCells) -> None:
        """Bounds come from what the device was taken to do when the run began; where that is measured, it varies."""
        device, dtype = self.outline.device, self.outline.dtype
        if cells.peaks is not None:
            remember_peaks(device, dtype, Peaks(**cells.peaks))
        cells.peaks = dataclasses.asdict(peaks_of(device, dtype))

    def facts(self, subject: Subject) -> dict[str, Any]:
        """What a summary says besides its points."""
        peaks = peaks_of(self.outline.device, self.outline.dtype)
        facts: dict[str, Any] = {"model": self.outline.name, "backbone": None, "plan": None, "checkpoint": None}
        if self.checkpoint is not None:
            stored = checkpoint.read_config(self.checkpoint)
            facts |= {
                "backbone": dataclasses.asdict(stored.backbone),
                "plan": stored.plan.to_json(),
                "checkpoint": str(self.checkpoint),
                "steps": stored.step,
                "recipe_hash": stored.recipe_hash,
            }
        device = self.outline.device
        return facts | {
            "device": device.type,
            "device_name": gpus()[0]["name"] if device.type == "cuda" else None,
            "dtype": _plain(subject.outline.dtype),
            "peaks": dataclasses.asdict(peaks),
            "settings": self.settings.as_dict(),
            "text": self.flags.text if self.settings.masks == "learned" else None,
        }


def read(flags: Flags) -> Request:
    """Check the flags against each other, the model and the memory. Raises UsageError."""
    _refuse_several(flags)
    if flags.dtype is not None and flags.dtype not in DTYPES:
        raise UsageError(f"--dtype is one of {', '.join(DTYPES)}, got {flags.dtype!r}")
    device = default_device()
    target = None
    if flags.checkpoint is not None:
        target = checkpoint.resolve(flags.checkpoint)
        checkpoint.refuse_incomplete(target)
    masks = _masks(flags)
    plan = checkpoint.read_config(target).plan if target else None
    sizes = _list("--G", flags.group_size, int, lambda g: g >= 1, "channels, 1 or more")
    sizes = sizes or (plan.ffn_group_size if plan else _GROUP_SIZE,)
    added = _compensations(flags)
    config = None
    if flags.shape is not None:
        outline, config = outline_of_shape(flags.shape, flags.dtype or "auto", device, sizes, added)
    else:
        section = ModelSection(name=flags.model or "") if target is None else checkpoint.section_of(target)
        shape = load_shape(section)
        plans = (plan,) if plan and masks == "learned" else random_plans(shape, sizes, plan, added)
        name = checkpoint.read_config(target).backbone.id if target else section.name
        dtype = resolve_dtype(flags.dtype or section.dtype, device)
        outline = Outline(name, shape, dtype, False, None, device, plans)
    settings = _settings(flags, masks, sizes, added, outline)
    if not flags.beyond_positions:
        _refuse_too_long(outline, settings)
    by_memory = settings.throughput and flags.batch is None
    if by_memory:
        fits = grid.fitting_batches(outline, settings, free_bytes(device), loaded=False)
        settings = dataclasses.replace(settings, batches=fits or settings.batches[:1])
    return Request(flags, outline, settings, target, config, by_memory)


def _batches_of(recorded: Mapping[str, Any] | None) -> tuple[int, ...] | None:
    """Some of the usual batches, which a run recorded; None where it recorded anything else."""
    settings = recorded.get("settings") if recorded is not None else None
    batches = settings.get("batches") if isinstance(settings, Mapping) else None
    if not isinstance(batches, list) or not batches or any(b not in _THROUGHPUT_BATCHES for b in batches):
        return None
    return tuple(batches)


def _refuse_several(flags: Flags) -> None:
    given = {"a checkpoint": flags.checkpoint, "--shape": flags.shape, "--model": flags.model}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise UsageError(f"name one thing to measure, a checkpoint, --shape or --model; got {' and '.join(named)}")


def _masks(flags: Flags) -> Masks:
    masks = flags.masks or ("random" if flags.checkpoint is None else "learned")
    if masks == "random":
        return "random"
    if masks != "learned":
        raise UsageError(f"--masks is learned or random, got {masks!r}")
    if flags.checkpoint is None:
        raise UsageError(f"{flags.shape or flags.model} has no routers: name a checkpoint, or --masks random")
    if any(given is not None for given in (flags.sparsity, flags.group_size, flags.compensation)):
        raise UsageError(
            "a checkpoint decides its own sparsity and groups; --sparsity, --G and --compensation need --masks random"
        )
    return "learned"


def _compensations(flags: Flags) -> tuple[int | None, ...]:
    """Ranks of what random weights add for skipped groups, None = nothing; empty = what a checkpoint adds."""
    wanted = "none or ranks, 0 or more"
    ranks = _list("--compensation", flags.compensation, _rank, lambda rank: True, wanted)
    if not ranks:
        return () if flags.checkpoint is not None else (_COMPENSATION,)
    return tuple(None if rank == _WITHOUT else rank for rank in ranks)


_WITHOUT = -1


def _rank(text: str) -> int:
    if text == "none":
        return _WITHOUT
    rank = int(text)
    if rank < 0:
        raise ValueError
    return rank


def _settings(
    flags: Flags, masks: Masks, sizes: tuple[int, ...], compensations: tuple[int | None, ...], outline: Outline
) -> Settings:
    on_gpu = outline.device.type == "cuda"
    phases: tuple[Phase, ...] = ("ttft", "tpot")
    if flags.ttft != flags.tpot:
        phases = ("ttft",) if flags.ttft else ("tpot",)
    gen = flags.gen if flags.gen is not None else (128 if on_gpu else 16)
    if gen < 2:
        raise UsageError(f"--gen must be at least 2 tokens, the first one and one after it, got {gen}")
    batches = _list("--batch", flags.batch, int, lambda b: b >= 1, "sequences, 1 or more")
    prompts = _list("--prompt", flags.prompt, int, lambda p: p >= 1, "tokens, 1 or more")
    _refuse_other("--dense", flags.dense, get_args(Dense))
    if not math.isfinite(flags.seconds):
        raise UsageError(f"--seconds must be a finite time, got {flags.seconds}")
    rates = _list("--sparsity", flags.sparsity, float, lambda s: 0 <= s < 1, "shares from 0 to below 1")
    return Settings(
        phases,
        batches or (_THROUGHPUT_BATCHES if flags.throughput else (1,)),
        prompts or (1024 if on_gpu else 64,),
        gen,
        () if masks == "learned" else rates or (_SPARSITY,),
        () if masks == "learned" else sizes,
        masks,
        memory=flags.memory,
        energy=flags.energy,
        breakdown=flags.breakdown,
        throughput=flags.throughput,
        compare_hf=flags.compare_hf,
        dense=cast(Dense, flags.dense),
        compensations=() if masks == "learned" else compensations,
        seconds=flags.seconds,
    )


def _refuse_other(flag: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{flag} must be one of {', '.join(known)}, got {value!r}")


def _refuse_too_long(outline: Outline, settings: Settings) -> None:
    longest = grid.capacity_of(settings, max(settings.prompts))
    if outline.max_tokens is not None and longest > outline.max_tokens:
        raise UsageError(
            f"prompts of {max(settings.prompts)} tokens and {longest - max(settings.prompts)} generated ones are more "
            f"than the {outline.max_tokens} that {outline.name} is made for; shorten --prompt, or add "
            "--beyond-positions if you mean it"
        )


def _list(
    flag: str, text: str | None, kind: Callable[[str], T], accept: Callable[[T], bool], wanted: str
) -> tuple[T, ...]:
    """The values of a comma-separated flag, each once; empty when it was not given."""
    if text is None:
        return ()
    values: list[T] = []
    for item in text.split(","):
        try:
            value = kind(item.strip())
        except ValueError:
            value = None
        if value is None or not accept(value):
            raise UsageError(f"{flag} takes {wanted}, separated by commas; got {text!r}")
        if value not in values:
            values.append(value)
    return tuple(values)


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

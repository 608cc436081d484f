"""Calibration from a recipe to a run directory: backbone -> tokens -> warm start -> loop -> checkpoints -> summary."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from widecli.data.sources import SamplingModel, open_source
from widecli.data.stream import SequenceStream, collate
from widecli.data.tokens import TokenSet, prepare_tokens
from widecli.errors import Preempted, UsageError
from widecli.evaluate.perplexity import measure_perplexity
from widecli.model import checkpoint
from widecli.model.backbone import Backbone, load_backbone
from widecli.model.budget import Budget
from widecli.model.plan import RoutingPlan
from widecli.model.routed import RoutedModel
from widecli.model.warm_start import Batch, WarmStart, closed_form
from widecli.recipe.load import ResolvedRecipe, dump
from widecli.recipe.schema import Recipe
from widecli.track.run import Run
from widecli.train import state
from widecli.train.loop import StepRecord, Trainer

WARM_START_BATCH_TOKENS = 2048  # the closed form keeps activations for a backward pass: small batches suffice
_WARM_START_SEED_OFFSET = 1_000_003  # text for the closed form: an order of its own


class Reporter(Protocol):
    """How a calibration talks to whoever started it."""

    def note(self, message: str) -> None:
        """One line on what happens now."""

    def started(self, steps: int, first: int) -> None:
        """The loop is about to run steps `first` to `steps`."""

    def step(self, record: StepRecord) -> None:
        """A step is done."""


@dataclass
class Job:
    """Everything a calibration holds on to."""

    recipe: Recipe
    recipe_hash: str
    run: Run
    backbone: Backbone
    tokens: TokenSet
    routed: RoutedModel
    budget: Budget

    def save(self, trainer: Trainer, step: int, achieved: dict[str, Any] | None = None) -> Path:
        """Write `checkpoints/step-<step>`, from which `--resume` continues; older ones keep their routers only."""
        directory = self.run.checkpoints / f"step-{step:06d}"
        config = checkpoint.CheckpointConfig(
            self.backbone.identity, self.routed.plan, step, self.recipe_hash, achieved or {}
        )
        extra = {
            state.TENSORS: lambda path: state.save_optimizer(path, trainer.optimizer, trainer.parameters),
            state.STATE: lambda path: state.write_step(path, step),
        }
        checkpoint.save(directory, self.routed.routers, config, dump(self.recipe), extra)
        state.drop_old_states([path for _, path in checkpoint.steps(self.run.checkpoints)])
        return directory


def calibrate(resolved: ResolvedRecipe, run: Run, reporter: Reporter, *, offline: bool = False) -> dict[str, Any]:
    """Train the routers a recipe describes; a run that already has checkpoints continues from the newest.

    Returns the values of `summary.json`. Raises Preempted (resumable) after SIGTERM or SIGUSR1.
    """
    started = time.perf_counter()
    recipe = resolved.recipe
    job = prepare(recipe, resolved.hash8, run, reporter.note, offline)
    validation = _Validation(job, offline)
    done = checkpoint.steps(run.checkpoints)
    if not done:
        validation.measure_dense(reporter)
        _start_routers(job, reporter)
        validation.measure_start(reporter)
    trainer = Trainer(job.routed, job.budget, recipe.train, _fetcher(job), recipe.data.sequence_length)
    if done:
        _refuse_other_model(done[-1][1], job.backbone)
        first = state.load_optimizer(done[-1][1], trainer.optimizer, trainer.parameters)
        checkpoint.load_routers(done[-1][1], job.routed.routers)
        reporter.note(f"resuming after step {first}")
        run.rewind_metrics(first + 1)
    else:
        first = 0
        job.save(trainer, 0)
    speeds = _train(job, trainer, first, reporter)
    job.save(trainer, recipe.train.steps)  # what was trained is safe before the last measurement
    final = validation.measure_final(reporter)
    path = job.save(trainer, recipe.train.steps, final)
    job.routed.detach()
    return {
        "model": job.backbone.identity.id,
        "backbone": asdict(job.backbone.identity),
        "plan": job.routed.plan.to_json(),
        "budget": recipe.budget.model_dump(),
        "recipe_hash": resolved.hash8,
        **final,
        "validation": validation.result(),
        "steps": recipe.train.steps,
        "tokens_per_second": median(speeds) if speeds else None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if job.backbone.device.type == "cuda" else None,
        "micro_batch_size": trainer.micro_batch_size,
        "seconds": time.perf_counter() - started,
        "data": {"source": job.tokens.source, "sequences": len(job.tokens), "tokens": job.tokens.total_tokens},
        "checkpoint": str(path),
    }


def prepare(recipe: Recipe, recipe_hash: str, run: Run, note: Callable[[str], None], offline: bool) -> Job:
    """Load the backbone and the tokens and hang randomly started routers on; nothing is measured or written yet."""
    note(f"loading {recipe.model.name}")
    backbone = load_backbone(recipe.model)
    plan = RoutingPlan.from_section(recipe.routing, backbone.shape)
    budget = Budget.from_section(recipe.budget, plan, backbone.shape, recipe.data.sequence_length)
    identity = backbone.identity
    name = f"{identity.id}@{identity.revision}#{identity.weights_hash}"
    source = open_source(
        recipe.data.source,
        section=recipe.data,
        offline=offline,
        sampling=SamplingModel(backbone.model, backbone.tokenizer, name, recipe.train.seed),
    )
    note(f"preparing tokens from {source.name}")
    needed = recipe.train.steps * recipe.train.batch_size * recipe.data.sequence_length
    tokens = prepare_tokens(
        source, backbone.tokenizer, recipe.data, tokens_needed=max(needed, recipe.routing.warm_start_tokens)
    )
    if tokens.exhausted and needed > tokens.total_tokens:
        note(
            f"the text has {tokens.total_tokens:,} tokens and {recipe.train.steps} steps read {needed:,}: it will be "
            f"repeated {needed / tokens.total_tokens:.0f} times; more text (--data) gives better routers"
        )
    routed = RoutedModel.attach(backbone.model, plan, seed=recipe.train.seed)
    return Job(recipe, recipe_hash, run, backbone, tokens, routed, budget)


def _refuse_other_model(path: Path, backbone: Backbone) -> None:
    """A folder or a branch of the Hub can hold other weights than when the run began."""
    if difference := checkpoint.read_config(path).backbone.mismatch(backbone.identity):
        raise UsageError(
            f"{path} was trained on another model than {backbone.identity.id} is now: {difference}; bring the old one "
            f"back or start anew with --overwrite"
        )


def _batch(tokens: TokenSet, indices: Any) -> tuple[Tensor, Tensor | None]:
    ids, valid = collate(tokens, indices)
    # without padding no mask: attention then takes its fast causal path
    return ids, None if bool(valid.all()) else valid


def _fetcher(job: Job) -> Any:
    train = job.recipe.train
    stream = SequenceStream(len(job.tokens), train.batch_size, train.seed)

    def fetch(step: int, rows: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        return _batch(job.tokens, stream.batch(step)[list(rows)])

    return fetch


def warm_start_batches(recipe: Recipe, tokens: TokenSet, device: torch.device) -> list[Batch]:
    """The text behind the closed form, in an order of its own, on the device."""
    length = recipe.data.sequence_length
    count = max(1, min(recipe.routing.warm_start_tokens // length, len(tokens)))
    order = SequenceStream(len(tokens), count, recipe.train.seed + _WARM_START_SEED_OFFSET).batch(0)
    size = max(1, WARM_START_BATCH_TOKENS // length)
    batches: list[Batch] = []
    for start in range(0, count, size):
        ids, valid = _batch(tokens, order[start : start + size])
        batches.append((ids.to(device), None if valid is None else valid.to(device)))
    return batches


def _start_routers(job: Job, reporter: Reporter) -> None:
    recipe = job.recipe
    if recipe.routing.warm_start == "random":
        return
    batches = warm_start_batches(recipe, job.tokens, job.backbone.device)
    tokens = sum(ids.numel() for ids, _ in batches)
    # without steps the start is the result, so it has to meet the budget itself
    settings = WarmStart.for_tokens(tokens, recipe.budget.start_share if recipe.train.steps else 1.0)
    closed_form(job.routed, batches, job.budget, settings, lambda text: reporter.note(f"closed form: {text}"))


def _train(job: Job, trainer: Trainer, first: int, reporter: Reporter) -> list[float]:
    """The loop with its logs, checkpoints and signals. Returns the speeds seen after the first block, tokens/s."""
    train = job.recipe.train
    speeds: list[float] = []
    reporter.started(train.steps, first)
    with _stop_signals() as stop:
        for record in trainer.run(first, train.steps):
            job.run.log(**_metrics(record))
            reporter.step(record)
            if record.step > first + 1:  # the first block holds compilation and allocation
                speeds.append(record.tokens_per_second)
            if stop and trainer.at_block_end(record.step):
                job.save(trainer, record.step)
                raise Preempted(f"stopped by a signal after step {record.step}; --resume continues")
            if record.step % train.save_every == 0 and record.step < train.steps:
                job.save(trainer, record.step)
    return speeds


def _metrics(record: StepRecord) -> dict[str, Any]:
    return {key: value for key, value in asdict(record).items() if value is not None}


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGUSR1 instead of dying from them: a scheduler's notice that the machine is wanted back."""
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)

    numbers = (signal.SIGTERM, signal.SIGUSR1)
    try:
        before = [(number, signal.signal(number, note)) for number in numbers]
    except ValueError:  # not the main thread: whoever runs us there handles signals
        before = []
    try:
        yield received
    finally:
        for number, handler in before:
            signal.signal(number, handler)


class _Validation:
    """Perplexity of a held-out text for the dense model, at the start and at the end, logged with the run."""

    def __init__(self, job: Job, offline: bool) -> None:
        self.job = job
        self.offline = offline
        self.name = job.recipe.data.validation

    def measure_dense(self, reporter: Reporter) -> None:
        """The dense model, before anything else."""
        if self.name:
            reporter.note(f"dense perplexity on {self.name}")
            with self.job.routed.dense():
                self._log("dense", self._perplexity())

    def measure_start(self, reporter: Reporter) -> None:
        """The routers before the first step."""
        if self.name:
            reporter.note(f"perplexity on {self.name} before the first step")
            self._log("start", self._perplexity())

    def measure_final(self, reporter: Reporter) -> dict[str, Any]:
        """The trained routers; returns the rates seen (on a training batch when no validation text is named)."""
        self.job.routed.set_gate(None)
        with self.job.routed.tracing() as trace:
            if self.name:
                reporter.note(f"perplexity on {self.name}")
                self._log("final", self._perplexity())
            else:
                ids, valid = _batch(self.job.tokens, SequenceStream(len(self.job.tokens), 4, 0).batch(0))
                device = self.job.backbone.device
                with torch.no_grad():
                    mask = None if valid is None else valid.to(device)
                    self.job.routed.decoder(input_ids=ids.to(device), attention_mask=mask, use_cache=False)
        return trace.summary(self.job.recipe.data.sequence_length)

    def _perplexity(self) -> float:
        assert self.name is not None
        _, result = measure_perplexity(
            self.job.backbone.model,
            self.job.backbone.tokenizer,
            self.name,
            window=self.job.recipe.eval.perplexity_window,
            max_windows=self.job.recipe.eval.perplexity_windows,
            data_root=self.job.recipe.eval.data_root,
            offline=self.offline,
        )
        return float(result.value)

    def _log(self, when: str, value: float) -> None:
        step = self.job.recipe.train.steps if when == "final" else 0
        self.job.run.log(step=step, validation={"when": when, "text": self.name, "token_ppl": value})

    def result(self) -> dict[str, Any] | None:
        """`text`, `dense`, `start` and `final` token perplexity as logged, or None without a validation text."""
        if not self.name:
            return None
        found: dict[str, Any] = {"text": self.name, "dense": None, "start": None, "final": None}
        for entry in self.job.run.metrics():
            if "validation" in entry:
                found[entry["validation"]["when"]] = entry["validation"]["token_ppl"]
        return found

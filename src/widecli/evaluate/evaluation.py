"""One evaluation: a checkpoint beside its dense backbone, or a dense model alone, under one protocol."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from widecli.errors import UsageError, WideError
from widecli.evaluate.backoff import release_memory
from widecli.evaluate.dense_cache import DenseCache, dense_key
from widecli.evaluate.harness import run_tasks
from widecli.evaluate.perplexity import measure_perplexity
from widecli.evaluate.protocol import EvalProtocol
from widecli.evaluate.results import average, retention, summarise
from widecli.evaluate.tasks import load_tasks
from widecli.evaluate.texts import TEXT_FIELDS, perplexity_keys
from widecli.model import checkpoint
from widecli.model.backbone import Backbone, load_backbone
from widecli.model.identity import BackboneIdentity
from widecli.model.routed import RoutedModel
from widecli.model.standalone import dense_alone
from widecli.ranks import current
from widecli.recipe.schema import EvalSection, ModelSection

Note = Callable[[str], None]
Store = Callable[[str, object], object]
"""(file name, JSON document) -> stored in the run directory."""


@dataclass(frozen=True)
class Evaluation:
    """What to evaluate. `checkpoint` None = the dense model alone; `with_dense`: measure the backbone beside it."""

    model: ModelSection
    section: EvalSection
    checkpoint: Path | None
    with_dense: bool
    offline: bool
    text_field: str = TEXT_FIELDS[0]

    @property
    def protocol(self) -> EvalProtocol:
        """What the result depends on besides the model."""
        return EvalProtocol.from_section(self.section, self.text_field)

    @property
    def lengths(self) -> dict[str, int]:
        """Tokens of the longest sequences that are surely fed, by the key that sets them.

        `eval.max_length` is a limit that few requests reach: their own lengths are asked before they are scored.
        """
        return {"eval.perplexity_window": self.section.perplexity_window} if self.section.perplexity else {}


def evaluate(job: Evaluation, note: Note, store: Store) -> dict[str, Any]:
    """Measure; returns the values of the run's summary. lm-eval's own documents go to `store` untouched.

    Several ranks hold the whole model each, score a part of the windows and requests, and get all results.
    """
    section = job.section
    if not section.tasks and not section.perplexity:
        raise UsageError("nothing to evaluate: name eval.perplexity texts or eval.tasks (paper = the paper's seven)")
    config = checkpoint.read_config(job.checkpoint) if job.checkpoint else None
    with current().one_a_machine_first():  # data sets are downloaded and prepared once
        tasks = load_tasks(section.tasks, data_root=section.data_root, offline=job.offline) if section.tasks else []
    measurement = partial(_Measurement, job=job, tasks=tasks, note=note, store=store)
    if config is None:
        if said := dense_alone(job.model.name):
            note(said)
        backbone = _load(job, job.model, note)
        alone = measurement(backbone=backbone).dense()
        nothing = {"plan": None, "steps": None, "skip_rate": None, "adapter": None, "merged": False, "origin": None}
        return _summary(job, backbone.identity, alone, None, nothing)
    assert job.checkpoint is not None
    own = job.model.model_copy(update={"name": str(job.checkpoint), "revision": None})  # weights beside the routers
    bare = own if config.merged and config.adapter is None else job.model
    dense = None
    if job.with_dense or config.merged is None:
        backbone = _load(job, bare, note)
        # the folder's own model has the base's channels in another order
        wanted = config.merged if bare is own and config.merged else config.backbone
        if difference := wanted.mismatch(backbone.identity):
            raise UsageError(
                f"{job.checkpoint} was trained on {config.backbone.id}, and {bare.name} is another model: {difference}"
            )
        dense = measurement(backbone=backbone).dense() if job.with_dense else None
        if config.merged and bare is not own:
            del backbone  # before the next one takes its place in memory
            release_memory()
    if config.merged and (bare is not own or not job.with_dense):
        backbone = _load(job, own, note)
    routed, _ = checkpoint.attach(job.checkpoint, backbone)
    found = measurement(backbone=backbone).routed(routed)
    routed.detach()
    details = {
        "plan": config.plan.to_json(),
        "steps": config.step,
        "recipe_hash": config.recipe_hash,
        "adapter": dict(config.adapter) if config.adapter else None,
        "merged": config.merged is not None,
        "origin": dict(config.origin) if config.origin else None,
    }
    return _summary(job, config.backbone if config.merged else backbone.identity, found, dense, details)


def _load(job: Evaluation, model: ModelSection, note: Note) -> Backbone:
    note(f"loading {model.name}")
    backbone = load_backbone(model)
    backbone.refuse_beyond_positions(job.lengths)
    return backbone


class _Measurement:
    """Runs the protocol on the model as it stands, and knows what the dense cache has."""

    def __init__(self, job: Evaluation, backbone: Backbone, tasks: list[Any], note: Note, store: Store) -> None:
        self.job = job
        self.backbone = backbone
        self.tasks = tasks
        self.note = note
        self.store = store
        self.protocol = job.protocol

    def dense(self) -> dict[str, Any]:
        """The dense model's figures, from the cache when the very same has been measured before."""
        cache, key, stored = DenseCache(), None, None
        if current().is_first:
            key = dense_key(self.backbone, self.job.section, self.protocol, self.tasks, offline=self.job.offline)
            stored = cache.load(key)
        stored = current().from_first(stored)
        if stored is not None:
            self.note("dense: measured before under this protocol, taken from the cache")
            if stored.get("lm_eval"):
                self.store("lm_eval_dense.json", stored["lm_eval"])
            return {**{k: v for k, v in stored.items() if k != "lm_eval"}, "from_cache": True}
        found, harness = self._measure("dense", "lm_eval_dense.json")
        if key is not None:
            try:
                cache.store(key, {**found, "lm_eval": harness})
            except WideError as error:  # the figures are there: only the next evaluation has to measure them again
                self.note(f"warning: {error} The next evaluation will measure it again.")
        return {**found, "from_cache": False}

    def routed(self, routed: RoutedModel) -> dict[str, Any]:
        """The routed model's figures and what it skipped, over everything evaluated and for each text alone."""
        context = self.job.section.max_length
        rates: dict[str, Any] = {}

        def traced(name: str, run: Callable[[], Any]) -> Any:
            with routed.tracing() as one:
                result = run()
            rates[name] = one.gathered(current().total).summary(context)
            return result

        with routed.tracing() as trace:
            found, _ = self._measure("routed", "lm_eval_routed.json", traced)
        trace = trace.gathered(current().total)
        seen = {name: {k: v for k, v in r.items() if k != "layers"} for name, r in rates.items()}
        return {**found, **trace.summary(context), "skip_by_text": seen, "tokens": trace.tokens}

    def _measure(
        self, label: str, file: str, traced: Callable[[str, Callable[[], Any]], Any] = lambda _, run: run()
    ) -> tuple[dict[str, Any], Any]:
        section, model, tokenizer = self.job.section, self.backbone.model, self.backbone.tokenizer
        started = time.perf_counter()
        perplexity: dict[str, float] = {}
        details: dict[str, Any] = {}
        for name, key in perplexity_keys(section.perplexity).items():
            if key in perplexity:
                continue  # the same text by another name
            self.note(f"{label}: perplexity on {name}")
            result = traced(
                name,
                lambda name=name: measure_perplexity(  # type: ignore[misc]
                    model,
                    tokenizer,
                    name,
                    window=section.perplexity_window,
                    max_windows=section.perplexity_windows,
                    batch_size=section.batch_size if isinstance(section.batch_size, int) else self._perplexity_batch(),
                    data_root=section.data_root,
                    offline=self.job.offline,
                    fields=(self.job.text_field, *TEXT_FIELDS),
                    ranks=current(),
                ),
            )
            perplexity[key], details[key] = result.value, result.as_dict()
        harness: Any = None
        if self.tasks:
            self.note(f"{label}: {', '.join(section.tasks)}")
            harness = traced(
                "tasks",
                lambda: run_tasks(
                    model,
                    tokenizer,
                    tasks=self.tasks,
                    limit=section.limit,
                    batch_size=section.batch_size,
                    max_length=section.max_length,
                    offline=self.job.offline,
                    name=self.backbone.identity.id,
                    beyond_positions=self.backbone.beyond_positions,
                ),
            )
            self.store(file, harness)
        tasks = summarise(harness) if harness else {}
        mean = average(tasks)
        found = {
            "perplexity": perplexity,
            "perplexity_details": details,
            "tasks": tasks,
            "average": mean.value,
            "average_of": list(mean.tasks),
            "partial_average": mean.partial,
            "seconds": time.perf_counter() - started,
        }
        return found, harness

    def _perplexity_batch(self) -> int:
        return 8 if self.backbone.device.type == "cuda" else 1


def _summary(
    job: Evaluation,
    backbone: BackboneIdentity,
    found: dict[str, Any],
    dense: dict[str, Any] | None,
    details: dict[str, Any],
) -> dict[str, Any]:
    tokens, seconds = found.pop("tokens", None), found["seconds"]
    compared = dense if dense is not None else (found if job.checkpoint is None else None)
    kept = None
    if compared is not None and found["tasks"]:
        kept = retention(average(found["tasks"]), average(compared["tasks"]))
    return {
        "model": backbone.id,
        "backbone": asdict(backbone),
        "flops_skipped": None,
        **details,
        **found,
        "retention": kept,
        "dense": dense,
        "tokens_per_second": tokens / seconds if tokens else None,
        "protocol": job.protocol.as_dict(),
        "checkpoint": str(job.checkpoint) if job.checkpoint else None,
    }

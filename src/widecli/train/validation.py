"""Perplexity of a held-out text while a stage trains: the dense model, the start, the end."""

from __future__ import annotations

from typing import Any

from widecli.evaluate.perplexity import measure_perplexity
from widecli.evaluate.texts import TEXT_FIELDS
from widecli.ranks import ALONE, current
from widecli.train.job import Job, Note


class Validation:
    """Measures `data.validation` and logs it with the run."""

    def __init__(self, job: Job, note: Note, offline: bool) -> None:
        self.job = job
        self.note = note
        self.offline = offline
        self.name = job.recipe.data.validation
        # a dealt backbone runs every pass on all ranks together: then all of them measure everything
        self.ranks = ALONE if job.backbone.sharded else current()

    def measure_dense(self) -> None:
        """The dense model, before anything else."""
        if self.name:
            self.note(f"dense perplexity on {self.name}")
            with self.job.dense():
                self._log("dense", self._perplexity())

    def measure_start(self) -> None:
        """The routed model before the first step."""
        if self.name:
            self.note(f"perplexity on {self.name} before the first step")
            self._log("start", self._perplexity())

    def measure_final(self) -> dict[str, Any]:
        """The trained model; returns the rates seen (on training text when no validation text is named)."""
        self.job.routed.set_gate(None)
        with self.job.routed.tracing() as trace:
            if self.name:
                self.note(f"perplexity on {self.name}")
                self._log("final", self._perplexity())
                trace = trace.gathered(self.ranks.total)
            else:
                self.job.pass_over_training_text()
        return trace.summary(self.job.recipe.data.sequence_length)

    def _perplexity(self) -> float:
        assert self.name is not None
        result = measure_perplexity(
            self.job.backbone.model,
            self.job.backbone.tokenizer,
            self.name,
            window=self.job.recipe.eval.perplexity_window,
            max_windows=self.job.recipe.eval.perplexity_windows,
            data_root=self.job.recipe.eval.data_root,
            offline=self.offline,
            fields=(self.job.recipe.data.text_field, *TEXT_FIELDS),
            ranks=self.ranks,
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

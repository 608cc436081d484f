"""The optimisation loop: routers learn, everything else is frozen.

One step = forward and backward over the micro-batches of one global batch, one AdamW update. A step is a function of
(routers, optimiser moments, step number), which is what makes resuming exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from widecli.errors import WideError
from widecli.model.budget import Budget
from widecli.model.gate import Gumbel, logistic_noise
from widecli.model.loss import next_token_loss
from widecli.model.routed import RoutedModel
from widecli.train.schedules import budget_share, learning_rate, temperature

if TYPE_CHECKING:
    from widecli.recipe.schema import TrainSection

Fetch = Callable[[int, Sequence[int]], tuple[Tensor, Tensor | None]]
"""(step, rows of the global batch) -> input ids [B, T] and validity mask [B, T] or None, on the CPU."""

_SCALING_ROWS = 4
CPU_MICRO_TOKENS = 4096  # a CPU has no out-of-memory error to back off from


@dataclass(frozen=True)
class StepRecord:
    """What one step measured."""

    step: int  # 1 = the first
    lm_loss: float  # nats a predicted token
    budget_distance: float
    skip_attention: float | None
    skip_ffn: float | None
    grad_norm: float
    learning_rate: float
    temperature: float
    tokens_per_second: float


class Trainer:
    """Trains the routers of a `RoutedModel`. `fetch` hands it any rows of any step's batch."""

    def __init__(
        self, routed: RoutedModel, budget: Budget, settings: TrainSection, fetch: Fetch, sequence_length: int
    ) -> None:
        self.routed = routed
        self.budget = budget
        self.settings = settings
        self.fetch = fetch
        self.device = next(routed.decoder.parameters()).device
        self.parameters = dict(routed.routers.named_parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            fused=self.device.type == "cuda",
        )
        self.micro_batch_size = settings.micro_batch_size or self._first_micro_batch_size(sequence_length)
        self.compiled = self.device.type == "cuda" if settings.compile == "auto" else settings.compile
        self._temperature = torch.zeros((), device=self.device)
        self._gradients_checked = False

    def _first_micro_batch_size(self, sequence_length: int) -> int:
        if self.device.type == "cuda":
            return self.settings.batch_size
        return max(1, min(self.settings.batch_size, CPU_MICRO_TOKENS // sequence_length))

    @contextmanager
    def _training(self) -> Iterator[None]:
        """The backbone as training wants it; afterwards it is as it was, deciding by argmax."""
        backbone: Any = self.routed.backbone
        checkpointing = self.settings.activation_checkpointing
        if checkpointing:
            # the re-entrant kind would lose the gradient of the masks, which leave the layer on the side
            backbone.gradient_checkpointing_enable({"use_reentrant": False})
            backbone.train()  # Hugging Face checkpoints in training mode only
        if self.settings.scale_features:
            self._scale_features()
        try:
            with self.routed.compiled_layers(self.compiled, dynamic=False):
                yield
        finally:
            for decision in self.routed.decisions.values():
                decision.router.rescale(None)
            if checkpointing:
                backbone.gradient_checkpointing_disable()
                backbone.eval()
            self.routed.set_gate(None)

    def _scale_features(self) -> None:
        """Scale by the first rows of the first batch: the same in a resumed run, with nothing to store."""
        ids, valid = self.fetch(0, range(min(_SCALING_ROWS, self.settings.batch_size)))
        valid = None if valid is None else valid.to(self.device)
        for decision, scale in self.routed.feature_scales(ids.to(self.device), valid).items():
            decision.router.rescale(scale)

    def run(self, first: int, last: int) -> Iterator[StepRecord]:
        """Steps `first` to `last - 1`, counted from 0. Raises WideError when the loss stops being finite.

        Records come in blocks on a GPU: reading a loss waits for the device, so it happens every tenth step.
        """
        with self._training():
            pending: list[tuple[int, Tensor, float, float]] = []
            started = time.perf_counter()
            tokens = 0
            for step in range(first, last):
                measured, lr, tau, count = self._step(step)
                tokens += count
                pending.append((step, measured, lr, tau))
                if step == first or self.at_block_end(step + 1):
                    values = torch.stack([m for _, m, _, _ in pending]).cpu().tolist()
                    seconds = time.perf_counter() - started
                    for (done, _, lr_then, tau_then), row in zip(pending, values, strict=True):
                        yield self._record(done, row, lr_then, tau_then, tokens / seconds)
                    pending.clear()
                    started, tokens = time.perf_counter(), 0

    def at_block_end(self, done: int) -> bool:
        """Whether records are complete after `done` steps, so that saving then stores the step it says."""
        block = 10 if self.device.type == "cuda" else 1
        return done % block == 0 or done == self.settings.steps or done % self.settings.save_every == 0

    def _record(self, step: int, row: list[float], lr: float, tau: float, speed: float) -> StepRecord:
        lm, distance, attention, ffn, norm = row
        if not (abs(lm) < float("inf") and abs(norm) < float("inf")):
            raise WideError(
                f"the loss is not finite at step {step + 1} (loss {lm}, gradient norm {norm}); the last checkpoint is "
                f"intact: resume from it with a lower train.learning_rate or check the data"
            )
        parts = {p for _, p in self.routed.decisions}
        return StepRecord(
            step=step + 1,
            lm_loss=lm,
            budget_distance=distance,
            skip_attention=attention if "attention" in parts else None,
            skip_ffn=ffn if "ffn" in parts else None,
            grad_norm=norm,
            learning_rate=lr,
            temperature=tau,
            tokens_per_second=speed,
        )

    def _step(self, step: int) -> tuple[Tensor, float, float, int]:
        settings = self.settings
        lr = learning_rate(step, settings.steps, settings.learning_rate, settings.warmup_ratio)
        tau = temperature(step, settings.steps, settings.temperature_start, settings.temperature_end)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._temperature.fill_(tau)
        while True:
            try:
                measured, tokens = self._accumulate(step)
                break
            except torch.OutOfMemoryError as error:
                self.optimizer.zero_grad(set_to_none=True)
                if self.micro_batch_size == 1:
                    raise WideError(
                        "one sequence does not fit in the device's memory; shorten data.sequence_length or set "
                        "train.activation_checkpointing=true"
                    ) from error
            self.micro_batch_size = (self.micro_batch_size + 1) // 2  # outside `except`: the error holds tensors alive
            torch.cuda.empty_cache()
        if not self._gradients_checked:
            self._check_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.cat([measured, norm.detach().reshape(1).float()]), lr, tau, tokens

    def _accumulate(self, step: int) -> tuple[Tensor, int]:
        """Backward over the whole batch; returns [LM loss, budget distance, both parts' rates] and its tokens."""
        rows = range(self.settings.batch_size)
        ids, valid = self.fetch(step, rows)
        # what divides the sums is known before the first micro-batch: sums of all of them over the count of all
        predictions = ids[:, 1:].numel() if valid is None else int((valid[:, :-1] & valid[:, 1:]).sum())
        tokens = ids.numel() if valid is None else int(valid.sum())
        measured = torch.zeros(4, device=self.device)
        for start in range(0, len(rows), self.micro_batch_size):
            part = slice(start, start + self.micro_batch_size)
            share_valid = None if valid is None else valid[part]
            here = ids[part].numel() if share_valid is None else int(share_valid.sum())
            measured += self._micro_batch(
                step, rows[part], ids[part], share_valid, predictions=max(1, predictions), share=here / max(1, tokens)
            )
        return measured, tokens

    def _micro_batch(
        self, step: int, rows: Sequence[int], ids: Tensor, valid: Tensor | None, *, predictions: int, share: float
    ) -> Tensor:
        routed = self.routed
        ids = ids.to(self.device, non_blocking=True)
        valid = None if valid is None else valid.to(self.device, non_blocking=True)
        noise = logistic_noise(self.settings.seed, step, rows, ids.shape[1], routed.total_groups, self.device)
        routed.set_gate(Gumbel(self._temperature, noise))
        with routed.tracing() as trace:
            hidden = routed.decoder(input_ids=ids, attention_mask=valid, use_cache=False).last_hidden_state
        lm = next_token_loss(hidden, routed.lm_head.weight, ids, valid, compiled=self.compiled) / predictions
        distance = self._budget_at(step).distance(trace) * share
        torch.autograd.backward(lm + self.budget.weight * distance)
        with torch.no_grad():
            rates = [trace.layer_rates(p).mean() * share for p in ("attention", "ffn")]
            return torch.stack([lm.detach(), distance.detach(), *rates]).float()

    def _budget_at(self, step: int) -> Budget:
        """The budget with its targets as the ramp has them at this step."""
        budget, steps = self.budget, self.settings.steps
        return budget.scaled(budget_share(step, steps, budget.start_share, budget.ramp_ratio))

    @torch.no_grad()
    def _check_gradients(self) -> None:
        """Every trainable tensor must have got a gradient in the first step: a broken graph is silent otherwise."""
        missing = [n for n, p in self.parameters.items() if p.grad is None or not bool(p.grad.any())]
        if missing:
            raise WideError(f"no gradient reached {', '.join(missing[:5])} ({len(missing)} tensors); this is a bug")
        self._gradients_checked = True

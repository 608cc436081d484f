"""The optimisation loop: what learns is a `Trainables`, everything else is frozen.

One step = forward and backward over the micro-batches of one global batch, one AdamW update. A step is a function of
(what learns, optimiser moments, step number), which is what makes resuming exact. Several ranks share the batch: each
runs every n-th sequence of it, and at any time their micro-batches together count as one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from widecli.errors import WideError
from widecli.model.budget import Budget
from widecli.model.gate import Gumbel, logistic_noise, noise_seed
from widecli.model.loss import distillation_loss, next_token_loss
from widecli.model.routed import RoutedModel
from widecli.ranks import current
from widecli.train.distributed import differentiable_total, refuse_shares, sum_gradients
from widecli.train.schedules import budget_share, learning_rate, temperature

if TYPE_CHECKING:
    from widecli.model.adapter import Adapter
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
    learning_rate: float | None  # the routers'; None = they are frozen
    temperature: float | None  # None = decided by argmax
    tokens_per_second: float
    lora_learning_rate: float | None = None
    distill_loss: float | None = None  # KL divergence from the dense model, nats a predicted token


@dataclass(frozen=True)
class Trainables:
    """What a stage trains: the routers, an adapter, or both, and whether the dense model teaches."""

    routers: bool = True
    adapter: Adapter | None = None
    adapter_learning_rate: float = 0.0
    distill: float = 0.0  # share of the objective that the divergence from the dense model makes
    compensation_learning_rate: float = 3e-3


ROUTERS_ALONE = Trainables()


class Trainer:
    """Trains the routers of a `RoutedModel`, its adapter, or both. `fetch` hands it any rows of any step's batch.

    Frozen routers decide by argmax, as in inference: noise is there for them to learn from.
    """

    def __init__(
        self,
        routed: RoutedModel,
        budget: Budget,
        settings: TrainSection,
        fetch: Fetch,
        sequence_length: int,
        trainables: Trainables = ROUTERS_ALONE,
    ) -> None:
        self.ranks = current()
        refuse_shares(settings.batch_size, self.ranks.size, settings.micro_batch_size)
        self.rows = self.ranks.share(range(settings.batch_size))
        self.routed = routed
        self.budget = budget
        self.settings = settings
        self.fetch = fetch
        self.device = next(routed.decoder.parameters()).device
        self.trainables = trainables
        self.adapter = trainables.adapter
        routed.routers.requires_grad_(trainables.routers)
        routed.compensations.requires_grad_(trainables.routers)
        routers = dict(routed.routers.named_parameters()) if trainables.routers else {}
        substitutes = dict(routed.compensations.named_parameters()) if trainables.routers else {}
        adapted = self.adapter.named_parameters() if self.adapter else {}
        self.parameters = {
            **routers,
            **{f"compensation.{name}": p for name, p in substitutes.items()},
            **{f"adapter.{name}": p for name, p in adapted.items()},
        }
        groups: list[dict[str, Any]] = []
        if routers:
            groups.append({"params": list(routers.values()), "peak": settings.learning_rate})
        if substitutes:  # a mean has no reason to be small
            peak = trainables.compensation_learning_rate
            groups.append({"params": list(substitutes.values()), "peak": peak, "weight_decay": 0.0})
        if adapted:
            groups.append({"params": list(adapted.values()), "peak": trainables.adapter_learning_rate})
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            fused=self.device.type == "cuda",
        )
        self._sequence_length = sequence_length
        self.micro_batch_size = settings.micro_batch_size or self._first_micro_batch_size(sequence_length)
        self.compiled = self.device.type == "cuda" if settings.compile == "auto" else settings.compile
        self._temperature = torch.zeros((), device=self.device)
        self._gradients_checked = False
        self.done = 0  # steps computed; records may lag behind

    def _first_micro_batch_size(self, sequence_length: int) -> int:
        if self.device.type == "cuda":
            return len(self.rows)
        return max(1, min(len(self.rows), CPU_MICRO_TOKENS // sequence_length))

    @contextmanager
    def _training(self) -> Iterator[None]:
        """The backbone as training wants it; afterwards it is as it was, deciding by argmax."""
        checkpointing = self.settings.activation_checkpointing
        if self.settings.scale_features and self.trainables.routers:
            self._scale_features()
        try:
            with ExitStack() as stack:
                if self.adapter:
                    stack.enter_context(self.adapter.training())
                    devices = [self.device] if self.device.type == "cuda" else []
                    stack.enter_context(torch.random.fork_rng(devices=devices))  # dropout draws from it
                stack.enter_context(
                    self.routed.compiled_layers(self.compiled, checkpointing=checkpointing, dynamic=False)
                )
                yield
        finally:
            for decision in self.routed.decisions.values():
                decision.router.rescale(None)
            self.routed.set_gate(None)

    def _scale_features(self) -> None:
        """Scale by the first rows of the first batch: the same in a resumed run, with nothing to store."""
        ids, valid = self.fetch(0, range(min(_SCALING_ROWS, self.settings.batch_size)))
        valid = None if valid is None else valid.to(self.device)
        scales = self.routed.feature_scales(ids.to(self.device), valid)
        self.ranks.copy_first(scales.values())
        for decision, scale in scales.items():
            decision.router.rescale(scale)

    def run(self, first: int, last: int, stop: Callable[[], bool] = lambda: False) -> Iterator[StepRecord]:
        """Steps `first` to `last - 1`, counted from 0. Raises WideError when the loss stops being finite.

        Records come in blocks on a GPU: reading a loss waits for the device, so it happens every tenth step. `stop` is
        asked after each step inside of a block; when it says so, the block ends there.
        """
        self.ranks.copy_first(self.parameters.values())
        with self._training():
            pending: list[tuple[int, Tensor]] = []
            started = time.perf_counter()
            tokens = 0
            for step in range(first, last):
                measured, count = self._step(step)
                tokens += count
                pending.append((step, measured))
                self.done = step + 1
                if step == first or self.at_block_end(step + 1) or stop():
                    values = torch.stack([m for _, m in pending]).cpu().tolist()
                    seconds = time.perf_counter() - started
                    for (done, _), row in zip(pending, values, strict=True):
                        yield self._record(done, row, tokens / seconds)
                    pending.clear()
                    started, tokens = time.perf_counter(), 0

    def at_block_end(self, done: int) -> bool:
        """Whether records are complete after `done` steps, so that saving then stores the step it says."""
        block = 10 if self.device.type == "cuda" else 1
        return done % block == 0 or done == self.settings.steps or done % self.settings.save_every == 0

    def _record(self, step: int, row: list[float], speed: float) -> StepRecord:
        lm, distance, attention, ffn, divergence, norm = row
        if not (abs(lm) < float("inf") and abs(norm) < float("inf")):
            raise WideError(
                f"the loss is not finite at step {step + 1} (loss {lm}, gradient norm {norm}); the last checkpoint is "
                "intact: check the data, or start another run with a lower learning rate"
            )
        parts = {p for _, p in self.routed.decisions}
        return StepRecord(
            step=step + 1,
            lm_loss=lm,
            budget_distance=distance,
            skip_attention=attention if "attention" in parts else None,
            skip_ffn=ffn if "ffn" in parts else None,
            grad_norm=norm,
            learning_rate=self._learning_rate(step, self.settings.learning_rate) if self.trainables.routers else None,
            temperature=self._temperature_at(step) if self.trainables.routers else None,
            tokens_per_second=speed,
            lora_learning_rate=(
                self._learning_rate(step, self.trainables.adapter_learning_rate) if self.adapter else None
            ),
            distill_loss=divergence if self.trainables.distill else None,
        )

    def _learning_rate(self, step: int, peak: float) -> float:
        return learning_rate(step, self.settings.steps, peak, self.settings.warmup_ratio)

    def _temperature_at(self, step: int) -> float:
        settings = self.settings
        return temperature(step, settings.steps, settings.temperature_start, settings.temperature_end)

    def _step(self, step: int) -> tuple[Tensor, int]:
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(step, group["peak"])
        self._temperature.fill_(self._temperature_at(step))
        while True:
            try:
                measured, tokens = self._accumulate(step)
                break
            except torch.OutOfMemoryError as error:
                self.optimizer.zero_grad(set_to_none=True)
                if self.ranks.size > 1:  # the others are in the middle of their pass
                    raise WideError(
                        f"{self.micro_batch_size} sequences do not fit in the memory of rank {self.ranks.rank}'s "
                        f"device; set train.micro_batch_size={max(1, self.micro_batch_size // 2)}, "
                        f"train.activation_checkpointing=true or distributed.shard=full"
                    ) from error
                if self.micro_batch_size == 1:
                    raise WideError(
                        "one sequence does not fit in the device's memory; shorten data.sequence_length or set "
                        "train.activation_checkpointing=true"
                    ) from error
            self.micro_batch_size = (self.micro_batch_size + 1) // 2  # outside `except`: the error holds tensors alive
            torch.cuda.empty_cache()
        # first and last, the losses, are this rank's summands; distance and rates are those of all ranks already
        # (they stand at 0 and 4 of LM loss, distance, two rates, divergence)
        measured[::4] = sum_gradients(self.ranks, self.parameters.values(), measured[::4])
        if not self._gradients_checked:
            self._check_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.cat([measured, norm.detach().reshape(1).float()]), tokens

    def _accumulate(self, step: int) -> tuple[Tensor, int]:
        """Backward over this rank's share; returns [LM loss, budget distance, both rates, divergence] and all tokens.

        Both losses are this rank's summands.
        """
        ids, valid = self.fetch(step, self.rows)
        parts = [slice(i, i + self.micro_batch_size) for i in range(0, len(self.rows), self.micro_batch_size)]
        # what divides the sums is known before the first micro-batch: sums of all of them over the count of all
        predictions = ids[:, 1:].numel() if valid is None else int((valid[:, :-1] & valid[:, 1:]).sum())
        counts = [ids[part].numel() if valid is None else int(valid[part].sum()) for part in parts]
        predictions, *counts = self.ranks.total(torch.tensor([predictions, *counts])).tolist()
        tokens = sum(counts)
        measured = torch.zeros(5, device=self.device)
        for part, count in zip(parts, counts, strict=True):
            measured += self._micro_batch(
                step,
                self.rows[part],
                ids[part],
                None if valid is None else valid[part],
                predictions=max(1, predictions),
                share=count / max(1, tokens),
            )
        return measured, tokens

    def _micro_batch(
        self, step: int, rows: Sequence[int], ids: Tensor, valid: Tensor | None, *, predictions: int, share: float
    ) -> Tensor:
        routed = self.routed
        ids = ids.to(self.device, non_blocking=True)
        valid = None if valid is None else valid.to(self.device, non_blocking=True)
        teacher = self._dense_hidden(ids, valid) if self.trainables.distill else None
        if self.trainables.routers:
            # an input of the step, not a draw: the same however the batch is cut, and in a resumed run
            noise = logistic_noise(self.settings.seed, step, rows, ids.shape[1], routed.total_groups, self.device)
            routed.set_gate(Gumbel(self._temperature, noise))
        with ExitStack() as stack:
            if self.adapter:
                # recomputation under activation checkpointing restores the generator, so it drops the same
                torch.manual_seed(noise_seed(self.settings.seed, step, rows[0], "dropout"))
                stack.enter_context(self.adapter.autocast())
            trace = stack.enter_context(routed.tracing())
            hidden = routed.decoder(input_ids=ids, attention_mask=valid, use_cache=False).last_hidden_state
        head = routed.lm_head.weight
        if teacher is None:
            lm = objective = next_token_loss(hidden, head, ids, valid, compiled=self.compiled) / predictions
            divergence = torch.zeros_like(lm)
        else:
            sums = distillation_loss(
                hidden, teacher, head, ids, valid, share=self.trainables.distill, compiled=self.compiled
            )
            objective, divergence, lm = (loss / predictions for loss in sums)
        # The budget holds for the whole batch: each rank's counts meet before the distance, gradients and all.
        trace = trace.summed(lambda counts: differentiable_total(self.ranks, counts))
        distance = self._budget_at(step).distance(trace) * share
        torch.autograd.backward(objective + self.budget.weight * distance)
        with torch.no_grad():
            rates = [trace.layer_rates(p).mean() * share for p in ("attention", "ffn")]
            return torch.stack([lm.detach(), distance.detach(), *rates, divergence.detach()]).float()

    @torch.no_grad()
    def _dense_hidden(self, ids: Tensor, valid: Tensor | None) -> Tensor:
        """The teacher's last hidden states: nothing skipped, no adapter."""
        with ExitStack() as stack:
            if self.adapter:
                stack.enter_context(self.adapter.disabled())
            stack.enter_context(self.routed.dense())
            hidden: Tensor = self.routed.decoder(input_ids=ids, attention_mask=valid, use_cache=False).last_hidden_state
        return hidden

    def _budget_at(self, step: int) -> Budget:
        """The budget with its targets as the ramp has them at this step."""
        budget, steps = self.budget, self.settings.steps
        return budget.scaled(budget_share(step, steps, budget.start_share, budget.ramp_ratio))

    @torch.no_grad()
    def _check_gradients(self) -> None:
        """Every trainable tensor must have got a gradient in the first step: a broken graph is silent otherwise.

        The adapter's and the compensation's may be zero here and there: their A matrices start with B = 0, and a layer
        can skip a whole part or nothing of it.
        """
        grads = {name: p.grad for name, p in self.parameters.items()}
        may_be_zero = ("adapter.", "compensation.")
        missing = [n for n, g in grads.items() if g is None or not (n.startswith(may_be_zero) or bool(g.any()))]
        adapted = [g for n, g in grads.items() if n.startswith("adapter.") and g is not None]
        if adapted and not any(bool(g.any()) for g in adapted):
            missing.append("the adapter")
        if missing:
            raise WideError(f"no gradient reached {', '.join(missing[:5])} ({len(missing)} tensors); this is a bug")
        self._gradients_checked = True

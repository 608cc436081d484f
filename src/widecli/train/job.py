"""What a training stage holds on to: backbone, text, routers, adapter, and how they become checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widecli.data.sources import SamplingModel, open_source
from widecli.data.stream import SequenceStream, collate
from widecli.data.tokens import TokenSet, prepare_tokens
from widecli.errors import UsageError
from widecli.model import checkpoint
from widecli.model.adapter import WEIGHTS, Adapter
from widecli.model.backbone import Backbone, default_device, load_backbone, load_shape, resolve_dtype
from widecli.model.budget import Budget
from widecli.model.channel_order import present_order
from widecli.model.plan import RoutingPlan
from widecli.model.routed import RoutedModel
from widecli.model.thresholds import Batch
from widecli.model.vocabulary import refuse_unknown, vocabulary
from widecli.ranks import current
from widecli.recipe.load import dump
from widecli.recipe.schema import Recipe
from widecli.track.run import Run
from widecli.train import state
from widecli.train.estimate import backbone_parameters, fitting_micro_batch, longest_sequences
from widecli.train.loop import Trainables, Trainer
from widecli.train.sharding import card_bytes, choose_sharding, load_sharded

Note = Callable[[str], None]
STATISTICS_BATCH_TOKENS = 2048  # the closed form keeps activations for a backward pass: small batches suffice


@dataclass
class Job:
    """Everything a stage holds on to. `seed` keys the order of the text, the noise and the dropout."""

    recipe: Recipe
    recipe_hash: str
    run: Run
    backbone: Backbone
    tokens: TokenSet
    routed: RoutedModel
    budget: Budget
    trainables: Trainables
    seed: int
    origin: dict[str, Any] | None = None

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that this stage trains."""
        return self.trainables.adapter

    @contextmanager
    def dense(self) -> Iterator[None]:
        """The bare dense model inside the block: nothing skipped, no adapter."""
        with self.routed.dense():
            if self.adapter is None:
                yield
            else:
                with self.adapter.disabled():
                    yield

    def batch(self, indices: Any) -> tuple[Tensor, Tensor | None]:
        """Sequences of the text by their indices."""
        return sequences(self.tokens, indices)

    def trainer(self) -> Trainer:
        """The trainer of this stage, at its first step."""
        train = self.recipe.train.model_copy(update={"seed": self.seed, "micro_batch_size": self._micro_batch_size()})
        stream = SequenceStream(len(self.tokens), train.batch_size, self.seed)

        def fetch(step: int, rows: Sequence[int]) -> tuple[Tensor, Tensor | None]:
            return self.batch(stream.batch(step)[list(rows)])

        return Trainer(self.routed, self.budget, train, fetch, self.recipe.data.sequence_length, self.trainables)

    def _micro_batch_size(self) -> int | None:
        """The recipe's, or on several GPUs the largest that should fit: a rank cannot back off while others wait."""
        named, ranks = self.recipe.train.micro_batch_size, current()
        card = card_bytes(self.recipe.distributed, ranks)
        if named or ranks.size == 1 or card is None:
            return named
        return fitting_micro_batch(
            self.recipe,
            self.backbone.shape,
            self.routed.plan,
            card,
            value_bytes=self.backbone.model.dtype.itemsize,
            lora=self.adapter is not None,
            ranks=ranks.size,
        )

    def save(self, trainer: Trainer, step: int, achieved: dict[str, Any] | None = None) -> Path:
        """Write `checkpoints/step-<step>`, from which `--resume` continues; older ones lose what only that needs.

        The first rank writes what all of them hold, and all wait for it.
        """
        directory = self.run.checkpoints / f"step-{step:06d}"
        ranks = current()
        if ranks.is_first:
            self._write(directory, trainer, step, achieved)
        ranks.wait()
        return directory

    def _write(self, directory: Path, trainer: Trainer, step: int, achieved: dict[str, Any] | None) -> None:
        adapter = self.adapter
        config = checkpoint.CheckpointConfig(
            self.backbone.identity,
            self.routed.plan,
            step,
            self.recipe_hash,
            achieved or {},
            adapter=adapter.facts() if adapter else None,
            origin=self.origin,
        )
        extra: dict[str, Callable[[Path], None]] = {
            state.TENSORS: lambda path: state.save_optimizer(path, trainer.optimizer, trainer.parameters),
            state.STATE: lambda path: state.write_step(path, step),
        }
        if adapter:
            extra[checkpoint.ADAPTER] = lambda path: adapter.save(path, self.backbone.identity.id)
        checkpoint.save(
            directory,
            self.routed.routers,
            config,
            dump(self.recipe),
            extra,
            compensations=self.routed.compensations,
            order=present_order(self.routed.backbone),
        )
        state.drop_old_states([path for _, path in checkpoint.steps(self.run.checkpoints)])

    def restore(self, directory: Path, trainer: Trainer) -> int:
        """Continue from a checkpoint of this run; returns the number of finished steps."""
        config = checkpoint.read_config(directory)
        # a folder or a branch of the Hub can hold other weights than when the run began
        if difference := config.backbone.mismatch(self.backbone.identity):
            raise UsageError(
                f"{directory} was trained on another model than {self.backbone.identity.id} is now: {difference}; "
                f"bring the old one back or start anew with --overwrite"
            )
        began, now = config.origin or {}, self.origin or {}
        if began.get("routers_hash") != now.get("routers_hash"):
            raise UsageError(
                f"{directory} began with the routers of {began.get('checkpoint')}, not with those of "
                f"{now.get('checkpoint')}: name that checkpoint, or another --run-dir"
            )
        first = state.load_optimizer(directory, trainer.optimizer, trainer.parameters)
        checkpoint.refuse_changed(directory, config, (state.STATE, state.TENSORS))
        checkpoint.load_routing(directory, self.routed)
        if self.adapter:
            self.adapter.restore(directory / checkpoint.ADAPTER)
            checkpoint.refuse_changed(directory, config, [f"{checkpoint.ADAPTER}/{WEIGHTS}"])
        return first

    @torch.no_grad()
    def pass_over_training_text(self) -> None:
        """Run the decoder over four sequences, for whoever traces it."""
        ids, valid = self.batch(SequenceStream(len(self.tokens), 4, 0).batch(0))
        device = self.backbone.device
        mask = None if valid is None else valid.to(device)
        self.routed.decoder(input_ids=ids.to(device), attention_mask=mask, use_cache=False)


def load_material(recipe: Recipe, note: Note, offline: bool) -> tuple[Backbone, TokenSet]:
    """The backbone and the tokens that a recipe names."""
    ranks = current()
    shape = load_shape(recipe.model)
    value_bytes = resolve_dtype(recipe.model.dtype, default_device()).itemsize
    sharding = choose_sharding(recipe.distributed, ranks, backbone_parameters(shape) * value_bytes)
    if sharding and recipe.data.source == "self":
        raise UsageError(
            "data.source=self needs the whole model in one process, and it is dealt to several here: name text with "
            "--data, or take distributed.shard=none"
        )
    dealt = f", dealt to the GPUs of {'each machine' if sharding.over == 'node' else 'all ranks'}" if sharding else ""
    note(f"loading {recipe.model.name}{dealt}")
    backbone = load_sharded(recipe.model, sharding, ranks) if sharding else load_backbone(recipe.model)
    backbone.refuse_beyond_positions(longest_sequences(recipe))
    check_plan(recipe, backbone)  # before the text: preparing it can take long
    identity = backbone.identity
    name = f"{identity.id}@{identity.revision}#{identity.fingerprint}"
    source = open_source(
        recipe.data.source,
        section=recipe.data,
        offline=offline,
        sampling=SamplingModel(backbone.model, backbone.tokenizer, name, recipe.train.seed),
    )
    note(f"preparing tokens from {source.name}")
    needed = recipe.train.steps * recipe.train.batch_size * recipe.data.sequence_length
    with ranks.one_a_machine_first():
        tokens = prepare_tokens(source, backbone.tokenizer, recipe.data, tokens_needed=tokens_needed(recipe))
    refuse_unknown(f"the text of {source.name}", [tokens.largest_token()], backbone.model)
    if tokens.pad_token_id >= vocabulary(backbone.model):
        tokens = replace(tokens, pad_token_id=0)  # what stands under padding is never read, but it is looked up
    ranks.refuse_differences({"the backbone's weights": identity.weights_hash, "the text's tokens": tokens.identity})
    if tokens.exhausted and needed > tokens.total_tokens:
        note(
            f"the text has {tokens.total_tokens:,} tokens and {recipe.train.steps} steps read {needed:,}: it will be "
            f"repeated {needed / tokens.total_tokens:.0f} times; more text (--data) gives better routers"
        )
    return backbone, tokens


def tokens_needed(recipe: Recipe) -> int:
    """Tokens of text that the steps or the closed form read, whichever is more."""
    steps = recipe.train.steps * recipe.train.batch_size * recipe.data.sequence_length
    return max(steps, recipe.routing.warm_start_tokens)


def sequences(tokens: TokenSet, indices: Any) -> tuple[Tensor, Tensor | None]:
    """Sequences of a text by their indices: ids [B, T] and their validity [B, T], None without padding."""
    ids, valid = collate(tokens, indices)
    # without padding no mask: attention then takes its fast causal path
    return ids, None if bool(valid.all()) else valid


def text_batches(tokens: TokenSet, wanted_tokens: int, seed: int, device: torch.device) -> list[Batch]:
    """About `wanted_tokens` tokens of a text, in an order of the seed's, in small batches on the device."""
    length = tokens.sequence_length
    count = max(1, min(wanted_tokens // length, len(tokens)))
    order = SequenceStream(len(tokens), count, seed).batch(0)
    size = max(1, STATISTICS_BATCH_TOKENS // length)
    batches: list[Batch] = []
    for start in range(0, count, size):
        ids, valid = sequences(tokens, order[start : start + size])
        batches.append((ids.to(device), None if valid is None else valid.to(device)))
    return batches


def check_plan(recipe: Recipe, backbone: Backbone) -> tuple[RoutingPlan, Budget]:
    """The plan and the budget of a recipe on this backbone. Raises UsageError when they do not fit."""
    plan = RoutingPlan.from_recipe(recipe, backbone.shape)
    return plan, Budget.from_section(recipe.budget, plan, backbone.shape, recipe.data.sequence_length)

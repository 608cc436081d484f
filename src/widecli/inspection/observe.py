"""Runs a checkpoint over a text and keeps every decision."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from widecli.errors import UsageError
from widecli.inspection.groups import (
    Key,
    Regrouping,
    Substitutes,
    Substitution,
    regroupings,
    stored_channels,
)
from widecli.model import checkpoint
from widecli.model.backbone import load_backbone
from widecli.model.gate import margins
from widecli.model.positions import positions
from widecli.model.routed import RoutedModel
from widecli.model.vocabulary import refuse_unknown

if TYPE_CHECKING:
    from widecli.recipe.schema import ModelSection

WINDOW = 1024
"""Tokens that see each other: a longer text is read in pieces of this length, or of the model's longest."""


@dataclass(frozen=True)
class Observation:
    """Decisions on T tokens. `masks`: bool [T, N] by layer and part, True = execute; `certainty`: each router's own
    entropy a decision in bits [N], 0 = it always is sure, 1 = it tosses a coin. `regroupings`: of each layer, empty
    where channels stand as stored; `substitutions`: by layer and part, empty where skipped groups leave nothing."""

    model: str
    config: checkpoint.CheckpointConfig
    text: str
    tokens: tuple[str, ...]
    num_layers: int
    masks: dict[Key, Tensor]
    certainty: dict[Key, Tensor]
    summary: dict[str, Any]
    regroupings: tuple[Regrouping | None, ...] = ()
    substitutions: dict[Key, Substitution] = field(default_factory=dict)


def observe(
    directory: Path,
    model: ModelSection,
    text: str,
    *,
    tokens: int,
    data_root: str | None = None,
    offline: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> Observation:
    """Read the first `tokens` tokens of `text` (a named text or a file) with the checkpoint in `directory`.

    Raises:
        UsageError: a text too short to say anything, or a model that the checkpoint was not trained on.
    """
    from widecli.evaluate.texts import beginning, perplexity_text

    config = checkpoint.read_config(directory)
    label, pieces = perplexity_text(text, data_root, offline)
    # a token is rarely longer than twenty characters: no need to read a whole book
    words = beginning(pieces, 20 * tokens + 1000)
    note(f"loading {model.name}")
    backbone = load_backbone(model)
    encoded = backbone.tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]
    ids = encoded[:tokens]
    if len(ids) < 2:
        raise UsageError(f"the text {text} has {len(ids)} tokens: name a longer one with --text")
    refuse_unknown(f"the text {text}", ids, backbone.model)
    note(f"reading {len(ids)} tokens of {label}")
    window = min(WINDOW, positions(backbone.model.config))
    routed, _ = checkpoint.attach(directory, backbone)
    order = stored_channels(directory, config)
    watched, substitutes = _Certainty(routed), Substitutes(routed)
    try:
        with torch.no_grad(), routed.tracing(keep_masks=True) as trace:
            for start in range(0, len(ids), window):
                piece = torch.tensor([ids[start : start + window]], device=backbone.device)
                routed.decoder(input_ids=piece, use_cache=False)
    finally:
        watched.stop()
        substitutes.stop()
        routed.detach()
    assert trace.masks is not None
    return Observation(
        model=backbone.identity.id,
        config=config,
        text=f"{label}, first {len(ids)} tokens",
        tokens=tuple(backbone.tokenizer.decode([token]) for token in ids),
        num_layers=len(routed.layers),
        masks={key: torch.cat(parts).cpu() for key, parts in trace.masks.items()},
        certainty=watched.means(),
        summary=trace.summary(min(len(ids), window)),
        regroupings=() if order is None else regroupings(order, routed.layers),
        substitutions=substitutes.found(),
    )


class _Certainty:
    """Sums each router's binary entropy over the tokens it sees."""

    def __init__(self, routed: RoutedModel) -> None:
        self._sums: dict[Key, Tensor] = {}
        self._tokens: dict[Key, int] = {}
        self._handles = []
        for key, decision in routed.decisions.items():

            def see(_: torch.nn.Module, args: tuple[Tensor, ...], logits: Tensor, key: Key = key) -> None:
                probability = torch.sigmoid(margins(logits)).double().flatten(0, -2)
                self._sums[key] = self._sums.get(key, 0) + binary_entropy(probability).sum(0).cpu()
                self._tokens[key] = self._tokens.get(key, 0) + len(probability)

            self._handles.append(decision.router.register_forward_hook(see))

    def stop(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()

    def means(self) -> dict[Key, Tensor]:
        """Mean entropy of a decision, bits [N]."""
        return {key: total / self._tokens[key] for key, total in self._sums.items()}


def binary_entropy(probability: Tensor) -> Tensor:
    """Entropy in bits of a yes-or-no decision with this probability; 0 at 0 and at 1."""
    p = probability.double()
    nats: Tensor = torch.special.entr(p) + torch.special.entr(1 - p)
    return nats / math.log(2)

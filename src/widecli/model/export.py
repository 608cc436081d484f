"""Checkpoints as folders of their own: a copy without the training state, or a whole model with its adapter merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widecli.errors import WideError
from widecli.model import checkpoint
from widecli.model.backbone import Backbone
from widecli.model.identity import BackboneIdentity, weights_hash
from widecli.model.positions import positions
from widecli.model.routed import RoutedModel
from widecli.model.standalone import routing_facts, write_refusal, write_standalone
from widecli.storage import as_bytes, atomic_directory

RECIPE = "recipe.yaml"
CARD = "README.md"
CHECK_TEXT = (
    "The river had risen in the night, and the bridge that the village built after the war stood a hand above the "
    "water. In 1957 it cost 12,400 crowns. def area(width, height): return width * height. Nobody could say whether "
    "it would hold, so the children were sent home, and two men counted the planks."
)
# Merging rounds each weight once, by 2^-24, 2^-11 or 2^-9 of it. What that explains: the difference of a logit, in
# standard deviations of the logits, with every group executed or while no decision changes; and the share of decisions
# that were so close to a tie. One decision that changes may move a logit by any amount. (0.28 was seen in bf16.)
TOLERANCE = {torch.float32: (1e-3, 1e-3), torch.float16: (0.05, 0.005), torch.bfloat16: (0.5, 0.02)}


@dataclass(frozen=True)
class MergeCheck:
    """Merged beside unmerged, on `CHECK_TEXT`."""

    tokens: int
    dtype: str
    largest_difference: float  # of a logit, in standard deviations of the logits
    largest_dense_difference: float  # the same with every group executed
    same_top_word: float  # share of the positions
    changed_decisions: int
    decisions: int


def export_copy(directory: Path, out: Path, card: str) -> None:
    """Copy a checkpoint without its training state: routing, adapter, recipe, config, and `card` as its README."""
    config = checkpoint.read_config(directory)
    checkpoint.refuse_changed(directory, config, checkpoint.loaded_files(config))
    with atomic_directory(out) as scratch:
        for name in (checkpoint.CONFIG, *checkpoint.routing_files(config), RECIPE):
            shutil.copyfile(directory / name, scratch / name)
        if config.adapter_folder:
            shutil.copytree(directory / config.adapter_folder, scratch / config.adapter_folder)
        write_refusal(scratch, config.backbone.id)
        (scratch / CARD).write_bytes(as_bytes(card))


def export_merged(
    directory: Path, out: Path, backbone: Backbone, card: Callable[[MergeCheck | None], str]
) -> MergeCheck | None:
    """Write a Hugging Face model with the adapter folded in and channels in the routers' order, and these beside it.

    transformers alone loads it, with the code that comes along, and routes: see `standalone`.

    Returns how far the merged model is from the unmerged one; None for a checkpoint without an adapter, whose model is
    the dense one. Raises WideError when they differ by more than rounding explains.
    """
    model = backbone.model
    config = checkpoint.read_config(directory)
    routed, adapter = checkpoint.attach(directory, backbone)
    check: MergeCheck | None = None
    if adapter is not None:
        ids = backbone.tokenizer(CHECK_TEXT, return_tensors="pt").input_ids.to(backbone.device)
        ids = ids[:, : positions(model.config)]
        before = _predict(routed, ids)
        routed.detach()
        adapter.merge()
        routed = RoutedModel.attach(model, config.plan)
        checkpoint.load_routing(directory, routed)
        check = _compare(before, _predict(routed, ids), model.dtype)
        _refuse_difference(check, *TOLERANCE[model.dtype])
    routed.detach()
    merged = BackboneIdentity.of(out.name, None, model.config, weights_hash(model))
    with atomic_directory(out) as scratch:
        model.save_pretrained(scratch)
        write_standalone(scratch, model.config, routing_facts(model.config, config.plan))
        backbone.tokenizer.save_pretrained(scratch)
        for name in (*checkpoint.routing_files(config), RECIPE):
            shutil.copyfile(directory / name, scratch / name)
        files = {name: config.files[name] for name in checkpoint.routing_files(config) if name in config.files}
        document = replace(config, merged=merged, files=files).to_json()
        (scratch / checkpoint.CONFIG).write_text(json.dumps(document, indent=2) + "\n")
        (scratch / CARD).write_bytes(as_bytes(card(check)))
    return check


def _refuse_difference(check: MergeCheck, difference: float, changed: float) -> None:
    differs = check.largest_dense_difference
    if check.changed_decisions == 0:
        differs = max(differs, check.largest_difference)
    if check.changed_decisions > changed * check.decisions or differs > difference:
        raise WideError(
            f"the merged model computes something else: a logit differs by {differs:.2g} standard deviations and "
            f"{check.changed_decisions} of {check.decisions} decisions differ, more than rounding to {check.dtype} "
            f"explains; nothing was written"
        )


@dataclass(frozen=True)
class _Prediction:
    """Logits [1, T, V] routed and with every group executed, and the masks of the routed pass."""

    logits: Tensor
    dense: Tensor
    masks: dict[Any, list[Tensor]]


@torch.no_grad()
def _predict(routed: RoutedModel, ids: Tensor) -> _Prediction:
    with routed.tracing(keep_masks=True) as trace:
        logits = routed.backbone(input_ids=ids, use_cache=False).logits
    assert trace.masks is not None
    with routed.dense():
        dense = routed.backbone(input_ids=ids, use_cache=False).logits
    return _Prediction(logits.float(), dense.float(), dict(trace.masks))


def _compare(unmerged: _Prediction, merged: _Prediction, dtype: torch.dtype) -> MergeCheck:
    pairs = [
        (old, new) for key in unmerged.masks for old, new in zip(unmerged.masks[key], merged.masks[key], strict=True)
    ]
    return MergeCheck(
        tokens=unmerged.logits.shape[1],
        dtype=str(dtype).removeprefix("torch."),
        largest_difference=_largest_difference(unmerged.logits, merged.logits),
        largest_dense_difference=_largest_difference(unmerged.dense, merged.dense),
        same_top_word=float((merged.logits.argmax(-1) == unmerged.logits.argmax(-1)).float().mean()),
        changed_decisions=sum(int((old != new).sum()) for old, new in pairs),
        decisions=sum(old.numel() for old, _ in pairs),
    )


def _largest_difference(before: Tensor, after: Tensor) -> float:
    """In standard deviations of `before`."""
    return float((after - before).abs().max() / before.std())

"""What calibration learns of the dense model before anything routes: which channels belong together, and their means.

Both come from the same passes over the training text. They are found once, on the first rank, and kept in the user's
cache: every run of a sweep on the same backbone, dtype and text begins with the same groups.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from widecli.errors import UsageError, WideError
from widecli.model import clustering, regroup
from widecli.model.channel_order import refuse_disorder, stored_order
from widecli.model.compensation_fit import set_means
from widecli.model.plan import PartName
from widecli.model.routed import RoutedModel
from widecli.model.thresholds import Batch
from widecli.ranks import current
from widecli.storage import user_cache, write_bytes

STATISTICS_TOKENS = 16384  # of the warm start's text; a mean over more tokens is hardly another

Means = dict[tuple[int, PartName], Tensor]


def set_up_groups(
    routed: RoutedModel, batches: Sequence[Batch], text: str, seed: int, say: Callable[[str], None]
) -> None:
    """Regroup the channels and set the compensation's means, where the plan asks for either.

    `text` identifies backbone and text together (`""` = they cannot be told apart from others, so nothing is cached).
    Raises UsageError for a text that is too short and for a model that gives NaN on it.
    """
    plan = routed.plan
    clusters = plan.grouping == "clustered"
    if not clusters and not (plan.compensation and plan.compensation.mean):
        return
    sample = _some(batches, STATISTICS_TOKENS)
    if clusters:
        regroup.require_enough_text(routed, sample)
    file = _cache_file(routed, sample, text, seed)
    found = current().from_first(_read(file, routed) if current().is_first else None)
    if found is None:
        order, means = _find(routed, sample, seed, say)
        if current().is_first and file is not None:
            _write(file, order, means)
    else:
        order, means = found
        say("groups and means are those of an earlier run")
    if clusters:
        routed.regroup(order)
    in_order = {
        (index, part): mean[order[index].long().to(mean.device)] if part == "ffn" else mean
        for (index, part), mean in means.items()
    }
    set_means(routed, in_order)


def _some(batches: Sequence[Batch], tokens: int) -> list[Batch]:
    """The first batches that hold so many tokens."""
    some: list[Batch] = []
    count = 0
    for batch in batches:
        if count >= tokens:
            break
        some.append(batch)
        count += batch[0].numel()
    return some


def _find(routed: RoutedModel, batches: Sequence[Batch], seed: int, say: Callable[[str], None]) -> tuple[Tensor, Means]:
    """Order and means from dense passes, the first rank's on all ranks: another device may round otherwise."""
    say("channel statistics")
    statistics = regroup.channel_statistics(routed, batches)
    order = stored_order(routed.shape)
    if routed.plan.grouping == "clustered" and current().is_first:
        order = regroup.orders_from(statistics, routed.layers, seed=seed, say=say)
    means = {key: mean.contiguous() for key, mean in statistics.means.items()}
    current().copy_first([order, *means.values()])
    return order, means


def _cache_file(routed: RoutedModel, batches: Sequence[Batch], text: str, seed: int) -> Path | None:
    if not text:
        return None
    code = b"".join(Path(str(module.__file__)).read_bytes() for module in (clustering, regroup))
    key = {
        "text": text,
        "tokens": sum(ids.numel() for ids, _ in batches),
        "groups": [layer.ffn_groups for layer in routed.layers],
        "clustered": routed.plan.grouping == "clustered",
        "seed": seed,
        "dtype": str(next(routed.backbone.parameters()).dtype),
        "code": hashlib.sha256(code).hexdigest(),
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return user_cache() / "groups" / f"{name}.safetensors"


def _read(file: Path | None, routed: RoutedModel) -> tuple[Tensor, Means] | None:
    """What an earlier run found; None where there is nothing, or nothing that can be used."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if file is None or not file.is_file():
        return None
    try:
        tensors = load_file(file)
        order = tensors.pop("order")
        refuse_disorder(order, routed.shape, str(file))
        means: Means = {}
        for name, mean in tensors.items():
            index, part = name.split(".")
            means[int(index), "attention" if part == "attention" else "ffn"] = mean
    except (OSError, SafetensorError, KeyError, ValueError, UsageError):
        return None  # it is found again and written anew
    return order, means


def _write(file: Path, order: Tensor, means: Means) -> None:
    from safetensors.torch import save

    tensors = {f"{index}.{part}": mean.cpu().contiguous() for (index, part), mean in means.items()}
    with contextlib.suppress(WideError):  # without a cache the next run takes a minute longer, nothing else
        write_bytes(file, save({"order": order.contiguous(), **tensors}))

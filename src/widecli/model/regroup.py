"""Regrouping: which channels of each FFN share a group, from a few passes of the dense model over text.

The order in which a model happens to store its FFN channels means nothing: rows of the gate and up projections and
columns of the down projection may move together, and the dense model stays the same. Groups are runs of neighbours, so
that order decides what a token can skip. Here it is chosen (`clustering.py`); applying it is not done here.

What a channel adds to a token is measured at the input h of the down projection: `|h[t, c]| * ||W_down[:, c]||`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from widecli.errors import UsageError
from widecli.model.clustering import cluster_channels, energy_shares, require_tokens
from widecli.model.families import family_of
from widecli.model.plan import PARTS, LayerPlan, PartName
from widecli.model.routed import RoutedModel
from widecli.model.thresholds import Batch, rows

TOKENS = 4096
"""Tokens that are kept to cluster by. With twice as many, SmolLM2's groups captured 0.1 % more on other text."""

_SAY_EVERY = 10  # layers


@dataclass
class ChannelStatistics:
    """What `collecting` found.

    `energy`: by layer fp16 [T, C] on the model's device, each channel's share of what the FFN adds to a token, on T
    tokens spread evenly over the text. `means`: by layer and part fp32 [K], the mean input of the part's output
    projection over all real tokens.
    """

    energy: dict[int, Tensor] = field(default_factory=dict)
    means: dict[tuple[int, PartName], Tensor] = field(default_factory=dict)


def count_tokens(batches: Sequence[Batch]) -> int:
    """Real tokens in all batches."""
    return sum(int(ids.numel() if valid is None else valid.bool().sum()) for ids, valid in batches)


@contextmanager
def collecting(model: nn.Module | RoutedModel, available: int, tokens: int = TOKENS) -> Iterator[ChannelStatistics]:
    """Collect `ChannelStatistics` from the forward passes inside the block; they are complete when it ends.

    `available`: real tokens in all those passes together (`count_tokens`), of which `tokens` are kept (all, if there
    are fewer). The passes should run dense, or with all gates open. They go through the decoder with
    `attention_mask` as a keyword, [B, T] or None. Weights may be sharded over ranks: they are read while their layer
    runs. Raises UsageError at the end where the model gave NaN or infinity.
    """
    collector = _Collector(model, available, min(tokens, available))
    try:
        yield collector.statistics
    finally:
        collector.remove()
    collector.finish()


class _Collector:
    """The hooks behind `collecting`, and the sums they fill."""

    def __init__(self, model: nn.Module | RoutedModel, available: int, tokens: int) -> None:
        self.statistics = ChannelStatistics()
        self.available, self.tokens = available, tokens
        self.seen = 0  # real tokens of the passes before this one
        self.kept = 0  # of which these were kept
        self.valid: Tensor | None = None
        self.picked = torch.empty(0, dtype=torch.long)  # rows of this pass's real tokens to keep
        self.waiting: set[tuple[int, PartName]] = set()  # modules that this pass has not reached yet
        self.norms: dict[int, Tensor] = {}
        self.sums: dict[tuple[int, PartName], Tensor] = {}
        backbone = model.backbone if isinstance(model, RoutedModel) else model
        names = family_of(backbone)
        decoder = backbone.get_submodule(names.decoder)
        self.handles = [decoder.register_forward_pre_hook(self._begin, with_kwargs=True)]
        for index, layer in enumerate(backbone.get_submodule(names.layers).children()):
            for part in PARTS:
                output = layer.get_submodule(names.attention_output if part == "attention" else names.ffn_output)
                # ahead of the routers' hook, which may mask
                self.handles.append(output.register_forward_pre_hook(self._reader(index, part), prepend=True))
                self.sums[index, part] = torch.zeros(0)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids: Tensor | None = kwargs.get("input_ids", args[0] if args else None)
        tokens = ids if ids is not None else kwargs["inputs_embeds"][..., 0]
        self.valid = kwargs.get("attention_mask")
        count = count_tokens([(tokens, self.valid)])
        # the places of `tokens` in `available`, evenly: where the whole part of the running quota steps up
        places = torch.arange(self.seen, self.seen + count)
        quota = places * self.tokens // self.available
        self.kept += len(self.picked)
        self.picked = (quota != (places + 1) * self.tokens // self.available).nonzero().flatten().to(tokens.device)
        self.seen += count
        self.waiting = set(self.sums)

    def _reader(self, index: int, part: PartName) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        key = (index, part)

        @torch.no_grad()
        def read(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if key not in self.waiting:
                return  # the layer runs again, in a backward pass with checkpoints
            self.waiting.remove(key)
            hidden = rows(args[0], self.valid)
            total = hidden.sum(0, dtype=torch.float64)
            self.sums[key] = self.sums[key] + total if self.sums[key].numel() else total
            if part == "ffn":
                self._keep(index, module, hidden[self.picked])

        return read

    def _keep(self, index: int, module: nn.Module, hidden: Tensor) -> None:
        if index not in self.norms:
            weight = module.weight
            assert isinstance(weight, Tensor)
            self.norms[index] = weight.norm(dim=0, dtype=torch.float32)
            shape = (self.tokens, hidden.shape[1])
            self.statistics.energy[index] = torch.zeros(shape, dtype=torch.float16, device=hidden.device)
        shares = energy_shares((hidden.float() * self.norms[index]).square())
        self.statistics.energy[index][self.kept : self.kept + len(shares)] = shares

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def finish(self) -> None:
        """Set the means. Raises UsageError for a model whose activations are not finite."""
        if self.seen != self.available:
            raise RuntimeError(f"{self.available} tokens were announced, and {self.seen} came")
        for (index, part), total in self.sums.items():
            if not bool(total.isfinite().all()):
                raise UsageError(
                    f"the {part} of layer {index} gives NaN or infinity on this text before anything is pruned; "
                    f"check the model's weights, or try model.dtype=float32"
                )
            self.statistics.means[index, part] = (total / self.seen).float()


@torch.no_grad()
def channel_statistics(
    model: nn.Module | RoutedModel, batches: Sequence[Batch], tokens: int = TOKENS
) -> ChannelStatistics:
    """`ChannelStatistics` of the dense model on `batches`, whether routers hang on it or not."""
    routed = model if isinstance(model, RoutedModel) else None
    backbone = routed.backbone if routed else model
    assert isinstance(backbone, nn.Module)
    decoder = backbone.get_submodule(family_of(backbone).decoder)
    with collecting(model, count_tokens(batches), tokens) as statistics, routed.dense() if routed else nullcontext():
        for ids, valid in batches:
            decoder(input_ids=ids, attention_mask=valid, use_cache=False)
    return statistics


def group_width(layer: LayerPlan, channels: int) -> int:
    """Channels of one FFN group; all of them where the FFN is not cut into groups."""
    return channels // max(layer.ffn_groups, 1)


def orders_from(
    statistics: ChannelStatistics,
    layers: Sequence[LayerPlan],
    *,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> Tensor:
    """The order of FFN channels that suits each layer's groups: int32 [L, C] on the CPU.

    `orders[l, i]` is the channel that shall stand at place i of layer l. Layers with one FFN group or none keep theirs.
    """
    found = []
    for index, layer in enumerate(layers):
        energy = statistics.energy[index]
        channels = energy.shape[1]
        width = group_width(layer, channels)
        if width == channels:
            found.append(torch.arange(channels))
            continue
        if index % _SAY_EVERY == 0:
            say(f"regrouping channels, layer {index + 1} of {len(layers)}")
        found.append(cluster_channels(energy, width, seed=seed).cpu())
    return torch.stack(found).int()


def regroup(
    routed: RoutedModel,
    batches: Sequence[Batch],
    *,
    tokens: int = TOKENS,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> Tensor:
    """The order of every layer's FFN channels, int32 [L, C] on the CPU, from the dense model on `batches`.

    See `orders_from`. Raises UsageError when `batches` hold too few tokens for the number of groups, or when the model
    gives NaN on them.
    """
    require_enough_text(routed, batches, tokens)
    say("channel statistics")
    return orders_from(channel_statistics(routed, batches, tokens), routed.layers, seed=seed, say=say)


def require_enough_text(routed: RoutedModel, batches: Sequence[Batch], tokens: int = TOKENS) -> None:
    """Raise UsageError, before any pass, when that text cannot say which channels belong together."""
    kept = min(tokens, count_tokens(batches))
    channels = routed.shape.intermediate_size
    for layer in routed.layers:
        require_tokens(kept, channels, group_width(layer, channels))

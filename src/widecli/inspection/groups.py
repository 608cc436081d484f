"""Which channels share a group, and what stands in for groups that are skipped, beside what they would have added."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from widecli.model import checkpoint
from widecli.model.plan import LayerPlan, PartName
from widecli.model.routed import RoutedModel, Substitute, mask_groups

Key = tuple[int, PartName]


@dataclass(frozen=True)
class Regrouping:
    """One layer's channels, shares in [0, 1].

    `moved`: channels that are in another group than the one they are stored in. `together`: pairs of channels stored
    in one group that still share one; groups drawn at random would keep (G - 1) / (D' - 1) of them.
    """

    moved: float
    together: float


@dataclass(frozen=True)
class Substitution:
    """What one part of one layer adds to the residual, root mean square over tokens of the vectors' norms.

    `executed`: the groups that run. `skipped`: what those that do not run would have added. `mean`, `bypass`: what
    stands in for them, None where the plan has none. `recovered`: 1 - |skipped - stand-in|^2 / |skipped|^2, the share
    of what skipping takes that the stand-in gives back; None where nothing was skipped.
    """

    executed: float
    skipped: float
    mean: float | None
    bypass: float | None
    recovered: float | None


def stored_channels(directory: Path, config: checkpoint.CheckpointConfig) -> Tensor | None:
    """The order of channels that a checkpoint which was loaded decides about, int64 [L, D']; None = as stored."""
    from safetensors.torch import load_file

    if config.plan.grouping != "clustered":
        return None
    order: Tensor = load_file(directory / checkpoint.CHANNELS)["order"]
    return order.long()


def regroupings(order: Tensor, layers: tuple[LayerPlan, ...]) -> tuple[Regrouping | None, ...]:
    """Every layer's, from the order of channels [L, D']; None where the FFN is one group or always runs."""
    return tuple(
        regrouping(row, layer.ffn_groups) if layer.ffn_groups > 1 else None
        for row, layer in zip(order, layers, strict=True)
    )


def regrouping(order: Tensor, groups: int) -> Regrouping:
    """One layer's: `order[i]` is the stored channel that stands at place i."""
    size = len(order) // groups
    before = order // size
    now = torch.arange(len(order)) // size
    shared = torch.zeros(groups, groups, dtype=torch.int64)
    shared.index_put_((before, now), torch.ones_like(now), accumulate=True)
    pairs = groups * size * (size - 1)
    kept = int((shared * (shared - 1)).sum())
    return Regrouping(moved=float((before != now).double().mean()), together=kept / pairs if pairs else 1.0)


class Substitutes:
    """Watches what is added for skipped groups in the passes that run until `stop`."""

    def __init__(self, routed: RoutedModel) -> None:
        self._sums: dict[Key, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._tokens: dict[Key, int] = defaultdict(int)
        self._handles = []
        for (index, part), substitute in routed.substitutes.items():
            _, output = routed.part_modules(routed.decoder_layers()[index], part)
            hidden: list[Tensor] = []

            def keep(_: nn.Module, args: tuple[Tensor, ...], hidden: list[Tensor] = hidden) -> None:
                hidden[:] = [args[0]]

            def see(
                module: Any,
                args: tuple[Tensor, ...],
                output: Tensor,
                key: Key = (index, part),
                substitute: Substitute = substitute,
                hidden: list[Tensor] = hidden,
            ) -> None:
                self._add(key, module, hidden.pop(), output, substitute)

            # before the mask is put on the input, and before anything is added to the output
            self._handles.append(output.register_forward_pre_hook(keep, prepend=True))
            self._handles.append(output.register_forward_hook(see, prepend=True))

    @torch.no_grad()
    def _add(self, key: Key, module: Any, hidden: Tensor, output: Tensor, substitute: Substitute) -> None:
        mask, compensation = substitute.decision.mask, substitute.compensation
        assert mask is not None
        skipped = ~mask.bool()
        bias = getattr(module, "base_layer", module).bias
        without = 0.0 if bias is None else bias
        # not the module itself: its hooks would mask once more
        lost = (module.forward(mask_groups(hidden, skipped)) - without).float()
        share = skipped.float()
        stand_in = torch.zeros_like(lost)
        found = {"executed": (output - without).float(), "skipped": lost}
        if compensation.mean is not None:
            found["mean"] = share @ compensation.mean
            stand_in = stand_in + found["mean"]
        if compensation.up is not None:
            assert substitute.reduced is not None
            found["bypass"] = F.linear(substitute.reduced.float() * share.mean(-1, keepdim=True), compensation.up)
            stand_in = stand_in + found["bypass"]
        found["left"] = lost - stand_in
        for name, added in found.items():
            self._sums[key][name] += float(added.double().square().sum())
        self._tokens[key] += lost[..., 0].numel()

    def stop(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()

    def found(self) -> dict[Key, Substitution]:
        """By layer and part; empty where nothing is compensated."""
        return {key: self._substitution(key) for key in self._sums}

    def _substitution(self, key: Key) -> Substitution:
        sums, tokens = self._sums[key], self._tokens[key]
        size = {name: (total / tokens) ** 0.5 for name, total in sums.items()}
        return Substitution(
            executed=size["executed"],
            skipped=size["skipped"],
            mean=size.get("mean"),
            bypass=size.get("bypass"),
            recovered=1 - sums["left"] / sums["skipped"] if sums["skipped"] else None,
        )

"""What several ranks do differently in a step: each runs its share of the batch, and what they found is added up.

Routers and adapter are small, fp32 and replicated. Every rank does the same update with the same summed gradient, so
they stay equal, and a checkpoint is what the first rank holds: plain files, which one process or seven read as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from widecli.errors import UsageError
from widecli.ranks import Ranks


def refuse_shares(batch_size: int, ranks: int, micro_batch_size: int | None = None) -> None:
    """Raise UsageError for a batch that cannot be dealt to the ranks: all of them run equally many forward passes."""
    if ranks > batch_size:
        raise UsageError(
            f"{ranks} ranks are more than the {batch_size} sequences of a step (train.batch_size): start fewer"
        )
    if batch_size % ranks:
        fitting = ", ".join(str(n) for n in range(1, batch_size + 1) if batch_size % n == 0)
        raise UsageError(
            f"train.batch_size={batch_size} cannot be dealt evenly to {ranks} ranks: start {fitting}, or change it"
        )
    if micro_batch_size and micro_batch_size > batch_size // ranks:
        raise UsageError(
            f"train.micro_batch_size={micro_batch_size} is more than the {batch_size // ranks} sequences of one rank "
            f"(train.batch_size={batch_size} on {ranks})"
        )


class _Total(torch.autograd.Function):
    """Sum over the ranks. Every rank computes the same function of it, and their gradients are added up later: so what
    flows back into a rank's own summand is the gradient of the sum as it is."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: Ranks) -> Tensor:
        return ranks.total(values)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0], None


def differentiable_total(ranks: Ranks, values: Tensor) -> Tensor:
    """Sums over the ranks, through which each rank's share of the gradient flows."""
    if ranks.size == 1:
        return values
    total: Tensor = _Total.apply(values, ranks)  # type: ignore[no-untyped-call]
    return total


@torch.no_grad()
def sum_gradients(ranks: Ranks, parameters: Iterable[nn.Parameter], measured: Tensor) -> Tensor:
    """Sum gradients over the ranks, in place and in one message a step; returns the sums of `measured` [n] too."""
    if ranks.size == 1:
        return measured
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = ranks.total(torch.cat([*(g.flatten() for g in grads), measured]))
    *summed, total = torch.split(flat, [*(g.numel() for g in grads), measured.numel()])
    torch._foreach_copy_(grads, [s.view_as(g) for s, g in zip(summed, grads, strict=True)])
    return total

"""Which sequences a step reads: a pure function of seed and step, so resuming needs no saved state."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from widecli.errors import UsageError

if TYPE_CHECKING:
    import torch

    from widecli.data.tokens import TokenSet

Indices = npt.NDArray[np.int64]


class SequenceStream:
    """An endless walk through `num_sequences` sequences, a fresh permutation every epoch.

    A batch may straddle epochs. Data-parallel ranks get disjoint shares of the same global batch.
    """

    def __init__(self, num_sequences: int, batch_size: int, seed: int) -> None:
        if num_sequences < 1:
            raise UsageError(f"there are {num_sequences} sequences to train on: name more text in data.source")
        if batch_size < 1:
            raise UsageError(f"train.batch_size={batch_size} must be at least 1")
        self.num_sequences = num_sequences
        self.batch_size = batch_size
        self.seed = seed

    def epoch(self, step: int) -> int:
        """The epoch (from 0) that the first sequence of this step belongs to."""
        return step * self.batch_size // self.num_sequences

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Indices:
        """Sequence indices of this step (int64); with `world` ranks, the share of `rank`: every world-th of them.

        A batch size that `world` does not divide gives the first ranks one more.
        """
        if step < 0 or not 0 <= rank < world:
            raise ValueError(f"step={step} rank={rank} world={world}")
        positions = np.arange(step * self.batch_size, (step + 1) * self.batch_size, dtype=np.int64)[rank::world]
        epochs, offsets = np.divmod(positions, self.num_sequences)
        indices = np.empty_like(positions)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            indices[chosen] = epoch_order(self.num_sequences, self.seed, int(epoch))[offsets[chosen]]
        return indices


@lru_cache(maxsize=4)
def epoch_order(num_sequences: int, seed: int, epoch: int) -> Indices:
    """The permutation of one epoch [num_sequences], read-only.

    Sorted raw Philox words instead of `Generator.permutation`: NumPy keeps the raw stream the same across versions,
    so a run resumed after an upgrade still sees the same batches.
    """
    words = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(num_sequences)
    order = np.argsort(words, kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order


def collate(token_set: TokenSet, indices: npt.ArrayLike) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather sequences: input_ids [B, L] int64 and attention_mask [B, L] bool, on the CPU.

    The mask comes from each sequence's length, never from token ids: the padding id may be the EOS id.
    """
    import torch

    chosen = np.asarray(indices, dtype=np.int64).reshape(-1)
    input_ids = np.empty((chosen.size, token_set.sequence_length), dtype=np.int64)
    lengths = np.empty(chosen.size, dtype=np.int64)
    for row, index in enumerate(chosen):
        input_ids[row], lengths[row] = token_set.sequence(int(index))
    mask = np.arange(token_set.sequence_length)[None, :] < lengths[:, None]
    return torch.from_numpy(input_ids), torch.from_numpy(mask)

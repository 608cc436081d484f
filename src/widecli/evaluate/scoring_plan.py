"""How scored requests are put into batches: pure arithmetic, no tensors.

lm-eval asks for log p(continuation | context). Requests that feed the same tokens share one row (BoolQ's yes and no),
rows are sorted by length, and a batch takes as many as three limits allow: rows, padded tokens, and positions whose
logits are kept. The limits steer speed and memory only; they never change a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Row:
    """One sequence to feed, and the continuations scored on it as (request index, tokens)."""

    tokens: tuple[int, ...]
    continuations: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    @property
    def scored(self) -> int:
        """Positions at the row's end whose logits are needed."""
        return max(len(tokens) for _, tokens in self.continuations)


@dataclass(frozen=True)
class BatchLimits:
    """Most rows, padded tokens and kept logit positions of one forward pass."""

    rows: int
    tokens: int
    positions: int

    def below(self, batch: Sequence[Row]) -> BatchLimits:
        """Limits that a batch half as large as this one just meets."""
        tokens, positions = extent(batch)
        return BatchLimits(max(1, len(batch) // 2), max(1, tokens // 2), max(1, positions // 2))


def extent(batch: Sequence[Row]) -> tuple[int, int]:
    """Padded tokens and kept positions of a batch (rows are padded on the right to the longest)."""
    longest = max(len(row.tokens) for row in batch)
    return len(batch) * longest, len(batch) * kept_positions(batch)


def kept_positions(batch: Sequence[Row]) -> int:
    """How many positions from the padded end back hold every scored one."""
    longest = max(len(row.tokens) for row in batch)
    return max(longest - len(row.tokens) + row.scored for row in batch)


def make_rows(requests: Sequence[tuple[Sequence[int], Sequence[int]]], max_length: int) -> tuple[list[Row], int]:
    """Rows, longest first, for (context, continuation) token pairs; and how many contexts were cut from the left.

    The last token is predicted, never fed. What exceeds `max_length` fed tokens is dropped from the left, as lm-eval
    does.
    """
    rows: dict[tuple[int, ...], Row] = {}
    truncated = 0
    for index, (context, continuation) in enumerate(requests):
        whole = (*context, *continuation)
        truncated += len(whole) > max_length + 1
        fed = whole[-(max_length + 1) : -1]
        rows.setdefault(fed, Row(fed)).continuations.append((index, tuple(continuation)))
    # Rows of one length that score alike come together, so that few logits are kept in vain. The tokens break ties: the
    # order does not depend on the requests' order.
    return sorted(rows.values(), key=lambda row: (-len(row.tokens), -row.scored, row.tokens)), truncated


def next_batch(rows: Sequence[Row], start: int, limits: BatchLimits) -> Sequence[Row]:
    """The rows from `start` that fit the limits together; always at least one. `rows` are sorted, longest first."""
    longest = len(rows[start].tokens)
    kept = 0
    stop = start
    while stop < len(rows) and stop - start < limits.rows:
        row = rows[stop]
        wider = max(kept, longest - len(row.tokens) + row.scored)
        count = stop - start + 1
        if stop > start and (count * longest > limits.tokens or count * wider > limits.positions):
            break
        kept, stop = wider, stop + 1
    return rows[start:stop]

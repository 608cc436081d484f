from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from widecli.evaluate.scoring_plan import BatchLimits, Row, extent, kept_positions, make_rows, next_batch

PAIRS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 3), min_size=1, max_size=12),
        st.lists(st.integers(0, 3), min_size=1, max_size=6),
    ),
    min_size=1,
    max_size=30,
)
LIMITS = st.builds(BatchLimits, st.integers(1, 10), st.integers(1, 80), st.integers(1, 40))


@given(PAIRS, st.integers(6, 14))
def test_rows_hold_every_request_once_with_what_predicts_it(
    pairs: list[tuple[list[int], list[int]]], most: int
) -> None:
    rows, truncated = make_rows(pairs, most)
    answered = sorted(index for row in rows for index, _ in row.continuations)
    assert answered == list(range(len(pairs)))
    assert truncated == sum(len(a) + len(b) > most + 1 for a, b in pairs)
    for row in rows:
        assert len(row.tokens) <= most
        for index, continuation in row.continuations:
            context, expected = pairs[index]
            assert list(continuation) == expected
            assert list(row.tokens) == (context + expected)[-(most + 1) : -1]
    assert [len(row.tokens) for row in rows] == sorted((len(row.tokens) for row in rows), reverse=True)


def test_requests_that_feed_the_same_tokens_share_a_row() -> None:
    rows, _ = make_rows([([1, 2], [3]), ([1, 2], [4]), ([1], [2, 5]), ([7], [3])], 10)
    assert [(row.tokens, [index for index, _ in row.continuations]) for row in rows] == [
        ((1, 2), [0, 1, 2]),
        ((7,), [3]),
    ]
    assert rows[0].scored == 2


@given(PAIRS, LIMITS)
def test_batches_cover_the_rows_and_keep_the_limits(
    pairs: list[tuple[list[int], list[int]]], limits: BatchLimits
) -> None:
    rows, _ = make_rows(pairs, 20)
    seen: list[Row] = []
    while len(seen) < len(rows):
        batch = next_batch(rows, len(seen), limits)
        tokens, positions = extent(batch)
        assert len(batch) == 1 or (
            len(batch) <= limits.rows and tokens <= limits.tokens and positions <= limits.positions
        )
        seen.extend(batch)
    assert seen == rows


@given(PAIRS)
def test_kept_positions_reach_back_to_every_scored_one(pairs: list[tuple[list[int], list[int]]]) -> None:
    rows, _ = make_rows(pairs, 20)
    longest = len(rows[0].tokens)
    assert kept_positions(rows) == max(longest - (len(row.tokens) - row.scored) for row in rows) <= longest


@given(PAIRS, LIMITS)
def test_limits_below_a_batch_halve_it(pairs: list[tuple[list[int], list[int]]], limits: BatchLimits) -> None:
    rows, _ = make_rows(pairs, 20)
    batch = next_batch(rows, 0, limits)
    smaller = next_batch(rows, 0, limits.below(batch))
    assert len(smaller) <= max(1, len(batch) // 2)

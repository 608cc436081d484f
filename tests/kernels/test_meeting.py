"""The arithmetic of the counters at which programs wait for each other."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("programs", [1, 2, 8, 1000])
def test_the_last_to_arrive_flips_the_top_bit_and_clears_the_others(programs: int) -> None:
    counter = 0
    for round_ in range(3):
        before = counter
        for program in reversed(range(programs)):  # the first program's number comes last, or anywhere
            assert program == programs - 1 or (before ^ counter) >> 31 == 0
            counter = (counter + (0x7FFFFFFF - (programs - 2) if program == 0 else 1)) % 2**32
        assert counter == (0x80000000 if round_ % 2 == 0 else 0)

from __future__ import annotations

import pytest

from tiny_models import FAMILIES, tiny_config
from widecli.errors import UsageError
from widecli.model.positions import positions, refuse_beyond


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_for_how_many_positions_it_is_made(family: str) -> None:
    assert positions(tiny_config(family)) == 128


def test_the_first_length_that_is_too_long_is_named_with_what_is_possible() -> None:
    lengths = {"a.window": 128, "b.window": 129, "c.window": 4096}
    with pytest.raises(UsageError) as error:
        refuse_beyond("some/model", tiny_config(), lengths)
    assert str(error.value) == (
        "b.window=129 is more than the 128 positions that some/model is made for: take at most 128, or add "
        "--beyond-positions if you mean it"
    )
    refuse_beyond("some/model", tiny_config(), {"a.window": 128})
    refuse_beyond("some/model", tiny_config(), {})

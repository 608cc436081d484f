"""What is left of pattern routing: refused in one sentence, and nothing else changed by its going."""

from __future__ import annotations

from pathlib import Path

import pytest

from stored_runs import with_pattern_keys
from widecli.errors import UsageError
from widecli.recipe.load import dump, load_text, recipe_hash, resolve
from widecli.recipe.schema import Recipe
from widecli.sweep.grid import expand

SENTENCE = (
    r"which this version no longer has \(independent groups are better at the same speed\); use widecli 0\.1 for it"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "9371b16d"),
        ("routing: {mode: token}\nbudget: {sparsity: 0.25}", "a4f250a2"),
        ("routing: {ffn_group_size: 16, layers: {3: {parts: none}}}\nlora: {rank: 8}", "95956ac2"),
    ],
)
def test_stored_recipes_keep_the_hashes_that_they_had_beside_patterns(text: str, expected: str) -> None:
    recipe = load_text(text)
    assert recipe_hash(recipe) == expected
    assert load_text(with_pattern_keys(dump(recipe))) == recipe


@pytest.mark.parametrize(
    "overrides",
    [["routing.mode=patterns"], ["routing.pattern_count=16"], ["routing.pattern_count=64"], ["~routing.pattern_after"]],
)
def test_an_override_that_asks_for_patterns_is_refused(overrides: list[str]) -> None:
    with pytest.raises(UsageError, match=SENTENCE) as error:
        resolve(None, overrides)
    assert str(error.value).count(". ") == 0, "one sentence"


def test_a_flag_and_the_axes_of_a_sweep_that_ask_for_patterns_are_refused() -> None:
    with pytest.raises(UsageError, match=rf"routing\.mode=patterns asks for pattern routing, {SENTENCE}"):
        resolve(None, (), {"routing.mode": "patterns"})
    for axes in ({"routing.mode": ["wide", "patterns"]}, {"routing.pattern_count": [16, 64]}):
        with pytest.raises(UsageError, match=SENTENCE):
            expand(None, [], {}, axes)


@pytest.mark.parametrize("routing", ["{mode: patterns}", "{pattern_after: 0.8}", "{mode: patterns, pattern_count: 64}"])
def test_a_recipe_file_that_asks_for_patterns_is_refused_by_its_name(tmp_path: Path, routing: str) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(f"routing: {routing}\n")
    with pytest.raises(UsageError, match=rf"in .*old\.yaml.*{SENTENCE}"):
        resolve(str(path))
    with pytest.raises(UsageError, match=rf"in old\.yaml.*{SENTENCE}"):
        load_text(path.read_text(), "old.yaml")


def test_a_whole_recipe_of_a_version_with_patterns_can_be_run_again(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(with_pattern_keys(dump(Recipe())))
    assert resolve(str(path)).recipe == load_text(dump(Recipe()))

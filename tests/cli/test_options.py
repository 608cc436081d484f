from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest

from widecli.cli import options
from widecli.cli.options import FLAG_KEYS, go_offline, recipe_from, split_arguments
from widecli.errors import UsageError
from widecli.model import checkpoint
from widecli.recipe.keys import recipe_keys
from widecli.recipe.load import resolve


def test_every_flag_names_a_key_of_the_schema() -> None:
    assert set(FLAG_KEYS.values()) <= set(recipe_keys())


def test_a_run_that_may_not_be_read_is_passed_over_for_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(["private", "mine"]):
        Path("runs", name).mkdir(parents=True)
        os.utime(Path("runs", name), (1000 - age, 1000 - age))

    def resolve_mine(run: Path) -> Path:
        if run.name == "private":
            raise PermissionError(13, "Permission denied", str(run))
        return run

    monkeypatch.setattr(checkpoint, "resolve", resolve_mine)
    assert options.newest_checkpoint() == Path("runs/mine")


def test_every_flag_of_the_recipe_panel_is_in_the_table() -> None:
    panel = [
        annotated
        for annotated in vars(options).values()
        if any(getattr(m, "rich_help_panel", None) == "Recipe keys" for m in getattr(annotated, "__metadata__", ()))
    ]
    assert len(panel) == len(FLAG_KEYS)
    assert inspect.getmodule(recipe_from) is options


def test_the_first_plain_argument_is_the_recipe() -> None:
    assert split_arguments(["a=1", "demo", "~b"]) == ("demo", ["a=1", "~b"])
    assert split_arguments(None) == (None, [])
    with pytest.raises(UsageError, match=r"'other'.*'demo'"):
        split_arguments(["demo", "other"])


def test_a_file_with_an_equals_sign_is_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "date=2024.yaml"
    path.write_text("train: {steps: 3}\n")
    assert recipe_from([str(path)]).recipe.train.steps == 3


def test_what_exists_is_a_path_unless_it_is_spelt_as_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/lr=0.001", "exp=1", "~odd", "train.steps=5"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("runs/lr=0.001", "./runs/lr=0.001", "runs/lr=0.001/", "exp=1", "~odd", "./train.steps=5"):
        assert split_arguments([name]) == (name, []), name
    for change in ("train.steps=5", "~train.steps", "~train", "lr=0.1", "data.source=runs/lr=0.001"):
        assert split_arguments([change]) == (None, [change]), change
    with pytest.raises(UsageError, match=r"there is no runs/lr=0\.1"):
        split_arguments(["runs/lr=0.1"])


def test_a_bad_value_is_refused_though_a_flag_replaces_it(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("train: {steps: many}\n")
    for arguments in (["train.steps=many"], ["train.steps=-1"], ["train.steps=true"], [str(tmp_path / "r.yaml")]):
        with pytest.raises(UsageError, match=r"train\.steps="):
            recipe_from(arguments, steps=4)
    assert recipe_from(["train.steps=9", "budget.kind=parts", "budget.ffn=0.5"], steps=4).recipe.train.steps == 4


def test_flags_win_over_overrides_and_the_base_yields_to_a_named_recipe() -> None:
    resolved = recipe_from(["train.steps=3"], base="demo", steps=4, sparsity=None)
    assert resolved.recipe.train.steps == 4
    assert resolved.source == "recipes/demo.yaml"
    assert recipe_from(["smollm2_s50_g64"], base="demo") == resolve("smollm2_s50_g64")


def test_flags_are_validated_like_keys() -> None:
    with pytest.raises(UsageError, match=r"budget\.sparsity=1\.5 must be"):
        recipe_from([], sparsity=1.5)
    with pytest.raises(UsageError, match=r"track\.wandb=sometimes must be one of"):
        recipe_from([], wandb="sometimes")


def test_data_may_be_given_again_and_tasks_with_commas() -> None:
    recipe = recipe_from([], data=["a.txt", "b.txt"], tasks="piqa,boolq").recipe
    assert recipe.data.source == ("a.txt", "b.txt")
    assert recipe.eval.tasks == ("piqa", "boolq")
    assert recipe_from([], data=["a.txt"]).recipe.data.source == "a.txt"
    assert recipe_from([], data=[]).recipe.data.source == resolve(None).recipe.data.source


def test_offline_reaches_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "0")
    assert not go_offline(False)
    assert go_offline(True)
    assert os.environ["HF_DATASETS_OFFLINE"] == "1"
    assert go_offline(False)


@pytest.mark.parametrize(("arguments", "flags"), [(["budget.sparsity=0.3"], {}), ([], {"sparsity": 0.3})])
def test_a_sparsity_beside_targets_a_part_is_refused(arguments: list[str], flags: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=r"budget\.attention or budget\.ffn"):
        recipe_from(["budget.kind=parts", "budget.ffn=0.5", *arguments], **flags)

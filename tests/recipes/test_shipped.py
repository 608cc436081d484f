"""Every recipe that ships resolves, says what its name says, and opens with a command that works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from widecli.cli.options import split_arguments
from widecli.recipe.files import recipes_folder, shipped_recipes
from widecli.recipe.load import resolve

RECIPES = shipped_recipes()
MODELS = {
    "smollm2": "smollm2-135m",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B",
}
STAGES = ("calibrate", "lora")
PAPER = [name for name in RECIPES if name.split("/")[0] in STAGES and "/llama" in name]


def test_the_paper_settings_are_complete() -> None:
    models, sparsities, groups = ("llama-3.1-8b", "llama-3.2-3b"), (25, 50), (32, 64, 128)
    expected = {f"{c}/{m}_s{s}_g{g}" for c in STAGES for m in models for s in sparsities for g in groups}
    assert set(PAPER) == expected


@pytest.mark.parametrize("name", RECIPES)
def test_the_opening_command_names_this_very_recipe(name: str) -> None:
    first = RECIPES[name].read_text(encoding="utf-8").splitlines()[0]
    program, command, *arguments = shlex.split(first.removeprefix("# "))
    assert program == "wide"
    assert command == (name.split("/")[0] if "/" in name else "calibrate")
    recipe, overrides = split_arguments(arguments)
    assert recipe is not None
    assert resolve(recipe, overrides, command=command) == resolve(str(RECIPES[name]))


@pytest.mark.parametrize("name", [n for n in RECIPES if n.split("/")[0] in STAGES])
def test_a_name_says_model_sparsity_and_groups(name: str) -> None:
    form = r"(calibrate|lora)/(?P<model>.+)_s(?P<s>\d+)_(?:g(?P<g>\d+)(?P<paper>_paper)?|(?P<whole>token|layer))"
    match = re.fullmatch(form, name)
    assert match is not None, "recipes of a stage are named model_sparsity_groups"
    recipe = resolve(name).recipe
    assert recipe.model.name == MODELS[match["model"]]
    assert recipe.budget.sparsity == int(match["s"]) / 100
    assert recipe.routing.mode == (match["whole"] or "wide")
    if match["g"]:
        assert recipe.routing.ffn_group_size == int(match["g"])
    papers = match["paper"] is not None or name in PAPER
    assert (recipe.routing.grouping == "contiguous") == (papers or match["whole"] is not None)
    assert (recipe.compensation.rank == 0) == (papers or match["whole"] is not None)
    assert recipe.budget.kind == ("rate" if papers else "flops")


@pytest.mark.parametrize("name", PAPER)
def test_the_paper_settings_are_the_papers(name: str) -> None:
    recipe = resolve(name).recipe
    train = recipe.train
    assert (train.steps, train.batch_size, recipe.data.sequence_length) == (10_000, 16, 4096)
    second = name.startswith("lora/")
    assert (train.warmup_ratio, train.weight_decay, recipe.budget.weight) == (0.1, 0.01, 20.0)
    assert train.learning_rate == (2e-4 if second else 2e-3)
    assert (train.temperature_start, train.temperature_end) == (0.5 if second else 5.0, 0.5)
    assert (recipe.routing.rank, recipe.routing.warm_start, recipe.budget.kind) == (32, "random", "rate")


@pytest.mark.parametrize("name", [n for n in RECIPES if n.startswith("lora/")])
def test_a_second_stage_continues_the_first_of_the_same_name(name: str) -> None:
    first, second = resolve(name.replace("lora/", "calibrate/")).recipe, resolve(name).recipe
    assert second.model == first.model and second.data == first.data and second.eval == first.eval
    assert second.budget == first.budget
    assert (second.compensation.mean, second.compensation.rank) == (first.compensation.mean, first.compensation.rank)
    for key in ("mode", "parts", "attention_group_size", "ffn_group_size", "grouping", "rank", "tap"):
        assert getattr(second.routing, key) == getattr(first.routing, key)
    assert (second.train.steps, second.train.batch_size) == (first.train.steps, first.train.batch_size)
    assert second.train.temperature_start == second.train.temperature_end == first.train.temperature_end
    lora = second.lora
    assert (lora.rank, lora.alpha, lora.dropout, lora.learning_rate, lora.freeze_routers) == (16, 32, 0.1, 2e-4, False)


def test_the_same_name_means_the_commands_own_recipe() -> None:
    assert resolve("smollm2_s50_g64").recipe == resolve("calibrate/smollm2_s50_g64").recipe
    assert resolve("smollm2_s50_g64", command="lora").recipe == resolve("lora/smollm2_s50_g64").recipe
    assert resolve("paper", command="lora").recipe == resolve("eval/paper").recipe


def test_the_demo_is_small_and_quiet() -> None:
    recipe = resolve("demo").recipe
    assert recipe.train.steps * recipe.train.batch_size * recipe.data.sequence_length <= 32_768
    assert recipe.track.wandb == "off"
    assert recipe.data.validation not in (recipe.data.source, None)


def test_modes_share_everything_but_the_mode() -> None:
    wide = resolve("smollm2_s50_g64").recipe
    for mode in ("token", "layer"):
        other = resolve(f"smollm2_s50_{mode}").recipe
        assert other.model_copy(update={"routing": wide.routing, "compensation": wide.compensation}) == wide
        assert not other.compensation.mean and not other.compensation.rank


def test_every_yaml_below_recipes_is_shipped() -> None:
    files = {p for p in Path(recipes_folder()).rglob("*") if p.is_file()}
    assert files == set(RECIPES.values())

"""Sequences longer than the model is made for: one rule for every command, and one flag for those who mean it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from whole_commands import Wide, write_questions

from widecli.recipe.load import load_text

SENTENCE = ("more than the 128 positions that", "take at most 128", "--beyond-positions")
FLAG = "--beyond-positions"


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (["data.sequence_length=129"], "data.sequence_length=129"),
        (["eval.perplexity_window=129"], "eval.perplexity_window=129"),
        (["data.sequence_length=512", "data.packing=sample"], "data.sequence_length=512"),
    ],
)
def test_training_refuses_them(
    wide: Wide, tiny_recipe: Path, workplace: Path, changes: list[str], key: str, dry: bool
) -> None:
    wide("calibrate", tiny_recipe, *changes, *(["--dry-run"] if dry else [])).refused_with(key, *SENTENCE)
    assert not (workplace / "runs").exists()


def test_a_window_that_nothing_reads_is_no_reason_to_refuse(wide: Wide, tiny_recipe: Path) -> None:
    asked = ("eval.perplexity_window=2048", "data.validation=null", "--steps", 1, "--run-dir", "r")
    assert wide("calibrate", tiny_recipe, *asked).code == 0
    wide("eval", "r").refused_with("eval.perplexity_window=2048", *SENTENCE)


def test_training_at_the_last_position_is_fine_and_beyond_it_with_the_flag(wide: Wide, tiny_recipe: Path) -> None:
    assert wide("calibrate", tiny_recipe, "data.sequence_length=128", "--steps", 1, "--run-dir", "to").code == 0
    done = wide("calibrate", tiny_recipe, "data.sequence_length=160", "--steps", 1, FLAG, "--run-dir", "beyond")
    assert done.code == 0, done.err
    recipe = Path("beyond/recipe.yaml").read_text()
    assert load_text(recipe).model.beyond_positions, "the record says that it was meant"
    assert "beyond_positions" not in Path("to/recipe.yaml").read_text()
    assert wide("eval", "beyond", "eval.perplexity_window=160", "--run-dir", "e").code == 0
    assert wide("generate", "beyond", "--prompt", "a" * 140, "--max-new-tokens", 2).code == 0


def test_a_second_stage_refuses_them(wide: Wide, run: Any) -> None:
    wide("lora", "calibrated", "data.sequence_length=256", "--run-dir", "r").refused_with(*SENTENCE)
    assert not Path("r").exists()


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize("target", ["calibrated", None])
def test_an_evaluation_refuses_them(
    wide: Wide, run: Any, model_folder: Path, held_out: Path, target: str | None, dry: bool
) -> None:
    named = [target] if target else ["--model", model_folder, f"eval.perplexity={held_out}"]
    asked = ("eval", *named, "eval.perplexity_window=129", "--run-dir", "e")
    wide(*asked, *(["--dry-run"] if dry else [])).refused_with("eval.perplexity_window=129", *SENTENCE)
    assert not Path("e").exists()
    if not dry:
        assert wide(*asked, FLAG).code == 0


def test_tasks_are_asked_for_their_own_lengths(wide: Wide, run: Any, workplace: Path) -> None:
    root = write_questions(workplace / "data")
    asked = ("eval", "calibrated", "--tasks", "openbookqa", "--data-root", root, "--offline", "--no-dense")
    assert wide(*asked, "eval.perplexity=[]", "--run-dir", "short").code == 0, (
        "eval.max_length is a limit, not a length"
    )
    for file in (root / "allenai/openbookqa/main").glob("*.jsonl"):
        file.write_text(file.read_text().replace('"question_stem": "', f'"question_stem": "{"word " * 40}'))
    refused = wide(*asked, "eval.perplexity=[]", "--run-dir", "long")
    refused.refused_with("eval.max_length=2048 lets a sequence of", "the 128 positions", "eval.max_length=128", FLAG)
    assert not Path("long/summary.json").exists()
    assert wide(*asked, "eval.perplexity=[]", "eval.max_length=128", "--run-dir", "cut").code == 0
    assert wide(*asked, "eval.perplexity=[]", FLAG, "--run-dir", "beyond").code == 0


def test_generation_refuses_them(wide: Wide, run: Any, model_folder: Path) -> None:
    for target in (["calibrated"], ["--model", model_folder]):
        for length, new in ((128, 1), (100, 29), (400, 4)):
            asked = ("generate", *target, "--prompt", "a" * length, "--max-new-tokens", new)
            wide(*asked).refused_with("128", FLAG)
            assert wide(*asked, FLAG).code == 0


def test_profiling_refuses_them(wide: Wide, run: Any, model_folder: Path) -> None:
    grid = ("--prompt", 130, "--gen", 4, "--seconds", 0.01)
    for number, target in enumerate((["calibrated"], ["--model", model_folder])):
        wide("profile", *target, *grid, "--run-dir", f"p{number}").refused_with("128", FLAG)
        done = wide("profile", *target, *grid, FLAG, "--run-dir", f"q{number}")
        assert done.code == 0, done.err


def test_an_inspection_reads_a_long_text_in_pieces_that_the_model_is_made_for(
    wide: Wide, run: Any, held_out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from widecli.inspection import observe

    fed: list[int] = []
    honest = observe.RoutedModel.attach.__func__  # type: ignore[attr-defined]

    def attach(cls: Any, backbone: Any, *rest: Any) -> Any:
        backbone.model.register_forward_pre_hook(
            lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        return honest(cls, backbone, *rest)

    monkeypatch.setattr(observe.RoutedModel, "attach", classmethod(attach))
    assert wide("inspect", "calibrated", "--text", held_out, "--tokens", 300).code == 0
    assert max(fed) == 128 and sum(fed) == 300


def test_a_sweep_says_so_before_anything_runs(wide: Wide, tiny_recipe: Path) -> None:
    refused = wide("sweep", tiny_recipe, "data.sequence_length=256", "--G", "16", "--dry-run")
    assert refused.code == 2 and "128 positions" in refused.err

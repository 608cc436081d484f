"""A tokenizer with words that the model's embedding has no rows for: padding may be one, text may not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from whole_commands import Wide, write_questions

from tiny_models import byte_tokenizer
from widecli.recipe.load import load_text

PADDING = "[PAD]"  # id 258 of a model of 258 words


@pytest.fixture
def padded(workplace: Path, model_folder: Path) -> Path:
    folder = workplace / "padded"
    shutil.copytree(model_folder, folder)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"pad_token": PADDING})
    assert tokenizer.pad_token_id == 258
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("declared", [False, True])
def test_padding_beyond_the_embedding_changes_nothing(
    wide: Wide, workplace: Path, tiny_recipe: Path, model_folder: Path, padded: Path, declared: bool
) -> None:
    if declared:
        config = json.loads((padded / "config.json").read_text())
        (padded / "config.json").write_text(json.dumps({**config, "pad_token_id": 258}))
    lines = [json.dumps({"text": "word " * (n % 9 + 1)}) for n in range(90)]
    (workplace / "lines.jsonl").write_text("\n".join(lines))
    asked = ("--data", "lines.jsonl", "data.packing=sample", "data.sequence_length=48", "--json")
    found = []
    for name, folder in (("plain", model_folder), ("padded", padded)):
        done = wide("calibrate", tiny_recipe, "--model", folder, *asked, "--run-dir", f"r-{name}")
        assert done.code == 0, done.err
        found.append(done.document["validation"])
    assert found[0] == found[1]


def test_tasks_that_generate_pad_within_the_embedding(padded: Path) -> None:
    from types import SimpleNamespace

    from widecli.evaluate.language_model import ScoringModel
    from widecli.model.backbone import load_backbone
    from widecli.recipe.schema import ModelSection

    backbone = load_backbone(ModelSection(name=str(padded)))
    model = ScoringModel(backbone.model, backbone.tokenizer, batch_size=2, max_length=64, name="m")
    requests = [SimpleNamespace(args=(text, {"until": ["."], "max_gen_toks": 4})) for text in ("a", "a longer one")]
    assert len(model.generate_until(requests, disable_tqdm=True)) == 2
    assert backbone.tokenizer.pad_token_id == 258, "the user's own is left alone"


SAID = ("a token of id 258, and the model knows 258",)


def test_text_with_such_a_word_is_refused_by_every_command(
    wide: Wide, workplace: Path, run: Any, tiny_recipe: Path, padded: Path, held_out: Path
) -> None:
    text = workplace / "odd.txt"
    text.write_text(f"This {PADDING} is odd. {held_out.read_text()}")
    for recipe in workplace.glob("calibrated/checkpoints/*/recipe.yaml"):
        name = load_text(recipe.read_text()).model.name
        recipe.write_text(recipe.read_text().replace(name, str(padded)))
    commands = [
        ("calibrate", tiny_recipe, "--model", padded, "--data", text),
        ("calibrate", tiny_recipe, "--model", padded, f"data.validation={text}"),
        ("eval", "--model", padded, f"eval.perplexity={text}", "eval.perplexity_window=64"),
        ("eval", "calibrated", f"eval.perplexity={text}"),
        ("inspect", "calibrated", "--text", text, "--tokens", 4000),
        ("profile", "calibrated", "--text", text, "--prompt", 100, "--batch", 40, "--gen", 4, "--seconds", 0.01),
    ]
    for number, command in enumerate(commands):
        wide(*command, "--run-dir", f"r{number}").refused_with(*SAID)
        assert not Path(f"r{number}", "summary.json").exists()
    wide("generate", "--model", padded, "--prompt", f"a {PADDING}").refused_with("the prompt", *SAID)


def test_a_task_with_such_a_word_is_refused(wide: Wide, workplace: Path, padded: Path) -> None:
    root = write_questions(workplace / "data")
    for file in (root / "allenai/openbookqa/main").glob("*.jsonl"):
        file.write_text(file.read_text().replace('"question_stem": "', f'"question_stem": "{PADDING} '))
    asked = ("--tasks", "openbookqa", "--data-root", root, "--offline", "eval.perplexity=[]")
    wide("eval", "--model", padded, *asked, "--run-dir", "r").refused_with("a request of a task", *SAID)

"""Runs whole commands in this process, and the small recipe they run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

SENTENCES = [
    f"Line {i}: the {a} {b} sees {i * 37 % 101} {c} near the {a} river.\n"
    for i, (a, b, c) in enumerate(
        (a, b, c)
        for a in ("old", "cold", "green", "wide")
        for b in ("fox", "child", "train", "poet", "cat")
        for c in ("stones", "lamps", "letters", "birds")
    )
]

BATCH = ("train.batch_size=6",)
"""Sequences that one, two or three ranks can share evenly."""

QUESTIONS = ("--tasks", "openbookqa", "--data-root", "data", "--offline")

PLAIN = ("routing.grouping=contiguous", "compensation.mean=false", "compensation.rank=0")
"""As the paper has it, and as stored recipes without these keys read."""

STRONG = ("lora.learning_rate=0.02", "lora.rank=4")
"""A second stage of which eight steps show."""

SHAPE = ("--shape", "128x256x2", "--gen", 4, "--seconds", 0.01)
"""What `wide profile` measures in a moment."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str
    folder: Path | None = None

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout; anything else there is an error."""
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found

    def refused_with(self, *words: str, code: int = 2) -> None:
        """One sentence on stderr, no traceback, the exit code."""
        assert self.code == code, f"exit code {self.code}\n{self.err}"
        assert "Traceback" not in self.err
        errors = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, self.err
        for word in words:
            assert word in errors[0], errors[0]


Wide = Callable[..., Outcome]


def invoke(*arguments: object, stdin: bytes | None = None) -> Outcome:
    from widecli.__main__ import app

    result = CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)


def write_recipe(path: Path, model_folder: Path, text_file: Path, held_out: Path) -> Path:
    path.write_text(
        f"""
model: {{name: {model_folder}}}
data: {{source: {text_file}, sequence_length: 32, validation: {held_out}}}
routing: {{ffn_group_size: 16, rank: 4, warm_start_tokens: 256}}
compensation: {{rank: 4}}
budget: {{sparsity: 0.4}}
train: {{steps: 8, batch_size: 2, save_every: 2, learning_rate: 0.01, temperature_start: 2.0}}
eval: {{perplexity: [{held_out}], perplexity_window: 64}}
track: {{wandb: "off"}}
"""
    )
    return path


def write_questions(root: Path) -> Path:
    """Make a data root with `allenai/openbookqa`, a few rows."""
    folder = root / "allenai" / "openbookqa"
    (folder / "main").mkdir(parents=True)
    words = [
        "the",
        "cold",
        "green",
        "fox",
        "sees",
        "seven",
        "stones",
        "near",
        "the",
        "old",
        "river",
        "and",
        "a",
        "wide",
        "train",
    ]
    rows = [
        {
            "id": str(i),
            "question_stem": " ".join(words[i : i + 3 + i % 4]),
            "choices": {"text": [" ".join(words[(i + k) % 9 :][: 1 + k]) for k in range(4)], "label": list("ABCD")},
            "answerKey": "ABCD"[i % 4],
        }
        for i in range(6)
    ]
    files = ""
    for split in ("train", "validation", "test"):
        (folder / "main" / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        files += f"  - split: {split}\n    path: main/{split}.jsonl\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
    return root

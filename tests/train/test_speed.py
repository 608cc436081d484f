"""The benchmark of a training step: what its document says. tests/recipes/test_ranks.py runs it on two ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tiny_models import save_model_folder
from widecli.report.documents import read_document
from widecli.train import speed


def test_a_document_says_what_was_measured_on_what_and_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = save_model_folder(tmp_path / "model"), tmp_path / "speed.json"
    keys = ["data.sequence_length=16", "train.batch_size=4", "train.compile=false", "routing.ffn_group_size=16"]
    keys += [f"model.name={model}", "routing.attention_group_size=2", "routing.rank=4"]
    layouts = ["--layout", "whole", "--layout", "whole, checkpointing"]
    monkeypatch.setattr(sys, "argv", ["speed.py", "smollm2_s50_g64", *keys, "--random", "--out", str(out), *layouts])
    speed.main()
    document = json.loads(out.read_text())
    assert document == read_document(out)
    assert document["ranks"] == 1 and document["shape"]["num_hidden_layers"] == 2
    assert document["command"].startswith("python -m widecli.train.speed smollm2_s50_g64 data.sequence_length=16 ")
    assert document["command"].endswith("--layout whole --layout 'whole, checkpointing'")
    assert [(r["layout"], r["ranks"], r["batch_size"]) for r in document["results"]] == [
        ("whole", 1, 4),
        ("whole, checkpointing", 1, 4),
    ]
    assert all(r["tokens_per_second"] > 0 and r["estimated_memory_bytes"] > 0 for r in document["results"])

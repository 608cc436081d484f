"""Masks recorded from a checkpoint are the model's decisions, and the benchmark can read them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.tiny_models import random_ids, save_model_folder, tiny_plan, tiny_routed

from wide_kernels.benchmarks.masks import read_masks
from widecli.evaluate.masks import main, record_masks
from widecli.model import checkpoint
from widecli.model.backbone import load_backbone
from widecli.model.routed import RoutedModel
from widecli.recipe.schema import ModelSection


def test_recorded_masks_are_those_of_each_window() -> None:
    routed = tiny_routed()
    ids = random_ids(1, 20)[0]
    masks = record_masks(routed, ids, window=8)
    assert {name: tuple(mask.shape) for name, mask in masks.items()} == {
        "0.attention": (20, 2),
        "0.ffn": (20, 4),
        "1.attention": (20, 2),
        "1.ffn": (20, 4),
    }
    with torch.no_grad(), routed.tracing(keep_masks=True) as trace:
        routed.backbone(input_ids=ids[None, 8:16])
    assert trace.masks is not None
    assert torch.equal(masks["1.ffn"][8:16], trace.masks[1, "ffn"][0])
    assert 0 < int(masks["1.ffn"].sum()) < masks["1.ffn"].numel()


def test_the_command_writes_what_the_benchmark_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_model_folder(tmp_path / "model")
    backbone = load_backbone(ModelSection(name=str(folder)))
    routed = RoutedModel.attach(backbone.model, tiny_plan(), seed=1)
    config = checkpoint.CheckpointConfig(backbone.identity, tiny_plan(), 1, "12345678", {})
    checkpoint.save(tmp_path / "ckpt", routed.routers, config, f"model:\n  name: {folder}\n")
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question " * 3)
    out = tmp_path / "masks.safetensors"
    command = [str(tmp_path / "ckpt"), "--text", str(tmp_path / "text.txt"), "--out", str(out), "--window", "32"]
    assert main([*command, "--tokens", "100"]) == 0
    assert "0.ffn: 100 tokens x 4 groups" in capsys.readouterr().out
    masks = read_masks(out)
    assert set(masks) == {"0.attention", "0.ffn", "1.attention", "1.ffn"}
    expected = record_masks(routed, torch.tensor(backbone.tokenizer("to be or not to be")["input_ids"]), 32)
    assert torch.equal(masks["1.ffn"][:18], expected["1.ffn"])
    assert main([*command, "--tokens", "100"]) == 2
    assert "exists" in capsys.readouterr().err
    out.unlink()
    assert main([*command, "--tokens", "1000"]) == 2
    assert "fewer than the 1000 asked for" in capsys.readouterr().err

"""Copies of a model folder with something wrong in them, each a way in which real folders go wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def copy_of(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def with_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """Rewrite a folder's weights; `change` edits them in place or returns others."""
    tensors = load_file(folder / WEIGHTS)
    changed = change(tensors)
    save_file(changed if isinstance(changed, dict) else tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def with_value(folder: Path, name: str, value: float) -> Path:
    """One value of one tensor replaced."""
    return with_weights(folder, lambda tensors: tensors[name].view(-1).__setitem__(-1, value))


def with_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def with_adapter(folder: Path, base: Path) -> Path:
    """A LoRA adapter of the base model, written into the folder as PEFT writes one."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(folder)
    return folder

"""Folders of models and checkpoints, damaged in ways that nobody listed: they load as they were, or are refused."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiny_models import save_model_folder, shake_routers, tiny_plan
from widecli.errors import WideError
from widecli.model import checkpoint
from widecli.model.adapter import Adapter
from widecli.model.backbone import Backbone, load_backbone
from widecli.model.plan import CompensationPlan
from widecli.model.routed import RoutedModel
from widecli.recipe.schema import LoraSection, ModelSection

MANY = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 2, 3, 7, 10**9, 2**70, 0.5, -0.0, 1e308]),
    st.sampled_from(["", "x", "llama", "float32", "é"]),
    st.sampled_from([[], [0], {}, {"rope_type": "default"}]),
)


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes | None]:
    """What becomes of a file's content; None = the file is gone."""
    kind = draw(st.sampled_from(["flip", "cut", "gone", "empty", "doubled", "noise"]))
    where, bit = draw(st.floats(0, 1, exclude_max=True)), draw(st.integers(0, 7))

    def damage(content: bytes) -> bytes | None:
        at = int(where * len(content))
        if kind == "flip" and content:
            return content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :]
        changed = {"cut": content[:at], "empty": b"", "doubled": content * 2, "noise": bytes(range(256)) * 3}
        return None if kind == "gone" else changed.get(kind, content)

    return damage


def apply(path: Path, damage: Callable[[bytes], bytes | None]) -> bool:
    """Whether the file is another one now."""
    before = path.read_bytes()
    after = damage(before)
    if after is None:
        path.unlink()
    else:
        path.write_bytes(after)
    return after != before


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("models") / "tiny")


def load(folder: Path) -> Backbone:
    return load_backbone(ModelSection(name=str(folder)), torch.device("cpu"))


def run(backbone: Backbone) -> torch.Tensor:
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        logits: torch.Tensor = backbone.model(input_ids=ids).logits
    return logits


@MANY
@given(name=st.sampled_from(["config.json", "model.safetensors", "generation_config.json"]), damage=damages())
def test_a_damaged_model_loads_or_is_refused(
    model_folder: Path, name: str, damage: Callable[[bytes], bytes | None]
) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = shutil.copytree(model_folder, Path(place) / "m")
        apply(folder / name, damage)
        try:
            backbone = load(folder)
        except WideError as error:
            assert "\n" not in str(error)
            return
        assert all(bool(torch.isfinite(p).all()) for p in backbone.model.parameters())


@MANY
@given(key=st.data(), value=VALUES)
def test_a_config_with_any_value_anywhere_loads_or_is_refused(model_folder: Path, key: Any, value: Any) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = shutil.copytree(model_folder, Path(place) / "m")
        path = folder / "config.json"
        config = json.loads(path.read_text())
        # a model of a billion layers is refused by what it lacks, yet it is built first
        safe = sorted(set(config) - {"num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size"})
        config[key.draw(st.sampled_from(safe))] = value
        path.write_text(json.dumps(config))
        try:
            load(folder)
        except WideError as error:
            assert "\n" not in str(error)


@MANY
@given(names=st.data(), prefix=st.sampled_from(["x.", "module.", "model.", "_orig_mod.", ""]))
def test_tensors_that_are_renamed_or_left_out_are_found_or_named(model_folder: Path, names: Any, prefix: str) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(model_folder / "model.safetensors")
    chosen = names.draw(st.sets(st.sampled_from(sorted(tensors)), min_size=1, max_size=5))
    with tempfile.TemporaryDirectory() as place:
        folder = shutil.copytree(model_folder, Path(place) / "m")
        changed = {(f"{prefix}{k}" if k in chosen else k): v for k, v in tensors.items() if prefix or k not in chosen}
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        try:
            found = load(folder).identity
        except WideError as error:
            assert any(name in str(error) for name in chosen)
        else:  # transformers takes some names for others; then it has found what stands there
            assert found.weights_hash == load(model_folder).identity.weights_hash


@pytest.fixture(scope="module")
def stored(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with everything that one can hold."""
    directory = tmp_path_factory.mktemp("checkpoints") / "c"
    backbone = load(model_folder)
    adapter = Adapter.new(backbone.model, LoraSection(rank=2), seed=0)
    plan = tiny_plan(grouping="clustered", compensation=CompensationPlan(rank=2))
    routed = RoutedModel.attach(backbone.model, plan)
    shake_routers(routed)
    order = torch.stack([torch.randperm(64, generator=torch.Generator().manual_seed(i)) for i in range(2)]).int()
    config = checkpoint.CheckpointConfig(backbone.identity, plan, 3, "12345678", {}, adapter=adapter.facts())
    checkpoint.save(
        directory,
        routed.routers,
        config,
        f"model: {{name: {model_folder}}}\n",
        {checkpoint.ADAPTER: lambda path: adapter.save(path, "base")},
        compensations=routed.compensations,
        order=order,
    )
    return directory


FILES = [
    *("router.safetensors", "compensation.safetensors", "channels.safetensors"),
    *("adapter/adapter_model.safetensors", "adapter/adapter_config.json"),
]


@MANY
@given(name=st.sampled_from(FILES), damage=damages())
def test_a_checkpoint_of_which_a_byte_changed_is_never_attached(
    model_folder: Path, stored: Path, name: str, damage: Callable[[bytes], bytes | None]
) -> None:
    with tempfile.TemporaryDirectory() as place:
        directory = shutil.copytree(stored, Path(place) / "c")
        changed = apply(directory / name, damage)
        try:
            checkpoint.attach(directory, load(model_folder))
        except WideError as error:
            assert changed and "\n" not in str(error)
        else:
            assert not changed


@MANY
@given(damage=damages())
def test_a_damaged_description_of_a_checkpoint_is_read_or_refused(
    model_folder: Path, stored: Path, damage: Callable[[bytes], bytes | None]
) -> None:
    with tempfile.TemporaryDirectory() as place:
        directory = shutil.copytree(stored, Path(place) / "c")
        apply(directory / checkpoint.CONFIG, damage)
        try:
            checkpoint.refuse_incomplete(directory)
            checkpoint.attach(directory, load(model_folder))
        except WideError as error:
            assert "\n" not in str(error)


@MANY
@given(where=st.data(), value=VALUES)
def test_a_description_with_any_value_anywhere_is_read_or_refused(
    model_folder: Path, stored: Path, where: Any, value: Any
) -> None:
    with tempfile.TemporaryDirectory() as place:
        directory = shutil.copytree(stored, Path(place) / "c")
        path = directory / checkpoint.CONFIG
        document = json.loads(path.read_text())
        section = where.draw(st.sampled_from([document, document["plan"], document["backbone"], document["adapter"]]))
        section[where.draw(st.sampled_from(sorted(section)))] = value
        path.write_text(json.dumps(document))
        try:
            checkpoint.refuse_incomplete(directory)
            checkpoint.attach(directory, load(model_folder))
        except WideError as error:
            assert "\n" not in str(error)

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from widecli.errors import UsageError
from widecli.train import state


def trained(steps: int = 3) -> tuple[dict[str, nn.Parameter], torch.optim.AdamW]:
    torch.manual_seed(0)
    parameters = {"a.weight": nn.Parameter(torch.randn(3, 2)), "b.bias": nn.Parameter(torch.randn(4))}
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
    for _ in range(steps):
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()
    return parameters, optimizer


def store(folder: Path, steps: int = 3) -> tuple[dict[str, nn.Parameter], torch.optim.AdamW]:
    parameters, optimizer = trained(steps)
    state.save_optimizer(folder / state.TENSORS, optimizer, parameters)
    state.write_step(folder / state.STATE, steps)
    return parameters, optimizer


def test_a_restored_optimiser_takes_the_same_next_step_bit_for_bit(tmp_path: Path) -> None:
    parameters, optimizer = store(tmp_path)
    copies = {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
    fresh = torch.optim.AdamW(copies.values(), lr=0.1)
    assert state.load_optimizer(tmp_path, fresh, copies) == 3
    for name in parameters:
        gradient = torch.randn(parameters[name].shape)
        parameters[name].grad, copies[name].grad = gradient, gradient.clone()
    optimizer.step()
    fresh.step()
    assert all(torch.equal(parameters[n], copies[n]) for n in parameters)


def test_the_state_before_the_first_step_is_empty_and_loads(tmp_path: Path) -> None:
    parameters, _ = store(tmp_path, steps=0)
    assert state.load_optimizer(tmp_path, torch.optim.AdamW(parameters.values()), parameters) == 0


def test_a_state_of_other_routers_is_refused_with_names(tmp_path: Path) -> None:
    store(tmp_path)
    other = {"a.weight": nn.Parameter(torch.zeros(3, 2)), "c.bias": nn.Parameter(torch.zeros(4))}
    with pytest.raises(UsageError, match=r"does not fit these routers \(differs in b\.bias\.exp_avg"):
        state.load_optimizer(tmp_path, torch.optim.AdamW(other.values()), other)


def test_a_state_of_other_shapes_is_refused_with_the_name(tmp_path: Path) -> None:
    store(tmp_path)
    other = {"a.weight": nn.Parameter(torch.zeros(3, 2)), "b.bias": nn.Parameter(torch.zeros(5))}
    with pytest.raises(UsageError, match=r"b\.bias"):
        state.load_optimizer(tmp_path, torch.optim.AdamW(other.values()), other)


@pytest.mark.parametrize("name", [state.TENSORS, state.STATE])
@pytest.mark.parametrize("damage", ["gone", "cut", "empty"])
def test_a_damaged_state_is_refused_in_a_sentence(tmp_path: Path, name: str, damage: str) -> None:
    parameters, optimizer = store(tmp_path)
    path = tmp_path / name
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:7] if damage == "cut" else b"")
    with pytest.raises(UsageError, match="cannot be resumed from"):
        state.load_optimizer(tmp_path, optimizer, parameters)


@pytest.mark.parametrize("content", ["[]", '{"schema": "wide.training_state/1"}', '{"schema": "other/1", "step": 3}'])
def test_a_state_of_another_kind_is_refused(tmp_path: Path, content: str) -> None:
    parameters, optimizer = store(tmp_path)
    (tmp_path / state.STATE).write_text(content)
    with pytest.raises(UsageError, match=str(tmp_path)):
        state.load_optimizer(tmp_path, optimizer, parameters)


def test_only_the_newest_checkpoint_keeps_its_state(tmp_path: Path) -> None:
    folders = [tmp_path / f"step-{i}" for i in range(3)]
    for folder in folders:
        folder.mkdir()
        store(folder)
        (folder / "router.safetensors").write_text("kept")
    state.drop_old_states(folders)
    assert [sorted(p.name for p in f.iterdir()) for f in folders[:2]] == [["router.safetensors"]] * 2
    assert json.loads((folders[2] / state.STATE).read_text())["step"] == 3

"""What a run needs beside the routers to continue as if it had never stopped: optimiser moments and the step.

Batches, noise, temperature and learning rate are functions of (seed, step), so nothing else is stored.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from widecli.errors import UsageError

TENSORS = "optimizer.safetensors"
STATE = "training_state.json"
SCHEMA = "wide.training_state/1"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def save_optimizer(path: Path, optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> None:
    """Write AdamW's moments by parameter name."""
    from safetensors.torch import save_file

    tensors = {}
    for name, parameter in parameters.items():
        for moment, value in optimizer.state[parameter].items():
            tensors[f"{name}.{moment}"] = value.detach().cpu().contiguous().clone()
    save_file(tensors, path)


def write_step(path: Path, step: int) -> None:
    """Write the number of finished steps."""
    path.write_text(json.dumps({"schema": SCHEMA, "step": step}) + "\n")


def load_optimizer(directory: Path, optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> int:
    """Restore AdamW's moments; returns the number of finished steps. Raises UsageError when the state does not fit."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state = json.loads((directory / STATE).read_text())
        tensors = load_file(directory / TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(f"{directory} cannot be resumed from ({error}); start anew with --overwrite") from error
    found = state.get("schema") if isinstance(state, dict) else None
    if found != SCHEMA:
        raise UsageError(f"{directory / STATE} has schema {found!r}; this version reads {SCHEMA!r}")
    step = state.get("step")
    if not isinstance(step, int):
        raise UsageError(f"{directory / STATE} is damaged (step {step!r}); start anew with --overwrite")
    if step == 0:  # AdamW makes its state at the first step
        return 0
    expected = {f"{name}.{moment}" for name in parameters for moment in (*_MOMENTS, "step")}
    if expected != tensors.keys():
        odd = ", ".join(sorted(expected ^ tensors.keys())[:6])
        raise UsageError(f"{directory / TENSORS} does not fit these routers (differs in {odd})")
    for name, parameter in parameters.items():
        for moment in _MOMENTS:
            if (shape := tensors[f"{name}.{moment}"].shape) != parameter.shape:
                raise UsageError(
                    f"{directory / TENSORS} does not fit these routers ({name}.{moment} has shape {tuple(shape)} "
                    f"instead of {tuple(parameter.shape)})"
                )
    for name, parameter in parameters.items():
        optimizer.state[parameter] = {
            moment: tensors[f"{name}.{moment}"].to(parameter.device) for moment in _MOMENTS
        } | {"step": tensors[f"{name}.step"]}
    return step


def drop_old_states(checkpoints: list[Path]) -> None:
    """Delete the optimiser state of every checkpoint but the newest: twice the size of the routers, and never used."""
    for directory in checkpoints[:-1]:
        (directory / STATE).unlink(missing_ok=True)
        (directory / TENSORS).unlink(missing_ok=True)

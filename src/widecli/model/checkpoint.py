"""Checkpoint directories: routers, the plan and the backbone they belong to. See `save` for the files.

Loading is strict: a router that is missing, unexpected or misshaped stops with its name. Going on with a random router
would look like a bad method rather than like the bug it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from widecli.errors import UsageError
from widecli.model.identity import BackboneIdentity
from widecli.model.plan import RoutingPlan
from widecli.model.router import plain_state
from widecli.storage import atomic_directory

SCHEMA = "wide.checkpoint/1"
CONFIG = "wide_config.json"
ROUTERS = "router.safetensors"


@dataclass(frozen=True)
class CheckpointConfig:
    """What `wide_config.json` holds."""

    backbone: BackboneIdentity
    plan: RoutingPlan
    step: int
    recipe_hash: str
    achieved: Mapping[str, Any]  # skip rates and FLOPs as the run measured them, {} before it did

    def to_json(self) -> dict[str, Any]:
        """Plain data, schema first."""
        return {
            "schema": SCHEMA,
            "backbone": asdict(self.backbone),
            "plan": self.plan.to_json(),
            "step": self.step,
            "recipe_hash": self.recipe_hash,
            "achieved": dict(self.achieved),
        }


def save(
    directory: Path,
    routers: nn.ModuleDict,
    config: CheckpointConfig,
    recipe_yaml: str,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint atomically: wide_config.json, router.safetensors, recipe.yaml, README.md.

    `extra` maps further file names to a callable that writes them (the training state).
    """
    from safetensors.torch import save_file

    with atomic_directory(directory) as scratch:
        save_file(plain_state(routers), scratch / ROUTERS, metadata={"format": "pt"})
        (scratch / CONFIG).write_text(json.dumps(config.to_json(), indent=2) + "\n")
        (scratch / "recipe.yaml").write_text(recipe_yaml)
        (scratch / "README.md").write_text(model_card(config))
        for name, write in (extra or {}).items():
            write(scratch / name)


def resolve(path: str | Path) -> Path:
    """The checkpoint directory meant by `path`: itself, or the newest one below a run directory. Raises UsageError."""
    root = Path(path)
    if (root / CONFIG).is_file():
        return root
    found = sorted(steps(root / "checkpoints"), reverse=True)
    if found:
        return found[0][1]
    raise UsageError(f"{root} is neither a checkpoint (no {CONFIG}) nor a run directory with one")


def steps(directory: Path) -> list[tuple[int, Path]]:
    """The complete checkpoints of a run, as (step, directory)."""
    if not directory.is_dir():
        return []
    names = [(p.name.removeprefix("step-"), p) for p in directory.glob("step-*") if (p / CONFIG).is_file()]
    return sorted((int(number), path) for number, path in names if number.isdecimal())  # not somebody's copy


def read_config(directory: Path) -> CheckpointConfig:
    """Parse `wide_config.json`. Raises UsageError when it is absent, broken or of another schema."""
    path = directory / CONFIG
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"{directory} is not a checkpoint: it has no {CONFIG}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error}); take another checkpoint of the run") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else None
        raise UsageError(f"{path} has schema {found!r}; this version reads {SCHEMA!r}")
    try:
        return CheckpointConfig(
            backbone=BackboneIdentity(**data["backbone"]),
            plan=RoutingPlan.from_json(data["plan"]),
            step=int(data["step"]),
            recipe_hash=data["recipe_hash"],
            achieved=data["achieved"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} is damaged or from another version ({error}); take another checkpoint") from error


def load_routers(directory: Path, routers: nn.ModuleDict) -> None:
    """Fill `routers` from a checkpoint, exactly. Raises UsageError naming missing, unexpected and misshaped keys."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = directory / ROUTERS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} cannot be read ({error}); take another checkpoint of the run") from error
    expected = routers.state_dict()
    problems = _key_problems(expected, tensors)
    if problems:
        raise UsageError(f"{path} does not fit its own plan: " + "; ".join(problems))
    routers.load_state_dict(tensors, strict=True)


def _key_problems(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    problems = []
    if missing := sorted(expected.keys() - found.keys()):
        problems.append("missing " + ", ".join(missing))
    if unexpected := sorted(found.keys() - expected.keys()):
        problems.append("unexpected " + ", ".join(unexpected))
    for key in sorted(expected.keys() & found.keys()):
        if expected[key].shape != found[key].shape:
            problems.append(f"{key} has shape {tuple(found[key].shape)} instead of {tuple(expected[key].shape)}")
        elif expected[key].dtype != found[key].dtype:
            problems.append(f"{key} is {found[key].dtype} instead of {expected[key].dtype}")
    return problems


def model_card(config: CheckpointConfig) -> str:
    """A short README for the checkpoint directory."""
    plan = config.plan
    lines = [
        f"# Routers for {config.backbone.id}",
        "",
        "Every token of this model chooses, layer by layer, which attention-head groups and FFN-channel groups to run.",
        "This directory holds the routers; the backbone is loaded from where it was.",
        "",
        "| | |",
        "|---|---|",
        f"| backbone | {config.backbone.id}"
        + (f" @ {config.backbone.revision}" if config.backbone.revision else "")
        + " |",
        f"| mode | {plan.mode}, parts {plan.parts}, tap {plan.tap} |",
        f"| group sizes | {plan.attention_group_size} query heads, {plan.ffn_group_size} FFN channels |",
        f"| router rank | {plan.rank} |",
        f"| steps | {config.step} |",
    ]
    if rate := config.achieved.get("skip_rate"):
        shown = ", ".join(f"{k} {v:.1%}" for k, v in rate.items() if v is not None)
        lines.append(f"| skip rate | {shown} |")
    if flops := config.achieved.get("flops_skipped"):
        lines.append(
            f"| FLOPs skipped | {flops['prunable']:.1%} of the prunable, {flops['total']:.1%} of all "
            f"at {flops['context_tokens']} tokens |"
        )
    lines += ["", "Evaluate it with `wide eval <this directory>`.", ""]
    return "\n".join(lines)

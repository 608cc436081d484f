"""Checkpoint directories: routers, the plan and the backbone they belong to. See `save` for the files.

Loading is strict: a router or an adapter that is missing, unexpected or misshaped stops with its name. Going on with a
random router would look like a bad method rather than like the bug it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from widecli.errors import UsageError
from widecli.model.finite import first_not_finite
from widecli.model.identity import BackboneIdentity
from widecli.model.plan import ModelShape, RoutingPlan
from widecli.model.router import plain_state
from widecli.recipe.retired import MODE, RETIRED
from widecli.storage import atomic_directory, changed_file, checksum

if TYPE_CHECKING:
    from widecli.model.adapter import Adapter
    from widecli.model.backbone import Backbone
    from widecli.model.routed import RoutedModel
    from widecli.recipe.schema import ModelSection

SCHEMA = "wide.checkpoint/1"
# Written when there is more than routers: a version that knows the first schema alone would go on without the adapter.
SCHEMA_WITH_MORE = "wide.checkpoint/2"
SCHEMA_OF_PATTERNS = "wide.checkpoint/3"  # read until 0.1, refused since
# Written when channels are regrouped or skipped groups compensated: without either the routers decide about others.
SCHEMA_WITH_GROUPS = "wide.checkpoint/4"
SCHEMAS = (SCHEMA, SCHEMA_WITH_MORE, SCHEMA_WITH_GROUPS)
CONFIG = "wide_config.json"
ROUTERS = "router.safetensors"
COMPENSATION = "compensation.safetensors"
CHANNELS = "channels.safetensors"
ADAPTER = "adapter"


@dataclass(frozen=True)
class CheckpointConfig:
    """What `wide_config.json` holds."""

    backbone: BackboneIdentity
    plan: RoutingPlan
    step: int
    recipe_hash: str
    achieved: Mapping[str, Any]  # skip rates and FLOPs as the run measured them, {} before it did
    adapter: Mapping[str, Any] | None = None  # facts of the LoRA adapter in `adapter/`, or of the one merged
    origin: Mapping[str, Any] | None = None  # the checkpoint that a second stage began with: see `origin_of`
    merged: BackboneIdentity | None = None  # the model whose weights lie in this very directory; `backbone` = its base
    files: Mapping[str, str] = field(default_factory=dict, compare=False)  # checksums; {} in older checkpoints

    @property
    def adapter_folder(self) -> str | None:
        """Where the adapter lies, relative to the checkpoint; None when there is none to load."""
        return ADAPTER if self.adapter is not None and self.merged is None else None

    def to_json(self) -> dict[str, Any]:
        """Plain data, schema first."""
        more: dict[str, Any] = {}
        if self.adapter is not None:
            more["adapter"] = {**self.adapter, "folder": self.adapter_folder}
        if self.origin is not None:
            more["origin"] = dict(self.origin)
        if self.merged is not None:
            more["merged"] = asdict(self.merged)
        schema = SCHEMA_WITH_MORE if more else SCHEMA
        if self.files:
            more["files"] = dict(self.files)
        if self.plan.grouping == "clustered" or self.plan.compensation is not None:
            schema = SCHEMA_WITH_GROUPS
        return {
            "schema": schema,
            "backbone": asdict(self.backbone),
            "plan": self.plan.to_json(),
            "step": self.step,
            "recipe_hash": self.recipe_hash,
            "achieved": dict(self.achieved),
            **more,
        }


def save(
    directory: Path,
    routers: nn.ModuleDict,
    config: CheckpointConfig,
    recipe_yaml: str,
    extra: Mapping[str, Any] | None = None,
    compensations: nn.ModuleDict | None = None,
    order: Tensor | None = None,
) -> None:
    """Write a checkpoint atomically: router.safetensors, wide_config.json with checksums, recipe.yaml, README.md.

    `compensations` go to compensation.safetensors where the plan compensates, the channels' `order` [L, D'] to
    channels.safetensors where they are regrouped. `extra` maps further file names to a callable that writes them (the
    training state).
    """
    from safetensors.torch import save_file

    with atomic_directory(directory) as scratch:
        save_file(plain_state(routers), scratch / ROUTERS, metadata={"format": "pt"})
        if config.plan.compensation is not None:
            assert compensations is not None
            state = {key: value.detach().cpu().contiguous() for key, value in compensations.state_dict().items()}
            save_file(state, scratch / COMPENSATION, metadata={"format": "pt"})
        if config.plan.grouping == "clustered":
            assert order is not None
            save_file({"order": order.cpu().contiguous()}, scratch / CHANNELS, metadata={"format": "pt"})
        for name, write in (extra or {}).items():
            write(scratch / name)
        # of what programs read; recipe and card are for people, who may edit them
        config = replace(config, files=checksums(scratch))
        (scratch / CONFIG).write_text(json.dumps(config.to_json(), indent=2) + "\n")
        (scratch / "recipe.yaml").write_text(recipe_yaml)
        (scratch / "README.md").write_text(model_card(config))


def checksums(directory: Path) -> dict[str, str]:
    """Of every file in a directory and below it, by its relative path."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): checksum(path) for path in files}


def refuse_changed(directory: Path, config: CheckpointConfig, names: Iterable[str]) -> None:
    """Raise UsageError for a file that is not what the checkpoint was saved with."""
    if found := changed_file(directory, config.files, names):
        raise UsageError(
            f"{directory / found} is not the file that was saved: its checksum differs from the one in {CONFIG}; take "
            "another checkpoint of the run"
        )


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
    if isinstance(data, dict) and data.get("schema") == SCHEMA_OF_PATTERNS:
        raise UsageError(f"{directory} was trained with routing.mode={MODE}, {RETIRED}")
    if not isinstance(data, dict) or data.get("schema") not in SCHEMAS:
        found = data.get("schema") if isinstance(data, dict) else None
        raise UsageError(f"{path} has schema {found!r}; this version reads {', '.join(map(repr, SCHEMAS))}")
    try:
        adapter, merged = data.get("adapter"), data.get("merged")
        return CheckpointConfig(
            backbone=BackboneIdentity.from_json(data["backbone"]),
            plan=RoutingPlan.from_json(data["plan"]),
            step=int(data["step"]),
            recipe_hash=data["recipe_hash"],
            achieved=data["achieved"],
            adapter={k: v for k, v in adapter.items() if k != "folder"} if adapter else None,
            origin=data.get("origin"),
            merged=BackboneIdentity.from_json(merged) if merged else None,
            files=dict(data.get("files") or {}),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} is damaged or from another version ({error}); take another checkpoint") from error


def refuse_incomplete(directory: Path) -> None:
    """Raise UsageError naming a file that a checkpoint lacks: cheap enough to ask before anything is measured."""
    from widecli.model import adapter

    config = read_config(directory)
    for name in (*routing_files(config), "recipe.yaml"):
        if not (directory / name).is_file():
            raise UsageError(f"{directory} lacks its {name}; take another checkpoint of the run")
    if config.adapter_folder:
        adapter.refuse_incomplete(directory / config.adapter_folder)


def routing_files(config: CheckpointConfig) -> tuple[str, ...]:
    """The files that hold what decides and what stands in: routers, compensation, the channels' order."""
    plan = config.plan
    more = {
        COMPENSATION: plan.compensation is not None,
        CHANNELS: plan.grouping == "clustered",
    }
    return (ROUTERS, *(name for name, there in more.items() if there))


def section_of(directory: Path) -> ModelSection:
    """The recipe's model section that loads a checkpoint's backbone: the trained one, or the merged model beside it.

    Raises UsageError for a checkpoint without its recipe.
    """
    from widecli.recipe.load import load_stored

    config = read_config(directory)
    stored = directory / "recipe.yaml"
    if not stored.is_file():
        raise UsageError(f"{directory} lacks its recipe.yaml; take another checkpoint of the run")
    section = load_stored(stored).model
    if config.merged:
        section = section.model_copy(update={"name": str(directory), "revision": None})
    return section


def attach(directory: Path, backbone: Backbone) -> tuple[RoutedModel, Adapter | None]:
    """Hang a checkpoint on its backbone: the adapter, if it has one, and the routers.

    For a merged checkpoint the backbone is the model in the checkpoint's own directory. Raises UsageError when the
    backbone is another model or a file does not fit.
    """
    from widecli.model.routed import RoutedModel

    config = read_config(directory)
    wanted = config.merged or config.backbone
    if difference := wanted.mismatch(backbone.identity):
        raise UsageError(
            f"{directory} was trained on {wanted.id}, and {backbone.identity.id} is another model: {difference}"
        )
    refuse_odd_plan(directory, config, backbone.shape)
    adapter = load_adapter(directory, backbone.model)
    routed = RoutedModel.attach(backbone.model, config.plan)
    load_routing(directory, routed)
    return routed, adapter


def refuse_odd_plan(directory: Path, config: CheckpointConfig, shape: ModelShape) -> None:
    """Raise UsageError naming the checkpoint whose plan does not fit its own backbone."""
    try:
        config.plan.validate(shape)
    except UsageError as error:
        raise UsageError(f"{directory / CONFIG} is damaged: {error}; take another checkpoint of the run") from error


def load_adapter(directory: Path, model: nn.Module) -> Adapter | None:
    """Put a checkpoint's adapter on its backbone; None where it has none. Raises UsageError."""
    from widecli.model import adapter

    config = read_config(directory)
    folder = config.adapter_folder
    if folder is None:
        return None
    loaded = adapter.Adapter.load(model, directory / folder)
    refuse_changed(directory, config, (f"{folder}/{name}" for name in (adapter.CONFIG, adapter.WEIGHTS)))
    return loaded


def origin_of(directory: Path) -> dict[str, Any]:
    """What a second stage records of the checkpoint it begins with: where it lay, and what tells it from others."""
    config = read_config(directory)
    try:
        content = b"".join((directory / name).read_bytes() for name in routing_files(config))
    except OSError as error:
        raise UsageError(f"{directory} cannot be read ({error}); take another checkpoint") from error
    digest = hashlib.sha256(content).hexdigest()[:16]
    return {
        "checkpoint": str(directory),
        "recipe_hash": config.recipe_hash,
        "step": config.step,
        "routers_hash": digest,
    }


def loaded_files(config: CheckpointConfig) -> tuple[str, ...]:
    """Every file that `attach` reads, by its path in the checkpoint."""
    from widecli.model import adapter

    folder = config.adapter_folder
    of_adapter = tuple(f"{folder}/{name}" for name in (adapter.CONFIG, adapter.WEIGHTS)) if folder else ()
    return (*routing_files(config), *of_adapter)


def content_hash(directory: Path) -> str:
    """Names what a checkpoint decides and adds: 8 hex digits of its routing files and its adapter."""
    from widecli.model.adapter import WEIGHTS

    config = read_config(directory)
    names = routing_files(config) + ((f"{config.adapter_folder}/{WEIGHTS}",) if config.adapter_folder else ())
    digest = hashlib.sha256()
    try:
        for name in names:
            digest.update((directory / name).read_bytes())
    except OSError as error:
        raise UsageError(f"{directory} cannot be read ({error}); take another checkpoint") from error
    return digest.hexdigest()[:8]


def load_routing(directory: Path, routed: RoutedModel) -> None:
    """Fill a model's routers and compensations from a checkpoint of its plan, exactly, and bring its channels into the
    order that they decide about. Raises UsageError.
    """
    config = read_config(directory)
    load_routers(directory, routed.routers)
    if routed.plan.compensation is not None:
        _fill(routed.compensations, directory / COMPENSATION, config)
    if routed.plan.grouping == "clustered":
        order = _read(directory / CHANNELS).get("order")
        if order is None:
            raise UsageError(f"{directory / CHANNELS} lacks its tensor 'order'; take another checkpoint of the run")
        # the weights of a merged model lie in this order already
        if config.merged is None:
            routed.regroup(order, str(directory / CHANNELS))
        refuse_changed(directory, config, [CHANNELS])


def load_routers(directory: Path, routers: nn.ModuleDict) -> None:
    """Fill `routers` from a checkpoint, exactly.

    Raises UsageError naming keys that are missing, unexpected, misshaped or not finite, and a file that has changed.
    """
    _fill(routers, directory / ROUTERS, read_config(directory))


def _fill(modules: nn.ModuleDict, path: Path, config: CheckpointConfig) -> None:
    tensors = _read(path)
    expected = modules.state_dict()
    problems = _key_problems(expected, tensors)
    if problems:
        raise UsageError(f"{path} does not fit its own plan: " + "; ".join(problems))
    if odd := first_not_finite(tensors.items()):
        raise UsageError(f"{path} is not finite: {odd} holds NaN or infinity; take another checkpoint of the run")
    refuse_changed(path.parent, config, [path.name])
    modules.load_state_dict(tensors, strict=True)


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} cannot be read ({error}); take another checkpoint of the run") from error
    return found


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
    held = "the routers" + (" and, in adapter/, a plain PEFT adapter" if config.adapter else "")
    lines = [
        f"# {'Routers and a LoRA adapter' if config.adapter else 'Routers'} for {config.backbone.id}",
        "",
        "Every token of this model chooses, layer by layer, which attention-head groups and FFN-channel groups to run.",
        f"This directory holds {held}; the backbone is loaded from where it was.",
        "",
        "| | |",
        "|---|---|",
        f"| backbone | {config.backbone.id}"
        + (f" @ {config.backbone.revision}" if config.backbone.revision else "")
        + " |",
        f"| mode | {plan.mode}, parts {plan.parts}, tap {plan.tap} |",
        f"| group sizes | {plan.attention_group_size} query heads, {plan.ffn_group_size} FFN channels |",
        f"| router rank | {plan.rank} |",
        *(["| FFN channels | regrouped: a group holds what tokens need together |"] * (plan.grouping == "clustered")),
        *([f"| a skipped group leaves | {plan.compensation.described} |"] if plan.compensation else []),
        f"| steps | {config.step} |",
    ]
    if config.adapter:
        lines.append(
            f"| adapter | LoRA, rank {config.adapter['rank']}, alpha {config.adapter['alpha']}, on "
            f"{', '.join(config.adapter['targets'])} |"
        )
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

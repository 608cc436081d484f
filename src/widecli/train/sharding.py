"""A frozen backbone dealt to several GPUs: FSDP2 around each decoder layer.

A layer's weights lie in equal parts on the ranks (or in their machines' memory), come together while it runs, forward
and backward, and are dropped again; the next layer's come meanwhile. Nothing of the backbone learns, so nothing is
reduced and accumulation needs no switch. Routers and adapter are no part of it (see `distributed`), and embedding,
final norm and head stay whole: the loss reads the head outside of any layer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from widecli.errors import UsageError
from widecli.model.backbone import Backbone, default_device, empty_backbone, resolve_dtype
from widecli.model.families import family_of
from widecli.model.identity import BackboneIdentity, hash_of_values
from widecli.model.pretrained import (
    explained,
    refuse_misfit,
    refuse_not_finite,
    refuse_whole_numbers,
    weight_files,
)
from widecli.ranks import Ranks
from widecli.train.estimate import WHOLE_UP_TO

if TYPE_CHECKING:
    from widecli.recipe.schema import DistributedSection, ModelSection

GIB = 2**30


@dataclass(frozen=True)
class Sharding:
    """How a backbone is dealt: over all ranks, or over those of each machine; `offload`: parts lie in its memory."""

    over: Literal["node", "full"]
    offload: bool = False


def choose_sharding(section: DistributedSection, ranks: Ranks, weights_bytes: float) -> Sharding | None:
    """What a recipe asks for on these ranks; None = every rank holds the whole backbone. Raises UsageError."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        if section.offload or section.shard in ("node", "full"):
            key = "offload=true" if section.offload else f"shard={section.shard}"
            raise UsageError(f"distributed.{key} needs processes to deal the weights to: add --nproc (1 or more)")
        return None
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))
    over = section.shard
    if over == "auto":
        memory = card_bytes(section, ranks)
        if memory is None or weights_bytes <= WHOLE_UP_TO * memory:
            over = "none"
        else:
            over = "node" if weights_bytes / local <= WHOLE_UP_TO * memory else "full"
    if over == "none":
        return Sharding("node", offload=True) if section.offload else None
    if over == "node" and ranks.size % local:
        raise UsageError(
            f"distributed.shard=node needs as many ranks on every machine; {ranks.size} is not n x {local}"
        )
    return Sharding(over, section.offload)


def card_bytes(section: DistributedSection, ranks: Ranks) -> float | None:
    """Memory of the smallest GPU; None on CPUs."""
    if section.memory_gib is not None:
        return section.memory_gib * GIB
    if not torch.cuda.is_available():
        return None
    return float(min(ranks.gather(torch.cuda.get_device_properties("cuda").total_memory)))


def load_sharded(section: ModelSection, sharding: Sharding, ranks: Ranks) -> Backbone:
    """As `load_backbone`, but each rank reads and holds its part of every layer. Raises UsageError."""
    device = default_device()
    with ranks.one_a_machine_first():  # a model of the Hub is downloaded once
        tokenizer, model, folder = empty_backbone(section, resolve_dtype(section.dtype, device))
    shard_layers(model, sharding, device)
    allocate(model, sharding, device)
    with explained(section.name, str(folder)):
        _refuse_misfit(section.name, model, folder)
        refuse_whole_numbers(section.name, folder, model)
        _read_parts(model, folder)
    model.eval().requires_grad_(False)
    refuse_not_finite(section.name, model)
    weights = _hash_of_files(model, folder)
    identity = BackboneIdentity.of(section.name, section.revision, model.config, weights)
    return Backbone(model, tokenizer, identity, device, sharded=True, beyond_positions=section.beyond_positions)


def shard_layers(model: nn.Module, sharding: Sharding, device: torch.device) -> None:
    """Deal every decoder layer's weights to the ranks; works on a model without memory behind it too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    size = torch.distributed.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if sharding.over == "node" and local < size:  # the same parts on every machine: no weights cross the network
        mesh = init_device_mesh(device.type, (size // local, local), mesh_dim_names=("machine", "card"))
    else:
        mesh = init_device_mesh(device.type, (size,))
    family = family_of(model)
    decoder, layers = model.get_submodule(family.decoder), model.get_submodule(family.layers)
    policy = MixedPrecisionPolicy(
        param_dtype=next(model.parameters()).dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": True}
    if sharding.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for layer in layers.children():
        fully_shard(layer, **options)
    dealt = set(layers.parameters())
    # the root has no weights of its own; it lets the layers know of each other
    fully_shard(decoder, ignored_params={p for p in decoder.parameters() if p not in dealt}, **options)


def allocate(model: nn.Module, sharding: Sharding, device: torch.device) -> None:
    """Put uninitialised memory behind the parameters that have none, and everything else on the device."""
    from torch.distributed.tensor import DTensor

    def place(tensor: Tensor) -> Tensor:
        there = torch.device("cpu") if sharding.offload and isinstance(tensor, DTensor) else device
        return torch.empty_like(tensor, device=there) if tensor.is_meta else tensor.to(there)

    model._apply(place)  # type: ignore[no-untyped-call]
    model.tie_weights()  # type: ignore[operator]


@contextmanager
def whole_sizes(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Stand-ins of the whole size, without memory, for dealt weights inside the block.

    PEFT sizes an adapter by a weight's local part when it lies on a mesh, as tensor parallelism would want.
    """
    from torch.distributed.tensor import DTensor

    dealt = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(parameter, DTensor)
    ]
    for module, name, parameter in dealt:
        empty = torch.empty(1, dtype=parameter.dtype, device=device).expand(parameter.shape)
        setattr(module, name, nn.Parameter(empty, requires_grad=False))
    try:
        yield
    finally:
        for module, name, parameter in dealt:
            setattr(module, name, parameter)


def _refuse_misfit(name: str, model: nn.Module, folder: Path) -> None:
    """Raise UsageError where the files lack a tensor of the model or hold one of another."""
    from safetensors import safe_open

    there: set[str] = set()
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            there.update(file.keys())
    wanted = {key for key, _ in model.named_parameters()}
    # what transformers passes over: a head that is tied to the embedding, and buffers that older files hold
    passed_over = model.state_dict().keys() | {key for key in there if key.endswith("rotary_emb.inv_freq")}
    refuse_misfit(name, wanted - there, there - wanted - passed_over)


def _read_parts(model: nn.Module, folder: Path) -> None:
    """Fill the parameters from safetensors files: of a dealt one, every rank reads its own rows and no more."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    parameters: dict[str, Any] = {name: p.detach() for name, p in model.named_parameters()}
    try:
        load(parameters, storage_reader=HuggingFaceStorageReader(str(folder)))
    except (CheckpointException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[-300:]
        raise UsageError(f"{folder} cannot be read in parts; the files may be incomplete ({reason})") from error


def _hash_of_files(model: nn.Module, folder: Path) -> str | None:
    """`weights_hash` of the model that the files hold, at the dtype it is loaded in."""
    from safetensors import safe_open

    dtype = next(model.parameters()).dtype
    if dtype == torch.float16:
        return None
    opened: list[Any] = [safe_open(path, framework="pt") for path in weight_files(folder)]
    where = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - it is no mapping

    def values(name: str, index: Tensor) -> Tensor:
        part = where[name].get_slice(name)
        shape = part.get_shape()
        width = shape[1] if len(shape) > 1 else 1
        rows = [part[i // width : i // width + 1].reshape(-1)[i % width] for i in index.tolist()]
        return torch.stack(rows).to(dtype)

    return hash_of_values(((name, p.numel()) for name, p in model.named_parameters()), values)

"""FFN channels of a backbone in another order than they are stored in, without changing what it computes.

Channel c of a gated MLP is row c of gate and up and column c of down. Moving all three together changes the order of
a sum and nothing else, so groups of neighbours may hold any channels one likes. The backbone remembers the order that
it is in, and `arrange` moves from that one to the next: two orders never compose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from widecli.errors import UsageError
from widecli.model.families import Family, family_of
from widecli.model.plan import ModelShape

_ORDER = "wide_channel_order"  # in the backbone's __dict__: an attribute would make a tensor part of its state


def stored_order(shape: ModelShape) -> Tensor:
    """Every layer's channels as they are stored, int32 [L, D']."""
    return torch.arange(shape.intermediate_size, dtype=torch.int32).repeat(shape.num_hidden_layers, 1)


def present_order(model: nn.Module) -> Tensor | None:
    """`order[l, i]` is the stored channel that layer l now has in place i, int32 [L, D']; None = all in their own."""
    return cast("Tensor | None", model.__dict__.get(_ORDER))


def refuse_disorder(order: Tensor, shape: ModelShape, where: str) -> None:
    """Raise UsageError when `order` holds no permutation of every layer's channels; `where` it came from."""
    wanted = (shape.num_hidden_layers, shape.intermediate_size)
    if tuple(order.shape) != wanted or order.dtype != torch.int32:
        raise UsageError(
            f"{where} orders {order.dtype} {tuple(order.shape)} channels, and this model has int32 {wanted}: it "
            f"belongs to another model"
        )
    wrong = (order.sort(1).values != stored_order(shape).to(order.device)).any(1).nonzero().flatten().tolist()
    if wrong:
        raise UsageError(
            f"{where} is damaged: the channels of layer {wrong[0]} are no permutation; take another checkpoint"
        )


@torch.no_grad()
def arrange(model: nn.Module, order: Tensor | None) -> None:
    """Bring the channels of a backbone into `order` [L, D'] (None = as they are stored), in place and exactly.

    Plain, sharded and offloaded weights are moved where they lie, an adapter's with them. Raises UsageError for weights
    that cannot be moved one by one (quantised ones).
    """
    before = present_order(model)
    if order is None and before is None:
        return
    family = family_of(model)
    layers = cast(nn.ModuleList, model.get_submodule(family.layers))
    width = (order if order is not None else cast(Tensor, before)).shape[1]
    own = torch.arange(width, dtype=torch.int64)
    for index, layer in enumerate(layers):
        now = own if before is None else before[index].long().cpu()
        wanted = own if order is None else order[index].long().cpu()
        move = torch.empty_like(own)
        move[now] = own  # where each stored channel stands now
        move = move[wanted]
        if not torch.equal(move, own):
            _move_layer(layer, family, move)
    if order is None:
        del model.__dict__[_ORDER]
    else:
        model.__dict__[_ORDER] = order.detach().to("cpu", torch.int32).clone()


def in_stored_order(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An adapter's tensors, as the model has them now, with channels in the order of the stored backbone."""
    order = present_order(model)
    return dict(tensors) if order is None else _renamed(model, tensors, [row.long().argsort() for row in order])


def in_present_order(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `in_stored_order`."""
    order = present_order(model)
    return dict(tensors) if order is None else _renamed(model, tensors, [row.long() for row in order])


def _renamed(model: nn.Module, tensors: Mapping[str, Tensor], moves: list[Tensor]) -> dict[str, Tensor]:
    family = family_of(model)
    moved = dict(tensors)
    for index, move in enumerate(moves):
        for path, matrix, dim in (
            (family.gate, "lora_B", 0),
            (family.up, "lora_B", 0),
            (family.ffn_output, "lora_A", 1),
        ):
            ending = f"{family.layers}.{index}.{path}.{matrix}.weight"
            for name, tensor in tensors.items():
                if name.endswith(ending):
                    moved[name] = tensor.index_select(dim, move.to(tensor.device))
    return moved


def _move_layer(layer: nn.Module, family: Family, move: Tensor) -> None:
    for path in (family.gate, family.up):
        for tensor in _rows_of(layer.get_submodule(path)):
            _move(tensor, move, 0, path)
    for tensor in _columns_of(layer.get_submodule(family.ffn_output)):
        _move(tensor, move, 1, family.ffn_output)


def _rows_of(linear: Any) -> Iterator[Tensor]:
    """What has a row for each output channel: weight, bias, and an adapter's second matrix."""
    base = getattr(linear, "base_layer", linear)
    yield base.weight
    if base.bias is not None:
        yield base.bias
    yield from (matrix.weight for matrix in getattr(linear, "lora_B", {}).values())


def _columns_of(linear: Any) -> Iterator[Tensor]:
    """What has a column for each input channel: weight, and an adapter's first matrix."""
    yield getattr(linear, "base_layer", linear).weight
    yield from (matrix.weight for matrix in getattr(linear, "lora_A", {}).values())


def _move(tensor: Tensor, move: Tensor, dim: int, path: str) -> None:
    """tensor = its slices along `dim` in the order of `move`, in the memory that it has."""
    from torch.distributed.tensor import DTensor

    if not tensor.is_floating_point() or tensor.shape[dim] != len(move):
        raise UsageError(
            f"the weights of {path} are quantised ({tensor.dtype}, {tuple(tensor.shape)}) and their channels cannot be "
            f"moved one by one; take routing.grouping=contiguous"
        )
    if isinstance(tensor, DTensor):
        _move_shard(tensor, move, dim)
        return
    tensor.data.copy_(tensor.data.index_select(dim, move.to(tensor.device)))


def _move_shard(tensor: Any, move: Tensor, dim: int) -> None:
    """The same for a weight of which every rank holds some rows: all ranks take part."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local = tensor.to_local()
    if dim == 1:  # rows are dealt, columns are whole everywhere
        local.copy_(local.index_select(1, move.to(local.device)))
        return
    mesh = tensor.device_mesh
    there = local.to(mesh.device_type)  # an offloaded part travels by way of the device, which alone talks to others
    whole = DTensor.from_local(
        there, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    ).full_tensor()
    (rows, *_), (first, *_) = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    local.copy_(whole.index_select(0, move[first : first + rows].to(whole.device)))

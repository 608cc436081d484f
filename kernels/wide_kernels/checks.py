"""What every operator demands of its arguments, refused in one sentence that names the argument and what came."""

from __future__ import annotations

import torch
from torch import Tensor

from wide_kernels.errors import UnsupportedError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def shape_of(op: str, name: str, tensor: Tensor, dims: str) -> tuple[int, ...]:
    """The sizes of a tensor that must have as many dimensions as `dims` has words, e.g. "T K"."""
    if tensor.dim() != len(dims.split()):
        raise UnsupportedError(
            f"{op}: {name} must be [{', '.join(dims.split())}], got {tensor.dim()} dimensions {list(tensor.shape)}"
        )
    return tuple(tensor.shape)


def same_kind(op: str, first: Tensor, **others: Tensor | None) -> None:
    """One floating dtype and one device for all operands."""
    if first.dtype not in FLOATS:
        raise UnsupportedError(f"{op}: operands must be floating point, got {first.dtype}")
    for name, other in others.items():
        if other is not None and other.dtype != first.dtype:
            raise UnsupportedError(f"{op}: {name} is {other.dtype}, the first operand is {first.dtype}; cast one")
        if other is not None:
            same_device(op, first, name, other)


def same_device(op: str, first: Tensor, name: str, other: Tensor) -> None:
    """Refuse mixed devices."""
    if other.device != first.device:
        raise UnsupportedError(f"{op}: {name} is on {other.device}, the first operand on {first.device}; move one")


def same_size(op: str, what: str, size: int, expected: int) -> None:
    """Two sizes that must agree; `what` says which."""
    if size != expected:
        raise UnsupportedError(f"{op}: {what} must be {expected}, got {size}")


def is_bool(op: str, **switches: object) -> None:
    """Yes or no alone: any other value, "no" too, would count as yes."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise UnsupportedError(f"{op}: {name} must be True or False, got {value!r}")


def mask_sizes(op: str, mask: Tensor, least: int = 1) -> tuple[int, int]:
    """(T, N_G) of a decision mask, which must be bool and have at least so many groups."""
    if mask.dtype is not torch.bool:
        raise UnsupportedError(f"{op}: the mask must be bool (True = execute), got {mask.dtype}")
    rows, groups = shape_of(op, "mask", mask, "T N_G")
    if groups < least:
        raise UnsupportedError(f"{op}: the mask has no groups, its shape is {list(mask.shape)}")
    return rows, groups


def group_width(op: str, what: str, size: int, groups: int) -> int:
    """Width of a group when `size` channels are cut into `groups` equal ones."""
    if groups == 0 or size % groups:
        raise UnsupportedError(f"{op}: {groups} groups do not divide {what} = {size} evenly")
    return size // groups


def strided(**operands: Tensor | None) -> tuple[str, ...]:
    """Names of the operands that are not contiguous."""
    return tuple(name for name, tensor in operands.items() if tensor is not None and not tensor.is_contiguous())


def attention_sizes(op: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int]:
    """(B, T, H_q) of q [B, T, H_q, d] after comparing it with k and v [B, T_k, H_k, d]."""
    same_kind(op, q, k=k, v=v)
    batch, tokens, heads, size = shape_of(op, "q", q, "B T H_q d")
    k_batch, keys, kv_heads, k_size = shape_of(op, "k", k, "B T_k H_k d")
    shape_of(op, "v", v, "B T_k H_k d")
    same_size(op, "B of k", k_batch, batch)
    same_size(op, "d of k", k_size, size)
    if v.shape != k.shape:
        raise UnsupportedError(f"{op}: k and v must have one shape, got {list(k.shape)} and {list(v.shape)}")
    if keys == 0:
        raise UnsupportedError(f"{op}: there are no keys, k is {list(k.shape)}")
    if kv_heads == 0 or heads % kv_heads:
        raise UnsupportedError(f"{op}: H_k = {kv_heads} KV heads do not divide H_q = {heads} query heads evenly")
    return batch, tokens, heads


def too_long_heads(size: int, limit: int = 256) -> dict[str, str]:
    """What the Triton attention kernels refuse, as `Problem.refused` wants it: a program holds whole heads."""
    return {"triton": f"head_dim must be at most {limit}, got {size}"} if size > limit else {}


def per_sequence(op: str, first: Tensor, batch: int, **positions: Tensor | None) -> None:
    """Positions are int32 or int64 [B]."""
    for name, tensor in positions.items():
        if tensor is None:
            continue
        if tensor.dtype not in (torch.int32, torch.int64):
            raise UnsupportedError(f"{op}: {name} must be int64 or int32, got {tensor.dtype}")
        same_size(op, f"the size of {name}, one entry a sequence,", shape_of(op, name, tensor, "B")[0], batch)
        same_device(op, first, name, tensor)

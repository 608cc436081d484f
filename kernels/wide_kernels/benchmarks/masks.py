"""Decisions recorded from a calibrated model: reading them, and what of their structure the kernels can use."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from wide_kernels.errors import UnsupportedError
from wide_kernels.gemm_k.segments import segment_length

HEADER_BYTES = 8  # of a safetensors file: the length of its JSON header, little-endian


def read_masks(path: Path) -> dict[str, Tensor]:
    """The bool tensors [T, N_G] of a safetensors file, by name; this package reads the format without its library."""
    try:
        content = bytearray(path.read_bytes())
        end = HEADER_BYTES + int.from_bytes(content[:HEADER_BYTES], "little")
        entries = json.loads(bytes(content[HEADER_BYTES:end]))
        found = {}
        for name, entry in entries.items():
            if name == "__metadata__" or entry["dtype"] != "BOOL" or len(entry["shape"]) != 2:
                continue
            start, stop = (end + offset for offset in entry["data_offsets"])
            found[name] = torch.frombuffer(content[start:stop], dtype=torch.bool).view(entry["shape"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise UnsupportedError(f"{path} cannot be read as a safetensors file of masks: {error}") from error
    if not found:
        raise UnsupportedError(f"{path} has no bool tensor of two dimensions; record masks as bool [T, N_G]")
    return found


def structure(mask: Tensor, tile_rows: int = 128) -> dict[str, float]:
    """Density, and the share of (tile, group) pairs that a tile of rows has to compute, in natural and sorted order.

    `constant` is the share of groups on which all rows agree; `entropy` the mean bits a decision carries.
    """
    rows, groups = mask.shape
    bits = mask.float()
    share = bits.mean(0)
    entropy = torch.special.entr(share) + torch.special.entr(1 - share)
    segment = segment_length(rows, groups)
    return {
        "density": float(share.mean()),
        "entropy": float(entropy.mean()) / 0.6931471805599453,
        "constant": float(((share == 0) | (share == 1)).float().mean()),
        "union_natural": _union(mask, tile_rows),
        "union_sorted": sum(
            _union(_gray_sorted(mask[:, first : first + segment]), tile_rows) * min(segment, groups - first)
            for first in range(0, groups, segment)
        )
        / groups,
        "segment": segment,
    }


def _union(mask: Tensor, tile_rows: int) -> float:
    """Share of groups that some row of a tile executes."""
    rows, groups = mask.shape
    padded = torch.zeros(-(-rows // tile_rows) * tile_rows, groups, dtype=torch.bool, device=mask.device)
    padded[:rows] = mask
    return float(padded.view(-1, tile_rows, groups).any(1).float().mean())


def _gray_sorted(mask: Tensor) -> Tensor:
    """Rows in Gray order of their pattern, as GEMM-K sorts them."""
    rank = (mask.long() << torch.arange(mask.shape[1], device=mask.device)).sum(1)
    for shift in (1, 2, 4):
        rank = rank ^ (rank >> shift)
    return mask[torch.argsort(rank, stable=True)]

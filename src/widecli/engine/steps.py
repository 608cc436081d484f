"""What differs between a prefill and a decode step: where tokens stand, how attention sees the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import wide_kernels as wk
from widecli.engine.cache import KVCache
from widecli.engine.fused import rotate_and_scatter, rotate_and_store
from widecli.engine.routing import Route

_LIBRARY_ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
_LIBRARY_ORDER.append(SDPBackend.MATH)


class Step(Protocol):
    """One pass of all layers over some rows; row b * tokens + t is token t of sequence b."""

    batch: int
    tokens: int
    executed: list[Tensor]
    """For every decision so far how many tokens ran each group: int [N], or the mask [B, N]."""

    def route(self, mask: Tensor) -> Route:
        """A decision as this step's operators take it; remembers what it executes."""

    def place(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotates: bool) -> Tensor:
        """Rotate q and k, store k and v: each [B, T, heads, d]; returns q."""

    def attend(self, layer: int, q: Tensor, scale: float, route: Route | None) -> Tensor:
        """Attention of q [B, T, H_q, d] against the cache; without a route dense."""


@dataclass
class PrefillStep:
    """T tokens of every sequence, from slot `begin` on; cos and sin [T, d]; `valid` bool [B * T] or None = all real."""

    cache: KVCache
    tokens: int
    begin: int
    cos: Tensor
    sin: Tensor
    valid: Tensor | None
    executed: list[Tensor] = field(default_factory=list)

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.cache.batch

    def route(self, mask: Tensor) -> Route:
        """Sort the decision; padding runs nothing."""
        layout = wk.route_layout(mask if self.valid is None else mask & self.valid[:, None])
        self.executed.append(layout.count)
        return Route(layout.mask, layout)

    def place(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotates: bool) -> Tensor:
        """See `Step`."""
        slots = self.cache.layer(layer, self.begin, self.begin + self.tokens)
        if rotates:
            return rotate_and_store(q, k, v, self.cos, self.sin, *slots)
        for slot, value in zip(slots, (k, v), strict=True):
            slot.copy_(value)
        return q

    def attend(self, layer: int, q: Tensor, scale: float, route: Route | None) -> Tensor:
        """See `Step`."""
        k, v = self.cache.layer(layer, 0, self.begin + self.tokens)
        if route is not None:
            assert route.layout is not None
            return wk.attention_prefill(q, k, v, route.layout, scale=scale)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        causal = {"is_causal": True} if self.begin == 0 else {"attn_mask": causal_lower_right(q.shape[2], k.shape[2])}
        with sdpa_kernel(_LIBRARY_ORDER, set_priority=True):
            o: Tensor = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True, **causal)
        return o.transpose(1, 2)


@dataclass
class DecodeStep:
    """One token a sequence, at slot cache.lengths[b]; cos and sin [B, d]; attention looks at `keys` slots at most."""

    cache: KVCache
    keys: int
    cos: Tensor
    sin: Tensor
    everything: Tensor  # bool [B, 1], all True: the dense decision
    executed: list[Tensor] = field(default_factory=list)
    tokens: int = 1

    def __post_init__(self) -> None:
        self._visible = self.cache.lengths + 1

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.cache.batch

    def route(self, mask: Tensor) -> Route:
        """The bare mask: for a few rows the operators need no layout."""
        self.executed.append(mask)
        return Route(mask, None)

    def place(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotates: bool) -> Tensor:
        """See `Step`."""
        caches = (self.cache.k[layer], self.cache.v[layer])
        if rotates:
            return rotate_and_scatter(q, k, v, self.cos, self.sin, *caches, self.cache.lengths)
        sequence = torch.arange(self.batch, device=q.device)
        for cache, value in zip(caches, (k, v), strict=True):
            cache[sequence, self.cache.lengths] = value[:, 0]
        return q

    def attend(self, layer: int, q: Tensor, scale: float, route: Route | None) -> Tensor:
        """See `Step`. Dense goes through the same operator: no library call takes lengths that only the device knows."""
        mask = self.everything if route is None else route.mask
        k, v = self.cache.layer(layer, 0, self.keys)
        return wk.attention_decode(q, k, v, mask, self._visible, scale)

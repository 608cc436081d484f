"""What differs between a prefill and a decode step: where tokens stand, how attention sees the cache."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import wide_kernels as wk
from widecli.engine.cache import KVCache
from widecli.engine.fused import Places, positions, rotate_and_store
from widecli.engine.routing import Route

_LIBRARY_ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
_LIBRARY_ORDER.append(SDPBackend.MATH)


class Step(ABC):
    """One pass of all layers over some rows; row b * tokens + t is token t of sequence b.

    cos and sin [rows, d] belong to the rows' positions, `slots` int64 [rows] says where their keys and values go in the
    cache's flat view. `executed` holds for every decision so far how many tokens ran each group: int [N], or the mask
    [B, N] itself.
    """

    def __init__(self, cache: KVCache, tokens: int, cos: Tensor, sin: Tensor, slots: Tensor) -> None:
        self.cache = cache
        self.tokens = tokens
        self.executed: list[Tensor] = []
        self._cos, self._sin, self._slots = cos, sin, slots

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.cache.batch

    def place(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotates: bool) -> Tensor:
        """Rotate q and k, store k and v, each [rows, heads, d]; returns q."""
        places = self.places(layer)
        if rotates:
            return rotate_and_store(q, k, v, places)
        places.k_slots.index_copy_(0, self._slots, k)
        places.v_slots.index_copy_(0, self._slots, v)
        return q

    def places(self, layer: int) -> Places:
        """Where this step's rows stand in a layer."""
        k_slots, v_slots = (cache[layer].flatten(0, 1) for cache in (self.cache.k, self.cache.v))
        return Places(self._cos, self._sin, k_slots, v_slots, self._slots)

    @abstractmethod
    def route(self, mask: Tensor) -> Route:
        """A decision as this step's operators take it; remembers what it executes."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, scale: float, route: Route | None) -> Tensor:
        """Attention of q [B, T, H_q, d] against the cache, of the same shape; without a route dense."""


class PrefillStep(Step):
    """T tokens of every sequence, from slot `begin` on; `valid` bool [B * T] or None = all are real."""

    def __init__(
        self, cache: KVCache, tokens: int, begin: int, tables: tuple[Tensor, Tensor], valid: Tensor | None
    ) -> None:
        end = begin + tokens
        cos, sin = (table[begin:end].repeat(cache.batch, 1) for table in tables)
        where = torch.arange(begin, end, device=cos.device) + cache.first_slots[:, None]
        super().__init__(cache, tokens, cos, sin, where.flatten())
        self._begin, self._end, self._valid = begin, end, valid

    def route(self, mask: Tensor) -> Route:
        """Sort the decision; padding runs nothing."""
        layout = wk.route_layout(mask if self._valid is None else mask & self._valid[:, None])
        self.executed.append(layout.count)
        return Route(layout.mask, layout)

    def attend(self, layer: int, q: Tensor, scale: float, route: Route | None) -> Tensor:
        """See `Step`. Dense is the library's: plainly causal, because padding stands on the right."""
        k, v = self.cache.k[layer][:, : self._end], self.cache.v[layer][:, : self._end]
        if route is not None:
            return wk.attention_prefill(q, k, v, **route.arguments, scale=scale)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        causal = {"is_causal": True} if self._begin == 0 else {"attn_mask": causal_lower_right(self.tokens, self._end)}
        with sdpa_kernel(_LIBRARY_ORDER, set_priority=True):
            o: Tensor = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True, **causal)
        return o.transpose(1, 2)


class DecodeStep(Step):
    """One token a sequence, at position cache.lengths[b]; attention looks at no more than `keys` slots."""

    def __init__(self, cache: KVCache, keys: int, tables: tuple[Tensor, Tensor]) -> None:
        cos, sin, slots, self._visible = positions(cache.lengths, cache.first_slots, tables)
        super().__init__(cache, 1, cos, sin, slots)
        self._keys = keys

    def route(self, mask: Tensor) -> Route:
        """The bare mask: for a few rows the operators need no layout."""
        self.executed.append(mask)
        return Route(mask)

    def attend(self, layer: int, q: Tensor, scale: float, route: Route | None) -> Tensor:
        """See `Step`. Dense goes through the same operator: no library call takes lengths only the device knows."""
        mask = self.cache.everything if route is None else route.mask
        k, v = self.cache.k[layer][:, : self._keys], self.cache.v[layer][:, : self._keys]
        return wk.attention_decode(q, k, v, mask, self._visible, scale)

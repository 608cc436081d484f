"""One decoder layer on the residual stream: attention, then the gated MLP, each dense or routed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

import wide_kernels as wk
from widecli.engine.compensation import StandIn
from widecli.engine.dense_rows import adds_one_row, one_row, project_row, takes_one_row
from widecli.engine.fused import activate_gate, normalise, project_and_store
from widecli.engine.ranges import within
from widecli.engine.routing import Decision, Reduction, Route
from widecli.engine.steps import Step
from widecli.engine.weights import LayerWeights, Linear, ModelWeights, Norm
from widecli.model.plan import PartName

_NOTHING: Mapping[PartName, StandIn] = MappingProxyType({})

DENSE_QUERIES = range(8, 1024)
"""Rows of which nearly every group of queries is run by some, too few to skip the rest in tiles.

One dense product with the keys and values is then faster (8 rows of Llama-3.1-8B, H200: 15.5 us a layer against 27);
attention still reads only the queries that run.
"""

DENSE_PROJECTIONS = range(129, 1025)
"""Rows of which GEMM-K's tiles hold too few to gain: a dense product of its whole input is then faster.

The operators before it leave exact zeros in the groups that a row skips (1024 rows of Llama-3.1-8B, H200, half
skipped: down 152 us a layer against 174, O 48 against 63). Zero times a weight that is not finite is not zero, so such
weights are passed over as always.
"""
NARROW = 1024
"""Hidden size below which the same holds for any larger number of rows, too.

Adding partial sums then costs more than the products that it spares (16384 rows of SmolLM2, hidden size 576, its own
masks at S = 0.5, H200: 44 us against 75 to 103).
"""


class Layer:
    """Runs one layer. `attention` and `ffn` are its decisions, None = that part is dense.

    `shared`: the attention's decision serves the FFN too (layer mode). `always`: groups that keys and values make
    behind those of the queries. `stand_ins`: by part, what is added for the groups that a row skips; `reduction`: what
    reads for the FFN's bypass where the FFN takes no decision.
    """

    def __init__(
        self,
        index: int,
        model: ModelWeights,
        attention: Decision | None = None,
        ffn: Decision | None = None,
        shared: bool = False,
        library: bool = False,
        stand_ins: Mapping[PartName, StandIn] = _NOTHING,
        reduction: Reduction | None = None,
    ) -> None:
        self.index = index
        self.weights: LayerWeights = model.layers[index]
        self.activation = model.activation
        self.scale = model.scale
        self.attention = attention
        self.ffn = ffn
        self.shared = shared
        self._library = library
        self.stand_ins = stand_ins
        self.reduction = reduction
        shape = model.shape
        self._heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)
        width = shape.num_attention_heads * shape.head_dim
        self._q = self.weights.qkv.rows(0, width)
        self._kv = self.weights.qkv.rows(width, self.weights.qkv.weight.shape[0])
        # the rows of keys and values, in groups of the queries' width; 0 where they make no whole number of them
        groups, rest = (0, 0) if attention is None else divmod(len(self._kv.weight), width // attention.groups)
        self.always = 0 if rest else groups
        self._gate = self.weights.gate_up.rows(0, shape.intermediate_size)
        self._up = self.weights.gate_up.rows(shape.intermediate_size, 2 * shape.intermediate_size)

    def run(self, x: Tensor, step: Step) -> Tensor:
        """x [rows, D] -> [rows, D]; x may be overwritten."""
        x, route = self._attend(x, step)
        return self._feed_forward(x, step, route)

    def _attend(self, x: Tensor, step: Step) -> tuple[Tensor, Route | None]:
        heads, _, size = self._heads
        normalised, route = self._decide(x, step, "attention", self.attention, self.weights.attention_norm)
        if self._at_once(x):
            with within("qkv"):
                mask = step.cache.nothing if route is None else route.mask
                width = heads * size // max(1, mask.shape[1])
                q = project_and_store(normalised, self.weights.qkv, mask, width, self._heads, step.places(self.index))
        else:
            q = self._queries(normalised, step, route)
        with within("attention"):
            q = q.view(step.batch, step.tokens, heads, size)
            o = step.attend(self.index, q, self.scale, route).reshape(len(x), heads * size)
        with within("o"):
            return self._add(x, o, "attention", route, step), route

    def _at_once(self, x: Tensor) -> bool:
        """Whether queries, keys and values take one launch together with their rotation and the cache."""
        norms = self.weights.query_norm is not None or self.weights.key_norm is not None
        return self._by_our_own(x) and self.weights.rotates and not norms

    def _queries(self, x: Tensor, step: Step, route: Route | None) -> Tensor:
        """Rotated queries [rows, H_q, d] of the normalised x; keys and values go into the cache."""
        heads, kv_heads, size = self._heads
        with within("qkv"):
            # One row waits for launches: keys and values, which nobody skips, then come with the queries.
            together = route is not None and len(x) == 1 and self.always > 0
            if route is None or together or len(x) in DENSE_QUERIES:
                if route is not None and together:
                    qkv = self.weights.qkv
                    parts = wk.gemm_mn(x, qkv.weight, bias=qkv.bias, mask=route.mask, always=self.always)
                else:
                    parts = self._project(x, self.weights.qkv, step)
                q, k, v = torch.split(parts, [heads * size, kv_heads * size, kv_heads * size], -1)
            else:
                q = wk.gemm_mn(x, self._q.weight, bias=self._q.bias, **route.arguments)
                k, v = self._project(x, self._kv, step).chunk(2, -1)
        with within("rope_cache"):
            q, k, v = (part.view(len(x), -1, size) for part in (q, k, v))
            if self.weights.query_norm is not None:
                q = normalise(q, self.weights.query_norm)
            if self.weights.key_norm is not None:
                k = normalise(k, self.weights.key_norm)
            return step.place(self.index, q, k, v, self.weights.rotates)

    def _feed_forward(self, x: Tensor, step: Step, attention_route: Route | None) -> Tensor:
        if self.shared:
            with within("norm_route"):
                normalised, route = self._follow(x, attention_route)
        else:
            normalised, route = self._decide(x, step, "ffn", self.ffn, self.weights.ffn_norm)
        with within("gate_up"):
            hidden = self._gated_whole(normalised, step) if route is None else self._gated(normalised, route)
        with within("down"):
            return self._add(x, hidden, "ffn", route, step)

    def _by_our_own(self, x: Tensor) -> bool:
        """Whether dense products are made by the routed ones' kernels with nothing skipped, see `dense_rows`."""
        return one_row(x) and not self._library and self._taken

    @cached_property
    def _taken(self) -> bool:
        """Whether Triton takes one row of all of this layer's products; asked when the first row comes."""
        weights = self.weights
        whole = takes_one_row(weights.qkv.weight, self._gate.weight)
        return whole and adds_one_row(weights.o.weight, weights.down.weight)

    def _project(self, x: Tensor, linear: Linear, step: Step) -> Tensor:
        return project_row(x, linear, step.cache) if self._by_our_own(x) else F.linear(x, linear.weight, linear.bias)

    def _add(self, x: Tensor, h: Tensor, part: PartName, route: Route | None, step: Step) -> Tensor:
        """x + the part's last product of h, with a route over the executed groups of h and with what stands in for the
        others; may overwrite x.

        The mask of a route, and what a bypass has read, are older than the launch before this one, which made h.
        """
        linear = self.weights.o if part == "attention" else self.weights.down
        if linear.bias is not None:
            x = x.add_(linear.bias)
        if route is not None:
            stand_in = self.stand_ins[part].beside(route.reduced) if part in self.stand_ins else None
            if not self.projects_whole(len(x)):
                return wk.gemm_k(h, linear.weight, residual=x, stand_in=stand_in, early=True, **route.arguments)
            if stand_in is not None:
                x = wk.compensate(x, stand_in, **route.arguments)
        elif self._by_our_own(x):
            return wk.gemm_k(h, linear.weight, residual=x, mask=step.cache.everything[:1], early=True)
        return x.addmm_(h, linear.weight.t())

    def projects_whole(self, rows: int) -> bool:
        """Whether O and down take all of their inputs, of which skipped groups are zeros."""
        narrow = self.weights.down.weight.shape[0] < NARROW and rows >= DENSE_PROJECTIONS.start
        return (rows in DENSE_PROJECTIONS or narrow) and self._finite

    @cached_property
    def _finite(self) -> bool:
        """Of the weights that whole inputs meet; looked at when the first do, in a run before any is recorded."""
        return bool(self.weights.o.weight.isfinite().all() & self.weights.down.weight.isfinite().all())

    def _gated(self, x: Tensor, route: Route) -> Tensor:
        gate, up = self._gate, self._up
        if gate.bias is None:
            return wk.gated_mlp_up(x, gate.weight, up.weight, activation=self.activation, **route.arguments)
        hidden = wk.gemm_mn(x, gate.weight, bias=gate.bias, activation=self.activation, **route.arguments)
        return hidden * wk.gemm_mn(x, up.weight, bias=up.bias, **route.arguments)

    def _gated_whole(self, x: Tensor, step: Step) -> Tensor:
        gate, up = self._gate, self._up
        if gate.bias is None and self._by_our_own(x):
            nothing = step.cache.nothing
            return wk.gated_mlp_up(
                x, gate.weight, up.weight, activation=self.activation, mask=nothing, always=1, early=True
            )
        return activate_gate(self._project(x, self.weights.gate_up, step), self.activation)

    def _decide(
        self, x: Tensor, step: Step, part: PartName, decision: Decision | None, norm: Norm
    ) -> tuple[Tensor, Route | None]:
        """(normalised x, the route)."""
        with within("norm_route"):
            if decision is None:
                return normalise(x, norm), None
            normalised, mask, reduced = decision.take(x)
            return normalised, replace(step.route(mask), reduced=reduced)

    def _follow(self, x: Tensor, route: Route | None) -> tuple[Tensor, Route | None]:
        """(normalised x, the route) of an FFN that follows the decision of the attention before it."""
        if self.reduction is None or route is None:
            return normalise(x, self.weights.ffn_norm), None if route is None else replace(route, reduced=None)
        normalised, reduced = self.reduction.take(x)
        return normalised, replace(route, reduced=reduced)

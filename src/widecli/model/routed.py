"""Routing on top of an unmodified Hugging Face causal LM.

`attach` hangs four hooks on each decoder layer and changes nothing else: a pre-hook on each of the two norms reads the
residual stream and takes the decision, a pre-hook on `o_proj` and on `down_proj` masks their input group by group.
Where the plan compensates for what is skipped, a hook behind each norm reads the part's input and one behind `o_proj`
and `down_proj` adds to their output. Attention, caches, position ids, padding, parameter names and `save_pretrained`
stay the backbone's own.

The hooks are module-level functions that find their layer's `Decision` on the hooked module. This keeps them identical
for all layers, so that compiling one decoder layer (`RoutedModel.compile_layers`) serves every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from widecli.model.channel_order import arrange, refuse_disorder
from widecli.model.compensation import Compensation, build_compensations, each_compensation
from widecli.model.families import Family, family_of
from widecli.model.gate import Gumbel, argmax_gate, gumbel_gate, margins
from widecli.model.plan import PARTS, LayerPlan, ModelShape, PartName, RoutingPlan
from widecli.model.router import Router
from widecli.model.trace import RoutingTrace

_ATTRIBUTE = "wide_decision"
_SUBSTITUTE = "wide_substitute"


class Decision:
    """One router's decision in the pass that runs now: its inputs (noise, temperature) and its mask [B, T, N]."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.active = True
        self.noise: Tensor | None = None
        self.temperature: Tensor | None = None
        self.mask: Tensor | None = None
        self.probing: Literal["no", "open", "routed"] = "no"
        self.probe: Tensor | None = None  # while probing: the mask as a leaf whose gradient is wanted

    def take(self, x: Tensor) -> None:
        """Decide for the residual `x` [B, T, D]."""
        z = margins(self.router(x))
        if self.probing != "no":
            # a leaf: the backward pass leaves dLoss/dmask there, the first-order worth of each group for each token
            mask = torch.ones_like(z) if self.probing == "open" else argmax_gate(z).float()
            self.mask = self.probe = mask.detach().requires_grad_(torch.is_grad_enabled())
            return
        if self.noise is None or self.temperature is None:
            self.mask = argmax_gate(z)
        else:
            self.mask = gumbel_gate(z, self.temperature, self.noise)


class Substitute:
    """One part's compensation in the pass that runs now: `reduced` is A n [B, T, r], what its bypass has read."""

    def __init__(self, compensation: Compensation, decision: Decision) -> None:
        self.compensation = compensation
        self.decision = decision
        self.reduced: Tensor | None = None


def _decide(module: nn.Module, args: tuple[Tensor, ...]) -> None:
    decision = cast(Decision, getattr(module, _ATTRIBUTE))
    if decision.active:
        decision.take(args[0])


def _apply(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
    decision = cast(Decision, getattr(module, _ATTRIBUTE))
    if not decision.active or decision.mask is None:
        return None
    return (mask_groups(args[0], decision.mask),)


def _reduce(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
    substitute = cast(Substitute, getattr(module, _SUBSTITUTE))
    if substitute.decision.active:
        substitute.reduced = substitute.compensation.reduced(output)


def _substitute(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    substitute = cast(Substitute, getattr(module, _SUBSTITUTE))
    mask = substitute.decision.mask
    if not substitute.decision.active or mask is None:
        return None
    added: Tensor = substitute.compensation(mask, substitute.reduced, output.dtype)
    return output + added


def mask_groups(x: Tensor, mask: Tensor) -> Tensor:
    """Zero the skipped groups: x [..., N * size], mask [..., N] -> x's shape. Non-finite values are zeroed too."""
    grouped = x.reshape(*x.shape[:-1], mask.shape[-1], -1)
    if mask.dtype == torch.bool:
        # not a product: 0 * inf is NaN, and a skipped group may hold anything
        return grouped.masked_fill(~mask.unsqueeze(-1), 0).flatten(-2)
    return (grouped * mask.unsqueeze(-1).to(x.dtype)).flatten(-2)


class RoutedModel:
    """A causal LM whose tokens choose their groups; calling the backbone itself routes with argmax.

    Attributes: `backbone` (the Hugging Face model), `plan`, `shape`, `layers` (group counts), `routers` (an
    `nn.ModuleDict` keyed `"<layer>"`, each with the routers of its parts, or `shared` in layer mode), `decisions` (by
    layer and part).
    """

    def __init__(self, backbone: nn.Module, plan: RoutingPlan, seed: int = 0) -> None:
        self.backbone = backbone
        self.family: Family = family_of(backbone)
        self.shape = ModelShape.from_config(cast(Any, backbone).config)
        plan.validate(self.shape)
        arrange(backbone, None)  # whatever an earlier attachment left behind
        self.plan = plan
        self.layers: tuple[LayerPlan, ...] = plan.layers(self.shape)
        self.routers = build_routers(plan, self.shape, seed)
        self.compensations = build_compensations(plan, self.shape, seed)
        self._handles: list[RemovableHandle] = []
        self._traces: list[RoutingTrace] = []
        self._valid: Tensor | None = None
        self.decisions: dict[tuple[int, PartName], Decision] = {}
        self.substitutes: dict[tuple[int, PartName], Substitute] = {}
        self._install()

    @classmethod
    def attach(cls, backbone: nn.Module, plan: RoutingPlan, seed: int = 0) -> RoutedModel:
        """Hang routers with a random start (drawn from `seed`) on `backbone`, on its device. One attachment at a time.

        Attach after PEFT has wrapped the linear layers, so that the adapter sees the masked input too.
        """
        return cls(backbone, plan, seed)

    def regroup(self, order: Tensor | None, where: str = "this order") -> None:
        """Put the FFN's channels in this order, int32 [L, D'] (None = as stored), in the backbone's own weights.

        `order[l, i]` is the stored channel that comes to place i of layer l. Raises UsageError, naming `where` it came
        from, for what is no permutation of this model's channels.
        """
        if order is not None:
            refuse_disorder(order, self.shape, where)
        arrange(self.backbone, order)

    def detach(self) -> None:
        """Remove every hook. The backbone computes what it did; its FFN channels keep the order that they are in."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in self.backbone.modules():
            module.__dict__.pop(_ATTRIBUTE, None)
            module.__dict__.pop(_SUBSTITUTE, None)

    @property
    def decoder(self) -> nn.Module:
        """The stack of layers, without the LM head."""
        return self.backbone.get_submodule(self.family.decoder)

    @property
    def lm_head(self) -> nn.Linear:
        """The output projection (its weight may be tied to the embedding)."""
        return cast(nn.Linear, self.backbone.get_submodule(self.family.lm_head))

    def decoder_layers(self) -> nn.ModuleList:
        """The Hugging Face decoder layers."""
        return cast(nn.ModuleList, self.backbone.get_submodule(self.family.layers))

    def part_modules(self, layer: nn.Module, part: PartName) -> tuple[nn.Module, nn.Linear]:
        """The norm that reads a part's residual, and the linear layer whose input the part masks."""
        names = self.family
        paths = (names.attention_norm, names.attention_output)
        if part == "ffn":
            paths = (names.ffn_norm, names.ffn_output)
        return layer.get_submodule(paths[0]), cast(nn.Linear, layer.get_submodule(paths[1]))

    @property
    def total_groups(self) -> int:
        """Decisions one token takes in all layers together: the width of the noise."""
        return sum(d.router.groups for d in self._unique_decisions())

    def parts_of(self, decision: Decision) -> list[PartName]:
        """The parts a decision serves: one, or both in layer mode."""
        return [part for (_, part), d in self.decisions.items() if d is decision]

    def _unique_decisions(self) -> list[Decision]:
        return list(dict.fromkeys(self.decisions.values()))

    def _install(self) -> None:
        decoder = self.decoder
        if any(_ATTRIBUTE in m.__dict__ for m in decoder.modules()):
            raise RuntimeError("this backbone already carries routers; detach them first")
        device = next(decoder.parameters()).device
        self.routers.to(device)
        compensations = each_compensation(self.compensations.to(device))
        for index, (layer, plan) in enumerate(zip(self.decoder_layers(), self.layers, strict=True)):
            if plan.attention_groups == plan.ffn_groups == 0:
                continue
            routers = cast(nn.ModuleDict, self.routers[str(index)])
            shared = Decision(cast(Router, routers["shared"])) if plan.shared else None
            for part in PARTS:
                if plan.groups(part) == 0:
                    continue
                decision = shared or Decision(cast(Router, routers[part]))
                self.decisions[index, part] = decision
                norm, output = self.part_modules(layer, part)
                if part == "attention" or not plan.shared:
                    self._hook(norm, _decide, decision)
                self._hook(output, _apply, decision)
                if (index, part) in compensations:
                    self._compensate(index, part, norm, output, compensations[index, part])
        self._handles.append(decoder.register_forward_pre_hook(self._begin, with_kwargs=True))
        self._handles.append(decoder.register_forward_hook(self._finish))

    def _hook(self, module: nn.Module, hook: Any, decision: Decision) -> None:
        module.__dict__[_ATTRIBUTE] = decision  # past nn.Module.__setattr__: routers must not become the backbone's
        self._handles.append(module.register_forward_pre_hook(hook))

    def _compensate(
        self, index: int, part: PartName, norm: nn.Module, output: nn.Module, compensation: Compensation
    ) -> None:
        substitute = Substitute(compensation, self.decisions[index, part])
        self.substitutes[index, part] = substitute
        for module in (norm, output):
            module.__dict__[_SUBSTITUTE] = substitute
        if compensation.rank:
            self._handles.append(norm.register_forward_hook(_reduce))
        self._handles.append(output.register_forward_hook(_substitute))

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if tokens is None:
            tokens = kwargs.get("inputs_embeds")
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        self._valid = None
        if isinstance(mask, Tensor) and mask.dim() == 2 and tokens is not None:
            self._valid = mask[:, -tokens.shape[1] :].bool()  # with a cache, the mask covers past tokens too

    def _finish(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        masks = {key: d.mask for key, d in self.decisions.items() if d.active and d.mask is not None}
        for trace in self._traces:
            trace.add_pass(masks, self._valid)
        # A mask that outlived its pass would be applied to another one's tokens, and keeps memory.
        for decision in self._unique_decisions():
            decision.mask = None
        for substitute in self.substitutes.values():
            substitute.reduced = None

    @contextmanager
    def tracing(self, keep_masks: bool = False) -> Iterator[RoutingTrace]:
        """Collect what every forward pass inside the block decides."""
        trace = RoutingTrace(self.shape, self.plan.rank, self.layers, keep_masks, self.plan.compensation)
        self._traces.append(trace)
        try:
            yield trace
        finally:
            self._traces.remove(trace)

    @contextmanager
    def dense(self) -> Iterator[None]:
        """Run the backbone dense inside the block."""
        decisions = self._unique_decisions()
        before = [d.active for d in decisions]
        for decision in decisions:
            decision.active = False
        try:
            yield
        finally:
            for decision, active in zip(decisions, before, strict=True):
                decision.active = active

    @contextmanager
    def probing(self, open_gates: bool) -> Iterator[None]:
        """Make every mask a leaf tensor, so that a backward pass inside the block leaves `decision.probe.grad`.

        Masks are all ones (`open_gates`) or what the routers decide.
        """
        decisions = self._unique_decisions()
        for decision in decisions:
            decision.probing = "open" if open_gates else "routed"
        try:
            yield
        finally:
            for decision in decisions:
                decision.probing, decision.probe = "no", None

    @torch.no_grad()
    def feature_scales(self, ids: Tensor, valid: Tensor | None) -> dict[Decision, Tensor]:
        """Root mean square of every channel that each router reads [D], over the dense model's pass of `ids` [B, T]."""
        scales: dict[Decision, Tensor] = {}
        handles = []
        for (index, part), decision in self.decisions.items():
            norm, _ = self.part_modules(self.decoder_layers()[index], part)

            def read(_: nn.Module, args: tuple[Tensor, ...], decision: Decision = decision) -> None:
                x = args[0].flatten(0, 1) if valid is None else args[0][valid]
                scales.setdefault(decision, decision.router.features(x).square().mean(0).sqrt().clamp_min(1e-6))

            handles.append(norm.register_forward_pre_hook(read))
        with self.dense():
            self.decoder(input_ids=ids, attention_mask=valid, use_cache=False)
        for handle in handles:
            handle.remove()
        return scales

    def set_gate(self, gumbel: Gumbel | None) -> None:
        """Decide by hard Gumbel-softmax with these inputs, or by argmax (None), from the next pass on.

        It stays in force until the next call: activation checkpointing runs layers again during the backward pass and
        must find the same noise.
        """
        offset = 0
        for decision in self._unique_decisions():
            if gumbel is None:
                decision.noise = decision.temperature = None
                continue
            width = decision.router.groups
            # contiguous: a compiled layer then sees the same strides whichever slice it is given
            decision.noise = gumbel.noise[..., offset : offset + width].contiguous()
            decision.temperature = gumbel.temperature
            offset += width

    @contextmanager
    def compiled_layers(self, enabled: bool, *, checkpointing: bool = False, **options: Any) -> Iterator[None]:
        """Compile the decoder layers inside the block, our hooks included. One graph serves all layers of a plan.

        `checkpointing` runs them again in the backward pass instead of keeping what is between. It goes around the
        compiled code: inside, where Hugging Face's own has come to stand, it would break the graph at every decision.
        What gathers a sharded layer's weights hooks on the layer itself and stays outside of both. Outside of the block
        layers run eager: evaluation has many shapes, and each would cost a compilation.
        """
        layers: list[Any] = list(self.decoder_layers())
        with ExitStack() as stack:
            if enabled:
                # frozen embeddings give layer 0 an input without gradient, which would cost a second graph
                stack.enter_context(self._embeddings_with_gradient())
            for layer in layers:
                if enabled:
                    layer.forward = torch.compile(layer.forward, **options)
                if checkpointing:
                    layer.forward = _checkpointed(layer.forward)
                if enabled or checkpointing:
                    stack.callback(layer.__dict__.pop, "forward")
            yield

    @contextmanager
    def _embeddings_with_gradient(self) -> Iterator[None]:
        embedding = cast(Any, self.backbone).get_input_embeddings()
        handle = embedding.register_forward_hook(_require_grad)
        try:
            yield
        finally:
            handle.remove()

    def parameters(self) -> list[nn.Parameter]:
        """What routing adds to the backbone: the routers' parameters and the compensations'."""
        return [*self.routers.parameters(), *self.compensations.parameters()]


def _require_grad(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    # the re-entrant kind would lose the gradient of the masks, which leave the layer on the side
    def again_in_the_backward_pass(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return again_in_the_backward_pass


def build_routers(plan: RoutingPlan, shape: ModelShape, seed: int = 0) -> nn.ModuleDict:
    """All routers of a plan with a random start, keyed `"<layer>"` and then by part (`shared` in layer mode)."""
    generator = torch.Generator().manual_seed(seed)
    routers = nn.ModuleDict()
    for index, layer in enumerate(plan.layers(shape)):
        parts: dict[str, int] = {"shared": 1} if layer.shared else {p: n for p in PARTS if (n := layer.groups(p))}
        if not parts:
            continue
        made = nn.ModuleDict()
        for name, groups in parts.items():
            router = Router(shape.hidden_size, groups, plan.rank, plan.tap)
            router.reset(generator)
            made[name] = router
        routers[str(index)] = made
    return routers

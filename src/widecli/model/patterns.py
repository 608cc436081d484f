"""Codebooks of width patterns: a token runs the pattern of its layer that its router scores best.

For margins z (gate.py) a pattern p of zeros and ones scores `z . (2 p - 1)`: linear in the router's output, so all
scores together are one [N x C] product. A codebook with every possible pattern decides like independent bits.

Training samples by the Gumbel-max of `score / 2`: with every possible pattern that is exactly the distribution of
independent bits, and so one temperature schedule serves both. `noise_scale` divides the scores further: with few
patterns, neighbours differ in many bits, their scores lie far apart, and noise of that size rarely tries another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from widecli.errors import UsageError
from widecli.model.plan import PARTS, CodebookSize, LayerPlan

LATENT_START = 0.1  # AdamW moves a latent by about the learning rate a step: 2e-3 flips a bit within 50 steps
_ENUMERABLE_GROUPS = 16


class Codebook(nn.Module):
    """Patterns `bits` bool [segments, count, width] of one part of one layer; a gate as `gate.Gate` says.

    Learned patterns have a `latent` of the same shape, fp32: a bit is set where it is not negative.
    """

    def __init__(self, size: CodebookSize) -> None:
        super().__init__()
        self.size = size
        self.noise_width = size.segments * size.count
        self.noise_scale = 1.0
        self.register_buffer("stored", torch.ones(size.segments, size.count, size.width, dtype=torch.bool))
        self.stored: Tensor
        self.register_buffer("segment", torch.arange(size.segments), persistent=False)
        self.segment: Tensor
        self.latent: nn.Parameter | None = None
        if size.complete:
            self.stored.copy_(every_pattern(size.width).expand_as(self.stored))

    @property
    def bits(self) -> Tensor:
        """The patterns, bool [segments, count, width]."""
        return self.stored if self.latent is None else self.latent >= 0

    @torch.no_grad()
    def set_bits(self, bits: Tensor) -> None:
        """Replace the patterns; learned ones start anew from them."""
        self.stored.copy_(bits)
        if self.latent is not None:
            self.latent.copy_((2.0 * self.stored - 1) * LATENT_START)

    def learn(self) -> None:
        """Let training change the patterns; a codebook that has them all stays as it is."""
        if self.latent is None and not self.size.complete:
            self.latent = nn.Parameter((2.0 * self.stored - 1) * LATENT_START)

    def reset(self, generator: torch.Generator) -> None:
        """Random patterns, the first of each segment dense; drawn on the CPU."""
        if self.size.complete:
            return
        for segment in range(self.size.segments):
            self.stored[segment] = random_patterns(self.size.count, self.size.width, generator)

    def _weights(self) -> Tensor:
        """The patterns as fp32 zeros and ones, with a straight-through gradient to learned ones."""
        hard = self.bits.float()
        if self.latent is None:
            return hard
        soft = torch.sigmoid(self.latent)
        return hard + (soft - soft.detach())

    def scores(self, z: Tensor) -> Tensor:
        """`z . (2 p - 1)` for every pattern: z [..., N] -> fp32 [..., segments, count], outside any autocast."""
        return self._scores(z, self._weights())

    def _scores(self, z: Tensor, weights: Tensor) -> Tensor:
        with torch.autocast(z.device.type, enabled=False):
            parts = z.float().reshape(*z.shape[:-1], self.size.segments, self.size.width)
            return torch.einsum("...sw,scw->...sc", parts, 2 * weights - 1)

    def choose(self, z: Tensor) -> Tensor:
        """The best pattern's number in each segment: z [..., N] -> int64 [..., segments]."""
        return self.scores(z).argmax(-1)

    def decide(self, z: Tensor) -> Tensor:
        """The bits of the best patterns: z [..., N] -> bool [..., N]."""
        return self.bits[self.segment, self.choose(z)].flatten(-2)

    def sample(self, z: Tensor, temperature: Tensor, noise: Tensor) -> Tensor:
        """Hard Gumbel-softmax over the patterns, straight-through: z [..., N], noise [..., noise_width] -> [..., N]."""
        with torch.autocast(z.device.type, enabled=False):
            weights = self._weights()
            # -log(-log u) from the logistic log(u / (1 - u))
            gumbel = -F.softplus(-noise).log().reshape(*noise.shape[:-1], self.size.segments, self.size.count)
            perturbed = self._scores(z, weights) / (2 * self.noise_scale) + gumbel
            soft = torch.softmax(perturbed / temperature, -1)
            hard = F.one_hot(perturbed.argmax(-1), self.size.count).to(soft.dtype)
            # the bracket is exactly 0 and the product has one term, so values are exactly 0 or 1
            pick = hard + (soft - soft.detach())
            return torch.einsum("...sc,scw->...sw", pick, weights).flatten(-2)

    def probability(self, z: Tensor) -> Tensor:
        """The chance that a sample runs each group: z [..., N] -> [..., N]."""
        weights = self._weights()
        chances = torch.softmax(self._scores(z, weights) / (2 * self.noise_scale), -1)
        # rounding can carry a sum of chances past 1, where an entropy is infinite
        return torch.einsum("...sc,scw->...sw", chances, weights).flatten(-2).clamp(0, 1)


def every_pattern(width: int) -> Tensor:
    """All patterns of `width` groups, bool [2^width, width], from dense to empty: at a tie the fuller one is first."""
    numbers = torch.arange(2**width - 1, -1, -1)
    return (numbers.unsqueeze(-1) >> torch.arange(width - 1, -1, -1)) % 2 == 1


def random_patterns(count: int, width: int, generator: torch.Generator) -> Tensor:
    """`count` different patterns, bool [count, width], the first dense."""
    if width <= _ENUMERABLE_GROUPS:
        others = 1 + torch.randperm(2**width - 1, generator=generator)[: count - 1]
        return every_pattern(width)[torch.cat([torch.zeros(1, dtype=torch.int64), others])]
    drawn = torch.rand(count, width, generator=generator) < 0.5
    drawn[0] = True
    return drawn


def build_codebooks(layers: Sequence[LayerPlan], seed: int = 0) -> nn.ModuleDict:
    """The codebooks of a plan's layers with random patterns, keyed `"<layer>"` and then by part."""
    generator = torch.Generator().manual_seed(seed)
    codebooks = nn.ModuleDict()
    for index, layer in enumerate(layers):
        made = nn.ModuleDict()
        for part in PARTS:
            if size := layer.codebook(part):
                made[part] = codebook = Codebook(size)
                codebook.reset(generator)
        if len(made):
            codebooks[str(index)] = made
    return codebooks


def each_codebook(codebooks: nn.ModuleDict) -> dict[str, Codebook]:
    """The codebooks by `"<layer>.<part>"`."""
    return {name: module for name, module in codebooks.named_modules() if isinstance(module, Codebook)}


def tensors(codebooks: nn.ModuleDict) -> dict[str, Tensor]:
    """What `patterns.safetensors` holds: `<layer>.<part>.bits`, and `.latent` where patterns are learned."""
    found: dict[str, Tensor] = {}
    for name, codebook in each_codebook(codebooks).items():
        found[f"{name}.bits"] = codebook.bits.detach().cpu().contiguous()
        if codebook.latent is not None:
            found[f"{name}.latent"] = codebook.latent.detach().cpu().contiguous()
    return found


@torch.no_grad()
def fill(codebooks: nn.ModuleDict, found: Mapping[str, Tensor], path: Path) -> None:
    """Take over the patterns of a file, exactly. Raises UsageError naming what is missing, unexpected or misshaped."""
    ours = each_codebook(codebooks)
    expected = {f"{name}.bits": codebook.stored for name, codebook in ours.items()}
    latents = {f"{name}.latent" for name in ours}
    problems = [f"missing {name}" for name in sorted(expected.keys() - found.keys())]
    problems += [f"unexpected {name}" for name in sorted(found.keys() - expected.keys() - latents)]
    for name in sorted(found.keys() & (expected.keys() | latents)):
        tensor, like = found[name], expected[f"{name.rsplit('.', 1)[0]}.bits"]
        dtype = torch.bool if name in expected else torch.float32
        if tensor.shape != like.shape or tensor.dtype != dtype:
            has, wants = f"{tensor.dtype} {tuple(tensor.shape)}", f"{dtype} {tuple(like.shape)}"
            problems.append(f"{name} is {has} instead of {wants}")
    if problems:
        raise UsageError(f"{path} does not fit its own plan: " + "; ".join(problems[:6]))
    for name, codebook in ours.items():
        codebook.set_bits(found[f"{name}.bits"])
        if codebook.latent is not None and f"{name}.latent" in found:
            codebook.latent.copy_(found[f"{name}.latent"])


def parameters(codebooks: nn.ModuleDict) -> dict[str, nn.Parameter]:
    """The learned patterns by `patterns.<layer>.<part>.latent`; none where patterns are fixed or fitted."""
    return {f"patterns.{name}": p for name, p in codebooks.named_parameters()}

"""Patterns from margins: what a calibrated router decides bit by bit, with few different decisions.

Lloyd's iterations as in k-means: every token takes the pattern that scores best, every pattern becomes the sign of its
tokens' summed margins, which is the best pattern for them. Neither step lowers the sum of the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from widecli.errors import UsageError
from widecli.model.patterns import Codebook
from widecli.model.plan import PARTS, PartName
from widecli.model.routed import Decision, RoutedModel
from widecli.model.thresholds import Batch, Margins, Solver, collect_margins, common_shift, meet, rows, skipped_share

ROUNDS = 15
MATCH_PASSES = 3
Match = Literal["global", "layer", "none"]


@torch.no_grad()
def lloyd(
    z: Tensor, count: int, generator: torch.Generator, rounds: int = ROUNDS, start: Tensor | None = None
) -> Tensor:
    """`count` patterns for margins z [n, w], bool [count, w]; from `start` [count, w], else from tokens' bits.

    A pattern that no token takes is seeded anew with the bits of the tokens that lose most. Raises UsageError for more
    patterns than tokens.
    """
    tokens, width = z.shape
    if count > tokens:
        raise UsageError(f"{count} patterns cannot be found in {tokens} tokens; read more text, or ask for fewer")
    z = z.float()
    best_possible = z.abs().sum(-1)
    if start is None:
        start = _first_patterns(z, count, generator)
    patterns = start.clone()
    for _ in range(rounds):
        score, taken = (z @ (2.0 * patterns - 1).T).max(-1)
        sums = z.new_zeros(count, width).index_add_(0, taken, z)
        used = torch.bincount(taken, minlength=count) > 0
        updated = torch.where(used.unsqueeze(-1), sums >= 0, patterns)
        _reseed(updated, used, z, best_possible - score)
        if torch.equal(updated, patterns):
            break
        patterns = updated
    return patterns


def _first_patterns(z: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Bits of random tokens, each drawn by how much it loses with those before it (as k-means++ does)."""
    draws = torch.rand(count, generator=generator, dtype=torch.float64).to(z.device)
    loss = z.abs().sum(-1).double()
    patterns = torch.ones(count, z.shape[1], dtype=torch.bool, device=z.device)
    for i in range(count):
        chances = loss.cumsum(0)
        token = torch.searchsorted(chances, draws[i] * chances[-1]).clamp_max(len(z) - 1)
        patterns[i] = z[token] >= 0
        # the loss of a token with a pattern: twice the margins that the pattern contradicts
        own = 2 * (z.abs() * ((z >= 0) != patterns[i])).sum(-1).double()
        loss = torch.minimum(loss, own) if i else own
    return patterns


def _reseed(patterns: Tensor, used: Tensor, z: Tensor, loss: Tensor) -> None:
    """Give each unused pattern the bits of a token that loses much, each of them another one's; in place."""
    unused = (~used).nonzero().flatten().tolist()
    if not unused:
        return
    worst = loss.topk(min(len(loss), 8 * len(unused)))
    candidates = (z[worst.indices[worst.values > 0]] >= 0).cpu()
    different = list(dict.fromkeys(map(tuple, candidates.tolist())))
    for index, bits in zip(unused, different, strict=False):
        patterns[index] = torch.tensor(bits, device=patterns.device)


def fit_codebook(codebook: Codebook, z: Tensor, seed: int, rounds: int = ROUNDS, *, refit: bool = False) -> None:
    """Set a codebook's patterns from margins z [n, N]; `refit` goes on from the ones it has. A complete one stays."""
    size = codebook.size
    if size.complete:
        return
    generator = torch.Generator().manual_seed(seed)
    parts = z.view(-1, size.segments, size.width)
    fitted = [
        lloyd(parts[:, s], size.count, generator, rounds, codebook.bits[s] if refit else None)
        for s in range(size.segments)
    ]
    codebook.set_bits(torch.stack(fitted))


def fit_codebooks(routed: RoutedModel, z: Margins, seed: int, rounds: int = ROUNDS, *, refit: bool = False) -> None:
    """`fit_codebook` for every codebook of a model."""
    for decision, codebook in codebooks_of(routed).items():
        fit_codebook(codebook, z[decision], seed, rounds, refit=refit)


def codebooks_of(routed: RoutedModel) -> dict[Decision, Codebook]:
    """The decisions that pick patterns."""
    return {d: d.codebook for d in routed.decisions.values() if d.codebook is not None}


@dataclass(frozen=True)
class PatternUse:
    """How one codebook served a text: `counts` of tokens by segment and pattern, after the budget was matched."""

    layer: int
    part: PartName
    agreement: float  # share of the decisions that are those of independent bits at the same margins
    bits_skipped: float
    skipped_before: float  # without any shift
    skipped: float
    shift: float  # taken off every margin
    counts: list[list[int]]
    sizes: list[list[int]]  # groups that each pattern runs, by segment

    @property
    def effective(self) -> float:
        """Two to the power of the entropy of the choice, mean over segments: how many patterns really are in use."""
        powers = []
        for counts in self.counts:
            shares = torch.tensor(counts, dtype=torch.float64) / max(1, sum(counts))
            powers.append(float(torch.special.entr(shares).sum().exp()))
        return sum(powers) / len(powers)

    @property
    def unused(self) -> int:
        """Patterns that no token took."""
        return sum(count == 0 for counts in self.counts for count in counts)


@dataclass(frozen=True)
class Conversion:
    """What `convert` found; `achieved` as a trace's summary has it."""

    tokens: int
    measured_tokens: int  # of them, behind the rates and counts
    uses: list[PatternUse]
    before: dict[str, float] = field(default_factory=dict)  # skip rates by part: independent bits
    unmatched: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    achieved: dict[str, Any] = field(default_factory=dict)


@torch.no_grad()
def convert(
    routed: RoutedModel,
    batches: Sequence[Batch],
    *,
    seed: int = 0,
    match: Match = "global",
    context_tokens: int = 1024,
    say: Callable[[str], None] = lambda _: None,
) -> Conversion:
    """Fill the codebooks of a model with calibrated routers from text, and shift the routers to skip as much as before.

    `match`: one shift a part (`global`), one a decision (`layer`), or none. Rates are measured and matched on the first
    half of the text: they need fewer tokens than patterns.
    """
    sample = batches[: max(1, len(batches) // 2)]
    measured = sum(len(rows(ids, valid)) for ids, valid in sample)
    say("reading the text, every group deciding by itself")
    with routed.bits():
        z = collect_margins(routed, batches)
        wanted = {d: skipped_share(d, z[d][:measured]) for d in z}
        decided = {d: d.gate.decide(z[d]) for d in z}
    say("finding patterns")
    fit_codebooks(routed, z, seed)
    codebooks = codebooks_of(routed)
    agreement = {d: float((d.gate.decide(z[d]) == decided[d]).float().mean()) for d in codebooks}
    tokens = len(next(iter(z.values())))
    del z, decided
    say("measuring what they skip")
    found = collect_margins(routed, sample)
    raw = {d: skipped_share(d, margin) for d, margin in found.items()}
    shifts = dict.fromkeys(codebooks, 0.0)
    if match != "none":
        solve = for_rates(routed, wanted, match)
        shifts |= meet(routed, sample, solve, passes=MATCH_PASSES, first=found, say=say)
    say("measuring again")
    with routed.tracing() as trace:
        found = collect_margins(routed, sample)
    rates = {d: skipped_share(d, margin) for d, margin in found.items()}
    uses = [
        PatternUse(
            layer=index,
            part=part,
            agreement=agreement[d],
            bits_skipped=wanted[d],
            skipped_before=raw[d],
            skipped=rates[d],
            shift=shifts[d],
            counts=_counts(d.codebook, found[d]),
            sizes=d.codebook.bits.sum(-1).tolist(),
        )
        for (index, part), d in routed.decisions.items()
        if d.codebook is not None
    ]
    return Conversion(
        tokens=tokens,
        measured_tokens=measured,
        uses=uses,
        before=_by_part(routed, wanted),
        unmatched=_by_part(routed, raw),
        after=_by_part(routed, rates),
        achieved=trace.summary(context_tokens),
    )


def for_rates(routed: RoutedModel, wanted: dict[Decision, float], match: Match) -> Solver:
    """Aims at the rates `wanted` of the decisions with a codebook: their mean over each part, or each by itself."""
    groups: dict[Any, list[Decision]] = {}
    for (index, part), decision in routed.decisions.items():
        if decision.codebook is not None:
            groups.setdefault(part if match == "global" else (index, part), []).append(decision)

    def solve(z: Margins) -> dict[Decision, float]:
        result: dict[Decision, float] = {}
        for together in groups.values():
            share = 1 / len(together)
            target = sum(wanted[d] for d in together) * share
            # a complete codebook decides like the bits, but a later layer's margins can still have moved
            result |= common_shift(z, dict.fromkeys(together, share), target)
        return result

    return solve


def _counts(codebook: Codebook, z: Tensor) -> list[list[int]]:
    chosen = codebook.choose(z)
    return [torch.bincount(ids, minlength=codebook.size.count).tolist() for ids in chosen.unbind(-1)]


def _by_part(routed: RoutedModel, rates: dict[Decision, float]) -> dict[str, float]:
    """Mean over the layers that route a part."""
    found: dict[str, list[float]] = {}
    for (_, part), decision in routed.decisions.items():
        found.setdefault(part, []).append(rates[decision])
    return {part: sum(found[part]) / len(found[part]) for part in PARTS if part in found}

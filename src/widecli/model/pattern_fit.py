"""Patterns from margins: what a calibrated router decides bit by bit, with few different decisions.

Lloyd's iterations as in k-means: every token takes the pattern that scores best, every pattern becomes the sign of its
tokens' summed margins, which is the best pattern for them. Neither step lowers the sum of the scores.

Margins know whether a group matters, and hardly how much. In one layer or two, Llama-like models have groups that add
to the residual of a sequence's first token thousands of times what any other does, and the attention of all later
tokens rests on it ("massive activations", arXiv 2402.17762). These tokens are few, so summed margins can outvote them:
then the perplexity of SmolLM2 rose by half (measured). So every pattern that such a token takes runs those groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from widecli.errors import UsageError
from widecli.model.patterns import Codebook
from widecli.model.plan import PARTS, PartName
from widecli.model.routed import Decision, RoutedModel
from widecli.model.thresholds import (
    Batch,
    Margins,
    Solver,
    collect_margins,
    common_shift,
    meet,
    rows,
    skipped_share,
)
from widecli.model.warm_start import contribution

ROUNDS = 15
MATCH_PASSES = 3
RESTARTS = 4  # Lloyd's iterations end where they began best; two ends differ by several percent of perplexity
MASSIVE = 30.0  # times the median norm of what a group adds: ordinary ones reach 13 in SmolLM2, massive ones 1900
Match = Literal["global", "layer", "none"]


@dataclass(frozen=True)
class Observed:
    """What one decision's patterns are fitted to: margins `z` [n, N] of n tokens, and as `massive` int64 [m, 2] (token,
    group) which of the groups that these tokens run add a massive part to the residual."""

    z: Tensor
    massive: Tensor


@torch.no_grad()
def observe(routed: RoutedModel, batches: Sequence[Batch]) -> dict[Decision, Observed]:
    """Margins and massive contributions on the real tokens of a text, the model routed as it is now."""
    found: dict[Decision, list[Tensor]] = {}
    seen: dict[Decision, int] = {}

    def on_output(decision: Decision, part: PartName, hidden: Tensor, weight: Tensor) -> None:
        if decision.codebook is None:
            return
        added = contribution(hidden, weight, decision.router.groups)
        ordinary = added.median()
        pairs = (added > MASSIVE**2 * ordinary).nonzero() if float(ordinary) > 0 else added.new_zeros(0, 2).long()
        pairs[:, 0] += seen.get(decision, 0)
        seen[decision] = seen.get(decision, 0) + len(added)
        found.setdefault(decision, []).append(pairs)

    result = {}
    for decision, margins in collect_margins(routed, batches, on_output=on_output).items():
        massive = torch.cat(found[decision]) if decision in found else margins.new_zeros(0, 2).long()
        wanted = margins[massive[:, 0], massive[:, 1]] >= 0  # the routers may have found that one can be spared
        result[decision] = Observed(margins, massive[wanted])
    return result


@torch.no_grad()
def lloyd(
    z: Tensor,
    count: int,
    generator: torch.Generator,
    rounds: int = ROUNDS,
    start: Tensor | None = None,
    massive: Tensor | None = None,
) -> Tensor:
    """`count` patterns for margins z [n, w], bool [count, w]; from `start` [count, w], else from tokens' bits.

    A pattern that no token takes is seeded anew with the bits of the tokens that lose most; one that a token of
    `massive` [m, 2] takes runs that one's group. Raises UsageError for more patterns than tokens.
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
        _keep(updated, taken, massive)
        _reseed(updated, used, z, best_possible - score)
        if torch.equal(updated, patterns):
            break
        patterns = updated
    if massive is not None and len(massive):
        # the last update may have moved tokens to other patterns; bits are only ever set, so this comes to an end
        while _keep(patterns, (z @ (2.0 * patterns - 1).T).argmax(-1), massive):
            pass
    return patterns


def best_of_restarts(
    z: Tensor, count: int, generator: torch.Generator, rounds: int = ROUNDS, massive: Tensor | None = None
) -> Tensor:
    """What `lloyd` finds from the best of RESTARTS draws of tokens."""
    ends = [lloyd(z, count, generator, rounds, massive=massive) for _ in range(RESTARTS)]
    return max(ends, key=lambda patterns: total_score(z, patterns))


def total_score(z: Tensor, patterns: Tensor) -> float:
    """What tokens with margins z [n, w] score together when each takes its best of `patterns` [count, w]."""
    return float((z.float() @ (2.0 * patterns - 1).T).amax(-1).sum(dtype=torch.float64))


def _keep(patterns: Tensor, taken: Tensor, massive: Tensor | None) -> bool:
    """Let the patterns that tokens take run the massive groups of these, in place; whether that changed any."""
    if massive is None or not len(massive):
        return False
    where = taken[massive[:, 0]], massive[:, 1]
    lacked = not bool(patterns[where].all())
    patterns[where] = True
    return lacked


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


def fit_codebook(
    codebook: Codebook, observed: Observed, seed: int, rounds: int = ROUNDS, *, refit: bool = False
) -> None:
    """Set a codebook's patterns by what was observed; `refit` goes on from the ones it has. A complete one stays."""
    size = codebook.size
    if size.complete:
        return
    generator = torch.Generator().manual_seed(seed)
    parts = observed.z.view(-1, size.segments, size.width)
    segment_of = observed.massive[:, 1] // size.width
    fitted = []
    for s in range(size.segments):
        here = observed.massive[segment_of == s] - observed.massive.new_tensor([0, s * size.width])
        if refit:
            fitted.append(lloyd(parts[:, s], size.count, generator, rounds, codebook.bits[s], here))
        else:
            fitted.append(best_of_restarts(parts[:, s], size.count, generator, rounds, here))
    codebook.set_bits(torch.stack(fitted))


def fit_codebooks(
    routed: RoutedModel,
    observed: Mapping[Decision, Observed],
    seed: int,
    rounds: int = ROUNDS,
    *,
    refit: bool = False,
) -> None:
    """`fit_codebook` for every codebook of a model."""
    for decision, codebook in codebooks_of(routed).items():
        fit_codebook(codebook, observed[decision], seed, rounds, refit=refit)


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
        observed = observe(routed, batches)
        z = {d: seen.z for d, seen in observed.items()}
        wanted = {d: skipped_share(d, z[d][:measured]) for d in z}
        decided = {d: d.gate.decide(z[d]) for d in z}
    say("finding patterns")
    fit_codebooks(routed, observed, seed)
    codebooks = codebooks_of(routed)
    agreement = {d: float((d.gate.decide(z[d]) == decided[d]).float().mean()) for d in codebooks}
    tokens = len(next(iter(z.values())))
    del z, observed, decided
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

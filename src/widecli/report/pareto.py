"""Quality against cost: which configurations no other one beats on both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from widecli.report.load import DENSE
from widecli.report.points import Figure, Point, items_of, names_of

Direction = Literal["higher", "lower"]


@dataclass(frozen=True)
class Candidate:
    """A configuration in one comparison: what it gains and what quality it has."""

    point: Point
    gain: Figure
    quality: Figure
    dominated_by: Point | None = None


@dataclass(frozen=True)
class Front:
    """One comparison among the configurations of one model, all measured in the same way: more gain is better."""

    model: str
    gain: str
    quality: str
    better: Direction
    candidates: tuple[Candidate, ...]

    @property
    def front(self) -> tuple[Candidate, ...]:
        """The candidates that none dominates, by rising gain."""
        kept = [candidate for candidate in self.candidates if candidate.dominated_by is None]
        return tuple(sorted(kept, key=lambda candidate: candidate.gain.value))


def fronts(made: Sequence[Point]) -> list[Front]:
    """Every comparison that the points of one model allow: at least one routed configuration has both figures.

    Quality is the average accuracy and the retention (for each number of items a task) and each text's perplexity;
    gain the prunable FLOPs skipped while that was measured (net, and gross where some records have no net), and the
    measured speed-ups at the setting that most configurations share. A text cut to its first windows is left out where
    the whole text was measured as often.
    """
    if not made:
        return []
    found = []
    speeds = [name for phase in ("ttft ", "tpot ") for name in names_of(made, phase)[:1]]
    for quality in qualities(made):
        for gain in (*flops_behind(quality, made), *speeds):
            candidates = [c for point in made if (c := _candidate(point, gain, quality)) is not None]
            if any(candidate.point.mode != DENSE for candidate in candidates):
                better: Direction = "lower" if quality.startswith("perplexity ") else "higher"
                found.append(Front(made[0].model, gain, quality, better, _judged(candidates, better)))
    return found


def qualities(made: Sequence[Point]) -> list[str]:
    """The quality figures worth a comparison: averages and retentions, then perplexities."""
    accuracy = [name for kind in ("average [", "retention [") for name in names_of(made, kind)]
    texts = names_of(made, "perplexity ")
    have = {name: {id(point) for point in made if name in point.figures} for name in texts}
    whole = [name for name in texts if not ("@" in name and have[name] <= have.get(name.partition("@")[0], set()))]
    return accuracy + whole


def flops_behind(quality: str, made: Sequence[Point]) -> list[str]:
    """The columns with the FLOPs skipped while a quality figure was measured: net, and gross if not all have net."""
    what = quality.removeprefix("perplexity ")
    if what == quality:
        what = f"tasks [{items_of(quality)}]"
    net, gross = f"flops net at {what}", f"flops gross at {what}"
    lacking = any(net not in p.figures and gross in p.figures for p in made if quality in p.figures)
    return [net, gross] if lacking else [net]


def _candidate(point: Point, gain: str, quality: str) -> Candidate | None:
    found = point.figures.get(quality)
    gained = point.figures.get(gain)
    if point.mode == DENSE and found is not None:
        nothing = 0.0 if gain.startswith("flops ") else 1.0
        gained = Figure(nothing, None, found.runs)
    return Candidate(point, gained, found) if gained is not None and found is not None else None


def _judged(candidates: Sequence[Candidate], better: Direction) -> tuple[Candidate, ...]:
    """Mark each candidate that another one equals or beats on both axes, and beats on one."""
    sign = 1.0 if better == "higher" else -1.0

    def dominates(a: Candidate, b: Candidate) -> bool:
        gain = a.gain.value - b.gain.value
        quality = sign * (a.quality.value - b.quality.value)
        return gain >= 0 and quality >= 0 and (gain > 0 or quality > 0)

    marked = []
    for candidate in candidates:
        winners = [other for other in candidates if dominates(other, candidate)]
        best = max(winners, key=lambda other: sign * other.quality.value, default=None)
        marked.append(replace(candidate, dominated_by=best.point if best is not None else None))
    return tuple(marked)

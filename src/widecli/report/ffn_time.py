"""What a decision costs in measured FFN time: configurations of a model joined with measured kernels.

Quality is of the model that was evaluated, time of FFNs in the shapes that were timed: `wide_kernels.bench`, for bits
(every group decides by itself) and with `--patterns`. They are joined where G, C and the kind of decision agree and the
model runs about the share of its FFN that was timed; a pattern in several segments was not timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from widecli.report.documents import KERNELS, Document
from widecli.report.load import DENSE, number
from widecli.report.pareto import FFN_TIME, Candidate, Front, judged, qualities
from widecli.report.points import Figure, Point

NEAR = 0.15  # how far the share of an FFN that a model runs may lie from the share that was timed
_BITS = "independent bits"  # the baseline of that name beside patterns
_BF16 = ("bf16", "bfloat16")


@dataclass(frozen=True)
class FfnTime:
    """FFN time as a share of the dense one's in the same record; the median where several records have it.

    `patterns` is C, None for bits; `density` the share of groups that run.
    """

    shape: str
    rows: int
    device: str
    group_size: int
    patterns: int | None
    density: float
    share: float
    documents: tuple[str, ...]

    @property
    def where(self) -> tuple[str, int, str]:
        """Times of one shape, number of tokens and device are compared."""
        return self.shape, self.rows, self.device


def ffn_times(documents: Iterable[Document]) -> list[FfnTime]:
    """The times of whole FFNs with random decisions, at the most tokens that were timed in each shape."""
    found: dict[FfnTime, list[FfnTime]] = {}
    for document in documents:
        for time in _times(document) if document.schema == KERNELS else ():
            found.setdefault(replace(time, share=0.0, documents=()), []).append(time)
    made = [
        replace(kind, share=median(time.share for time in times), documents=_files(times))
        for kind, times in found.items()
    ]
    most = {(time.shape, time.device): 0 for time in made}
    for time in made:
        most[time.shape, time.device] = max(most[time.shape, time.device], time.rows)
    return [time for time in made if time.rows == most[time.shape, time.device]]


def _files(times: Iterable[FfnTime]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(label for time in times for label in time.documents))


def _times(document: Document) -> Iterator[FfnTime]:
    """Every FFN of a document, and the bits that were timed beside patterns."""
    for record in document.results:
        if record.get("op") != "ffn" or record.get("dtype") not in _BF16 or record.get("masks", "random") != "random":
            continue
        baselines = record.get("baselines")
        baselines = baselines if isinstance(baselines, dict) else {}
        dense = _milliseconds(baselines.get(str(record.get("best_dense"))))
        sizes = [number(record.get(key)) for key in ("rows", "group_size", "density")]
        if dense is None or None in sizes:
            continue
        rows, group_size, density = (size or 0.0 for size in sizes)
        patterns = number(record.get("patterns"))
        count = None if patterns is None else int(patterns)
        shape, label = str(record.get("model")), (document.label,)
        for kind, times in ((count, record.get("routed")), (None, baselines.get(_BITS))):
            if (took := _milliseconds(times)) is not None:
                share = took / dense
                yield FfnTime(shape, int(rows), document.device, int(group_size), kind, density, share, label)


def _milliseconds(times: object) -> float | None:
    return number(times.get("p50_ms")) if isinstance(times, Mapping) else None


def ffn_fronts(made: Sequence[Point], times: Sequence[FfnTime]) -> list[Front]:
    """Perplexity against FFN time, for each text and each shape that was timed; dense is 1 on that axis."""
    found = []
    for where in dict.fromkeys(time.where for time in times):
        here = [time for time in times if time.where == where]
        for quality in qualities(made):
            if not quality.startswith("perplexity "):
                continue
            candidates = [c for point in made if (c := _candidate(point, quality, here)) is not None]
            if any(candidate.point.mode != DENSE for candidate in candidates):
                shape, rows, device = where
                front = Front(
                    made[0].model,
                    f"{FFN_TIME}{shape} T {rows}",
                    quality,
                    "lower",
                    judged(candidates, "lower", "lower"),
                    gain_better="lower",
                    caption=_caption(made[0].model, shape, rows, device),
                )
                found.append(front)
    return found


def _caption(model: str, shape: str, rows: int, device: str) -> str:
    return (
        f"Quality is that of {model}, time that of one FFN in {shape} shapes at {rows:,} tokens on one {device} (bf16, "
        "random decisions, their layout included) as a share of dense in the same record. Joined where G, C and the "
        f"kind of decision agree and the model runs a share of its FFN within {NEAR:g} of the one timed (where it "
        "runs more, its time is flattered); patterns in one segment alone."
    )


def _candidate(point: Point, quality: str, times: Sequence[FfnTime]) -> Candidate | None:
    found = point.figures.get(quality)
    if found is None:
        return None
    if point.mode == DENSE:
        return Candidate(point, Figure(1.0, None, found.runs), found)
    time = time_of(point, times)
    if isinstance(time, str):
        return None
    note = f"timed at density {time.density:g}, the model runs {1 - (point.value('skip ffn') or 0.0):.2f} of its FFN"
    return Candidate(point, Figure(time.share, None, time.documents), found, note=note)


def time_of(point: Point, times: Sequence[FfnTime]) -> FfnTime | str:
    """The time of a point's decisions, else the reason why there is none."""
    group_size, skipped = point.group_size, point.value("skip ffn")
    if group_size is None or skipped is None:
        return "it has no groups of FFN channels, or what they skip is not recorded"
    count = point.setting("plan.patterns.count")
    if point.setting("plan.patterns.parts") == "attention":
        count = None
    if count is not None and point.setting("plan.patterns.segments") != 1:
        return "patterns in several segments are not timed"
    alike = [time for time in times if (time.group_size, time.patterns) == (group_size, count)]
    if not alike:
        return f"{'bits' if count is None else f'{count} patterns'} of G {group_size:.0f} are not timed"
    nearest = min(alike, key=lambda time: abs(time.density - (1 - skipped)))
    if abs(nearest.density - (1 - skipped)) > NEAR:
        return f"what it runs of its FFN is not within {NEAR:g} of a density that was timed"
    return nearest


def without_time(made: Sequence[Point], times: Sequence[FfnTime]) -> list[str]:
    """A line for each reason why configurations have no time, with how many they are."""
    reasons: dict[str, list[Point]] = {}
    for point in made if times else ():
        reason = time_of(point, times) if point.mode != DENSE else None
        if isinstance(reason, str):
            reasons.setdefault(reason, []).append(point)
    return [
        f"{points[0].model}: no FFN time for {len(points)} configuration{'s' if len(points) > 1 else ''}"
        f" ({points[0].label}{', ...' if len(points) > 1 else ''}): {reason}"
        for reason, points in reasons.items()
    ]

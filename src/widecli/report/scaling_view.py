"""The table and the plots of training speed on one or more cards."""

from __future__ import annotations

from collections.abc import Sequence

from widecli.recipe import paper
from widecli.report.charts import Chart, Mark, Series, slug
from widecli.report.scaling import TENTH, ScalingPoint, on_one_card
from widecli.report.tables import Column, Table, Value

_GIB = 2**30
_STEPS = f"{paper.STEPS:,}".replace(",", " ")
_CAPTION = (
    "Speed-up: over one card with the same model, length and layout (dealt to one card is whole) and the same global "
    "batch, else the same batch a card; efficiency is its share of the number of cards. Memory: of the fullest card; "
    "the estimate is that of --dry-run, too high where it is off by more than 0. Hours: what "
    f"{_STEPS} steps of 16 x 4096 tokens (the paper's schedule), and a tenth of them, take at the measured tokens/s."
)


def scaling_table(measured: Sequence[ScalingPoint]) -> Table:
    """Every layout on every number of cards; figures of several models stand one below the other, by name."""
    rows = [_row(point, measured) for point in measured]
    columns = (
        Column("model", "model"),
        Column("layout", "layout"),
        Column("cards", "cards", "count"),
        Column("batch", "global\nbatch", "count", 2),
        Column("micro_batch", "micro\nbatch", "count", 6),
        Column("sequence", "length", "count", 3),
        Column("tokens_per_second", "tokens/s", "rate"),
        Column("speedup", "speed-up", "times"),
        Column("efficiency", "efficiency,\n%", "percent", 3),
        Column("peak_gib", "peak,\nGiB", "figure", 1),
        Column("estimated_gib", "estimated,\nGiB", "figure", 2),
        Column("estimate_error", "estimate\noff by, %", "percent", 2),
        Column("hours", f"h for {_STEPS}\nsteps", "figure", 1),
        Column("hours_tenth", "h for a\ntenth", "figure", 4),
        Column("shape", "shape", importance=7),
        Column("device", "device", importance=6),
        Column("runs", "file", importance=5),
        Column("command", "command", importance=8),
    )
    names = tuple((point.document,) for point in measured)
    return Table("training-speed", "Training speed by layout and cards", columns, tuple(rows), _CAPTION, names).filled()


def _row(point: ScalingPoint, measured: Sequence[ScalingPoint]) -> dict[str, Value]:
    one = on_one_card(point, measured)
    speedup = point.tokens_per_second / one.tokens_per_second if one else None
    return {
        "model": point.model,
        "shape": point.shape,
        "layout": point.layout,
        "cards": float(point.cards),
        "batch": point.batch,
        "micro_batch": point.micro_batch,
        "sequence": point.sequence,
        "tokens_per_second": point.tokens_per_second,
        "speedup": speedup,
        "efficiency": speedup / point.cards if speedup else None,
        "peak_gib": point.peak_bytes / _GIB if point.peak_bytes else None,
        "estimated_gib": point.estimated_bytes / _GIB if point.estimated_bytes else None,
        "estimate_error": point.estimate_error,
        "hours": point.hours(),
        "hours_tenth": point.hours(TENTH),
        "device": point.device,
        "runs": point.document,
        "command": point.command,
    }


def scaling_charts(measured: Sequence[ScalingPoint]) -> list[Chart]:
    """Tokens/s over cards with the ideal lines, a plot for each model, device and length on several cards."""
    questions: dict[tuple[str, str, float | None], list[ScalingPoint]] = {}
    for point in measured:
        questions.setdefault((point.model, point.device, point.sequence), []).append(point)
    several = {question: points for question, points in questions.items() if len({p.cards for p in points}) > 1}
    return [_chart(model, device, length, points) for (model, device, length), points in several.items()]


def _chart(model: str, device: str, length: float | None, measured: Sequence[ScalingPoint]) -> Chart:
    lines: dict[str, dict[ScalingPoint, None]] = {}
    ideals: dict[ScalingPoint, int] = {}
    for point in measured:
        if point.cards == 1:
            continue
        one = on_one_card(point, measured)
        a_card = one is not None and one.batch != point.batch
        line = lines.setdefault(_line_name(point.layout, one.batch if one else point.batch, a_card), {})
        if one:
            line.setdefault(one)
            ideals[one] = max(point.cards, ideals.get(one, 1))
        line.setdefault(point)
    drawn = {point for line in lines.values() for point in line}
    for point in measured:
        if point not in drawn:  # one card alone: nothing to be compared with it
            lines.setdefault(_line_name(point.layout, point.batch), {}).setdefault(point)
    series = [
        Series(name, tuple(_mark(point) for point in sorted(line, key=lambda p: p.cards)), "straight")
        for name, line in lines.items()
    ]
    series += [
        Series(f"ideal, from {one.layout}", tuple(_ideal(one, cards) for cards in (1, most)), "straight", dots=False)
        for one, most in ideals.items()
    ]
    return Chart(
        name=slug(f"training speed {model} {device} {length:g}" if length else f"training speed {model} {device}"),
        title=f"{model}: training speed by cards",
        x_label=f"cards ({device})",
        y_label="tokens/s, all cards",
        series=tuple(series),
        caption="Dashed: one card's speed times the number of cards. Medians of steps"
        + (f", sequences of {length:g} tokens." if length else "."),
        x_scale="log",
        y_scale="log",
        x_ticks_at_values=True,
    )


def _line_name(layout: str, batch: float | None, a_card: bool = False) -> str:
    return f"{layout}, batch {batch:g}{' a card' if a_card else ''}" if batch else layout


def _mark(point: ScalingPoint) -> Mark:
    batch = f", batch {point.batch:g}" if point.batch else ""
    label = f"{point.layout}, {point.cards} card{'s' if point.cards > 1 else ''}{batch}"
    return Mark(float(point.cards), point.tokens_per_second, label, (point.document,), note=point.command)


def _ideal(one: ScalingPoint, cards: int) -> Mark:
    return Mark(float(cards), cards * one.tokens_per_second, "ideal", ())

"""Statistics as tables, plots, heat maps and one page."""

from __future__ import annotations

from collections.abc import Sequence

from widecli.inspection.observe import Observation
from widecli.inspection.statistics import SEGMENT_GROUPS, TILE_TOKENS, Statistics, Word
from widecli.model.plan import PARTS, PartName
from widecli.report.charts import Chart, Mark, Series
from widecli.report.heatmap import HeatMap
from widecli.report.html import Block, Section, page
from widecli.report.tables import Column, Table, Value

WORDS_SHOWN = 15
_NAMES: dict[PartName, str] = {"attention": "attention", "ffn": "FFN"}


def layer_table(found: Statistics) -> Table:
    """One row a layer, both parts."""
    rows: list[dict[str, Value]] = []
    for index, layer in enumerate(found.layers):
        row: dict[str, Value] = {"layer": float(index)}
        for part, figures in layer.items():
            row |= {
                f"{part} skip": figures.skip_rate,
                f"{part} constant": f"{len(figures.always_on)} / {len(figures.always_off)}",
                f"{part} entropy": figures.decision_entropy,
                f"{part} router": figures.router_entropy,
                f"{part} natural": figures.union_natural,
                f"{part} sorted": figures.union_sorted,
            }
        rows.append(row)
    columns = [Column("layer", "layer", "count")]
    for part in PARTS:
        name = _NAMES[part]
        columns += [
            Column(f"{part} skip", f"{name}\nskipped, %", "percent"),
            Column(f"{part} constant", f"{name}\non / off", importance=2),
            Column(f"{part} entropy", f"{name}\nbits", "figure", 1),
            Column(f"{part} router", f"{name}\nrouter bits", "figure", 4),
            Column(f"{part} natural", f"{name}\nunion, %", "percent", 3),
            Column(f"{part} sorted", f"{name}\nsorted, %", "percent", 3),
        ]
    caption = (
        "on / off: groups that at least 99 % of the tokens run / skip. bits: entropy of a group's decision over the "
        f"text; router bits: of the router's own probability. union: groups that a tile of {TILE_TOKENS} tokens runs "
        f"for at least one of them; sorted: tokens sorted anew for each {SEGMENT_GROUPS} groups."
    )
    return Table("layers", "by layer", tuple(columns), tuple(rows), caption).filled()


def groups_table(found: Statistics) -> Table:
    """One row a layer: how far its channels were regrouped, and what stands in for skipped groups of both parts."""
    rows: list[dict[str, Value]] = []
    for index in range(len(found.layers)):
        row: dict[str, Value] = {"layer": float(index)}
        if found.regroupings and (regrouped := found.regroupings[index]):
            row |= {"moved": regrouped.moved, "together": regrouped.together}
        for part, left in found.substitutions[index].items() if found.substitutions else ():
            row |= {
                f"{part} executed": left.executed,
                f"{part} skipped": left.skipped,
                f"{part} mean": left.mean,
                f"{part} bypass": left.bypass,
                f"{part} recovered": left.recovered,
            }
        rows.append(row)
    columns = [
        Column("layer", "layer", "count"),
        Column("moved", "channels\nmoved, %", "percent"),
        Column("together", "pairs\nkept, %", "percent", 2),
    ]
    for part in PARTS:
        name = _NAMES[part]
        columns += [
            Column(f"{part} executed", f"{name}\nruns", "figure", 3),
            Column(f"{part} skipped", f"{name}\nskips", "figure", 1),
            Column(f"{part} mean", f"{name}\nmeans", "figure", 1),
            Column(f"{part} bypass", f"{name}\nbypass", "figure", 1),
            Column(f"{part} recovered", f"{name}\ngiven back, %", "percent"),
        ]
    caption = (
        "moved: channels in another group than as stored; pairs kept: of channels stored in one group, what still "
        "shares one. runs, skips: norm of what the groups that run add and of what the others would have added, root "
        "mean square over tokens; means, bypass: of what stands in for the latter. given back: of the energy that "
        "skipping takes."
    )
    if not found.regroupings and not found.substitutions:
        rows = []
    return Table("groups", "groups and what skipped ones leave", tuple(columns), tuple(rows), caption).filled()


def words_table(found: Statistics, least_count: int, top: bool) -> Table:
    """The tokens that run most, or least, among those that occur `least_count` times."""
    chosen = often(found.words, least_count)
    chosen = chosen[:WORDS_SHOWN] if top else chosen[::-1][:WORDS_SHOWN]
    parts = [part for part in PARTS if chosen and part in chosen[0].executed]
    rows: list[dict[str, Value]] = [
        {"token": word.token, "count": float(word.count), **{part: word.executed[part] for part in parts}}
        for word in chosen
    ]
    columns = (
        Column("token", "token"),
        Column("count", "count", "count"),
        *(Column(part, f"{_NAMES[part]}\nrun, %", "percent") for part in parts),
    )
    kind = "most" if top else "least"
    return Table(
        f"words-{kind}", f"tokens that run {kind} (at least {least_count} times in the text)", columns, tuple(rows)
    )


def overall_table(found: Statistics) -> Table:
    """Each part over all layers."""
    rows: list[dict[str, Value]] = [{"part": _NAMES[part], **found.overall(part)} for part in found.token_shares]
    columns = (
        Column("part", "part"),
        Column("skip_rate", "skipped, %", "percent"),
        Column("always_on", "always\non, %", "percent"),
        Column("always_off", "always\noff, %", "percent"),
        Column("decision_entropy", "entropy,\nbits", "figure"),
        Column("router_entropy", "router's,\nbits", "figure", 1),
        Column("union_natural", "union of\na tile, %", "percent"),
        Column("union_sorted", "union,\nsorted, %", "percent"),
    )
    return Table("overall", "all layers", columns, tuple(rows))


def often(words: Sequence[Word], least_count: int) -> list[Word]:
    """Those that occur often enough for their mean to say something."""
    return [word for word in words if word.count >= least_count]


def charts(found: Statistics, run: str) -> list[Chart]:
    """Skip rates, entropies and unions by layer."""
    made = [_by_layer("skip-rate", "skipped by layer", "skipped, %", found, run, [("", "skip_rate")], True)]
    made.append(
        _by_layer(
            "entropy",
            "entropy of a decision by layer",
            "bits",
            found,
            run,
            [(", over the text", "decision_entropy"), (", of the router", "router_entropy")],
            False,
        )
    )
    unions = [(", natural order", "union_natural"), (f", sorted by {SEGMENT_GROUPS} groups", "union_sorted")]
    made.append(_by_layer("union", f"groups a tile of {TILE_TOKENS} tokens runs", "union, %", found, run, unions, True))
    return made


def _by_layer(
    name: str,
    title: str,
    y_label: str,
    found: Statistics,
    run: str,
    figures: Sequence[tuple[str, str]],
    percent: bool,
) -> Chart:
    series = []
    for part in PARTS:
        for suffix, figure in figures:
            marks = tuple(
                Mark(float(i), getattr(layer[part], figure), f"layer {i}, {_NAMES[part]}{suffix}", (run,))
                for i, layer in enumerate(found.layers)
                if part in layer
            )
            if marks:
                series.append(Series(f"{_NAMES[part]}{suffix}", marks, "straight"))
    return Chart(name, title, "layer", y_label, tuple(series), "", y_percent=percent)


def heat_maps(found: Statistics, tokens: Sequence[str], shown: int) -> list[HeatMap]:
    """Which tokens run (the first `shown`), which groups are skipped, and which layers decide alike."""
    layers = tuple(str(i) for i in range(len(found.layers)))
    pieces = tuple(_visible(token) for token in tokens[:shown])
    made = []
    for part, rows in found.token_shares.items():
        made.append(
            HeatMap(
                name=f"tokens-{part}",
                title=f"{_NAMES[part]}: which tokens run, layer by layer",
                x_label="token",
                y_label="layer",
                value_label="share of groups run",
                rows=layers,
                columns=pieces,
                values=[row[:shown] for row in rows],
                columns_vertical=True,
                caption=f"The first {len(pieces)} tokens; dark = all groups run.",
            )
        )
    for part in found.token_shares:
        rates = [layer[part].group_skip_rates if part in layer else () for layer in found.layers]
        groups = max(map(len, rates))
        if groups == 1:
            continue  # one decision a part: the skip rate by layer is all there is
        values = [[*row, *([None] * (groups - len(row)))] for row in rates]
        labels = tuple(str(i) for i in range(groups))
        title = f"{_NAMES[part]}: skip rate of every group"
        made.append(HeatMap(f"groups-{part}", title, "group", "layer", "skip rate", layers, labels, values))
    for part, matrix in found.correlation.items():
        title = f"{_NAMES[part]}: correlation between layers of how much a token runs"
        made.append(
            HeatMap(
                f"correlation-{part}", title, "layer", "layer", "correlation", layers, layers, matrix, -1.0, 1.0, "RdBu"
            )
        )
    return made


def _visible(token: str) -> str:
    """A token as one short word: spaces and line ends seen."""
    text = token.replace("\n", "⏎").replace("\t", "⇥")
    return text.strip(" ") or "␣"


def inspection_page(seen: Observation, found: Statistics, run: str, shown: int, least_count: int) -> str:
    """One self-contained page."""
    lead = f"Decisions on {seen.text}; {seen.config.step} training steps. Run: {run}."
    groups = groups_table(found)
    tables = (overall_table(found), layer_table(found), *((groups,) if groups.rows else ()))
    blocks: tuple[Block, ...] = (*tables, *charts(found, run))
    words = (words_table(found, least_count, top=True), words_table(found, least_count, top=False))
    sections = [
        Section("Layers", blocks),
        Section("Which words run, which groups are skipped", tuple(heat_maps(found, seen.tokens, shown))),
        Section("Words", tuple(table for table in words if table.rows)),
    ]
    return page(f"What the routers of {seen.model} do", lead, sections)

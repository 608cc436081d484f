from __future__ import annotations

import csv
import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from stored_runs import write_pair
from widecli.report.find import find_runs
from widecli.report.load import load
from widecli.report.points import Figure, points
from widecli.report.summaries import published_table, summary_table, tasks_table, throughput_table
from widecli.report.sweeps import ThroughputPoint
from widecli.report.tables import Column, Table, comma_separated, latex, markdown, shown, terminal

TABLE = Table(
    "t",
    "title & more",
    (Column("name", "name"), Column("share", "share,\n%", "percent", 1), Column("seconds", "s", "figure", 2)),
    (
        {"name": "a|b_c", "share": Figure(0.5, 0.01, ("r1", "r2")), "seconds": 2.0},
        {"name": "", "share": None, "seconds": Figure(3.0, None, ("r3",))},
    ),
)


def printed(table: Table, width: int) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width)
    console.print(terminal(table, width))
    return out.getvalue().splitlines()


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (Figure(0.5, 0.0123, ("r",)), "percent", "50.0 ± 1.2"),
        (Figure(58.239, 0.304, ("r",)), "figure", "58.24 ± 0.30"),
        (Figure(1.5, 0.1, ("r",)), "times", "1.50x ± 0.10"),
        (64.0, "count", "64"),
        (None, "percent", ""),
        ("text", "text", "text"),
    ],
)
def test_a_cell_reads_as_people_write_it(value: Figure | float | str | None, kind: str, text: str) -> None:
    assert shown(value, kind) == text  # type: ignore[arg-type]


def test_markdown_escapes_what_would_break_a_table() -> None:
    lines = markdown(TABLE).splitlines()
    assert lines[0] == "### title & more"
    assert lines[2:] == [
        "| name | share, % | s |",
        "| --- | ---: | ---: |",
        "| a\\|b_c | 50.0 ± 1.0 | 2.00 |",
        "|  |  | 3.00 |",
    ]


def test_csv_holds_bare_numbers_and_the_spread_beside_them() -> None:
    rows = list(csv.DictReader(io.StringIO(comma_separated(TABLE))))
    assert rows[0] == {"name": "a|b_c", "share": "0.5", "share spread": "0.01", "seconds": "2.0"}
    assert rows[1]["share"] == "" and "seconds spread" not in rows[1]


def test_latex_escapes_its_special_characters() -> None:
    text = latex(TABLE)
    assert r"\caption{title \& more}" in text
    assert r"a\textbar{}b\_c & 50.0 $\pm$ 1.0 & 2.00 \\" in text
    below = Table("t", "S < 0.5 | T > 1 \\ {x}", TABLE.columns, ({"name": "a<b>c|d~^"},))
    assert r"S \textless{} 0.5 \textbar{} T \textgreater{} 1 \textbackslash{} \{x\}" in latex(below)
    assert text.count(r"\begin") == text.count(r"\end") == 2


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_table_fits_the_terminal_and_keeps_what_matters(runs: Path, width: int) -> None:
    made = points(load(find_runs([runs]).runs).frame)
    for table in (summary_table(made), tasks_table(made), published_table()):
        lines = printed(table, width)
        assert max(len(line.rstrip()) for line in lines) <= width
        assert not any("…" in line for line in lines)
        head = " ".join(lines)
        for column in table.columns:
            if column.importance == 0:
                assert column.head.split("\n")[0] in head, column
    summary = "\n".join(printed(summary_table(made), width))
    for figure in ("25.0", "50.0", "24.00", "96.0"):  # sparsities, a perplexity, what S = 25 % keeps
        assert figure in summary
    if width >= 120:
        assert "53.00 ± 3.00" in summary and "90.0 ± 2.0" in summary


def test_the_least_important_column_goes_first_and_the_title_says_so() -> None:
    wide, narrow = "\n".join(printed(TABLE, 60)), "\n".join(printed(TABLE, 20))
    assert "3.00" in wide and "more column" not in wide
    assert "3.00" not in narrow and "50.0" in narrow
    assert "(1 more column" in " ".join(narrow.split())


def test_a_setting_that_tells_rows_apart_outlives_one_that_all_share(repository: Path) -> None:
    """The table that docs/reports.md shows is what a terminal of 80 columns gets, each row another."""
    made = points(load(find_runs([repository / "reports/smollm2-h200"]).runs).frame)
    lines = [line.rstrip() for line in printed(summary_table(made), 80)]
    shown_table = [line for line in lines if line][1:]  # without its title
    assert "\n".join(["```", *shown_table, "```"]) in (repository / "docs/reports.md").read_text(encoding="utf-8")


def test_net_and_gross_shares_never_meet_in_a_column(tmp_path: Path) -> None:
    write_pair(tmp_path, "old", perplexity=60.0, old=True)
    lines = markdown(summary_table(points(load(find_runs([tmp_path]).runs).frame)))
    assert (
        "| FLOPs skipped, % |" in lines
        and "| 45.0 |" in lines
        and "gross, without subtracting what routers cost" in lines
    )
    write_pair(tmp_path, "new", perplexity=38.0)
    made = points(load(find_runs([tmp_path]).runs).frame)
    text = markdown(summary_table(made))
    assert "| FLOPs net, % | FLOPs gross, % |" in text and "FLOPs skipped, %" not in text
    assert "less what routers and compensation cost (older records have no such figure)" in text
    rows_here = [line for line in text.splitlines() if line.startswith("| wide")]
    old, new = (next(line for line in rows_here if f"eval-{name}" in line) for name in ("old", "new"))
    assert "| contiguous | none |" in old and "|  | 45.0 |" in old
    assert "| clustered | means and rank 32 |" in new and "| 40.0 | 45.0 |" in new
    assert [line.split(" | ")[0] for line in (old, new)] == ["| wide", "| wide"]
    rows = list(csv.DictReader(io.StringIO(comma_separated(summary_table(made)))))
    assert [row["flops net"] for row in rows if row["mode"] == "wide"] == ["0.4", ""]


def test_how_channels_are_grouped_is_said_where_it_tells_rows_apart(tmp_path: Path) -> None:
    write_pair(tmp_path, "a", perplexity=60.0)
    write_pair(tmp_path, "b", perplexity=70.0, mode="token")

    def keys() -> set[str]:
        table = summary_table(points(load(find_runs([tmp_path]).runs).frame))
        return {column.key for column in table.columns} & {"grouping", "compensation"}

    assert keys() == set()
    write_pair(tmp_path, "c", perplexity=65.0, changes=("compensation.rank=8",))
    assert keys() == {"compensation"}
    write_pair(tmp_path, "d", perplexity=65.0, changes=("routing.grouping=contiguous",))
    assert keys() == {"grouping", "compensation"}


def test_a_column_that_nobody_fills_is_left_out(runs: Path) -> None:
    made = points(load(find_runs([runs / "eval-dense"]).runs).frame)
    keys = [column.key for column in summary_table(made).columns]
    assert "sparsity" not in keys and "perplexity wikitext2" in keys


def test_throughput_says_both_times_and_its_run() -> None:
    point = ThroughputPoint("m", "profile-x", "ttft", 1, 1024, 128, 0.5, 64, "learned", 30.0, 20.0, 1.5)
    text = markdown(throughput_table("m", [point]))
    assert "| TTFT | 1 | 1024 | 128 | 50.0 | 64 | learned | 30.00 | 20.00 | 1.50x | profile-x |" in text
    theirs = dataclasses.replace(point, library=True)
    assert "| learned | library | 30.00 | 20.00 | 1.50x |" in markdown(throughput_table("m", [point, theirs]))
    assert theirs.label == f"{point.label}, dense by the library"

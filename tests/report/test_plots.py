from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

import pytest

from widecli.report import plots
from widecli.report.charts import Chart, Mark, Series, front_chart, sweep_chart, throughput_chart
from widecli.report.find import find_runs
from widecli.report.heatmap import HeatMap
from widecli.report.load import load
from widecli.report.pareto import fronts
from widecli.report.points import points
from widecli.report.sweeps import ThroughputPoint, sweeps

needs_matplotlib = pytest.mark.skipif(not plots.available(), reason=f"matplotlib is not installed: {plots.INSTALL}")


@pytest.fixture
def front(runs: Path) -> Chart:
    found = fronts(points(load(find_runs([runs]).runs).frame))
    return front_chart(next(f for f in found if f.quality == "perplexity wikitext2" and f.gain.startswith("flops")))


def test_a_front_chart_marks_dominated_points_and_names_every_run(front: Chart) -> None:
    marks = {mark.label: mark for series in front.series if series.dots for mark in series.marks}
    assert {label for label, mark in marks.items() if mark.hollow} == {"token, S 45 %, 300 steps"}
    assert marks["wide, S 50 %, G 64, 300 steps"].runs == ("eval-s50-seed0", "eval-s50-seed1", "eval-s50-seed2")
    assert marks["wide, S 50 %, G 64, 300 steps"].y_spread == pytest.approx(3.0)
    assert all(mark.runs for mark in marks.values())
    (edge,) = [series for series in front.series if not series.dots]
    assert [mark.y for mark in edge.marks] == [20.0, 24.0, 53.0]
    assert front.y_scale == "log"  # 20 to 200


def test_the_sparsity_sweep_of_retention_shows_the_papers_points_as_published(runs: Path) -> None:
    (sweep,) = sweeps(points(load(find_runs([runs]).runs).frame))
    kept = sweep_chart(sweep)[0]
    published = [series for series in kept.series if series.published]
    assert {mark.y for series in published for mark in series.marks} == {0.9792, 0.9068, 0.8993, 0.7222}
    assert all(mark.hollow and "not measured here" in mark.note for series in published for mark in series.marks)
    assert [mark.x for mark in kept.series[0].marks] == [0.25, 0.5]


def test_throughput_is_drawn_along_what_varies() -> None:
    made = [ThroughputPoint("m", "profile-x", "ttft", b, 1024, 128, 0.5, 64, "learned", 3, 2, 1.5) for b in (1, 8)]
    (chart,) = throughput_chart("m", made)
    assert chart.x_label == "batch size" and [mark.x for mark in chart.series[0].marks] == [1, 8]
    alone = dataclasses.replace(made[0], group_size=512)
    (chart,) = throughput_chart("m", [*made, alone])
    assert len(chart.series) == 1, "a lone point is no line"


@needs_matplotlib
def test_many_names_stand_below_a_plot_and_leave_it_its_size(front: Chart) -> None:
    series = tuple(
        Series(f"line {i}", (Mark(1.0, i, "l", ("r",)), Mark(2.0, i, "l", ("r",))), "straight") for i in range(30)
    )
    few, many = (plots.draw(dataclasses.replace(front, series=series[:n]), "png") for n in (8, 30))
    heights = [struct.unpack(">II", png[16:24])[1] for png in (few, many)]
    assert heights[1] > heights[0] + 300


@needs_matplotlib
def test_a_png_has_the_size_of_a_plot_and_an_svg_is_the_same_each_time(front: Chart) -> None:
    png = plots.draw(front, "png")
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    assert width > 700 and height > 400
    svg = plots.draw(front, "svg")
    assert b"<svg" in svg and svg == plots.draw(front, "svg")


@needs_matplotlib
def test_a_single_point_and_words_with_dollar_signs_can_be_drawn() -> None:
    one = Chart("n", "t", "x", "y", (Series("s", (Mark(1.0, 2.0, "l", ("r",)),), "straight"),), "")
    assert plots.draw(one, "png").startswith(b"\x89PNG")
    heat = HeatMap(
        "h", "t", "token", "layer", "v", ("0",), ("$x", "y$", "$"), [[0.1, None, 1.0]], columns_vertical=True
    )
    assert plots.draw_heat_map(heat, "png").startswith(b"\x89PNG")

from __future__ import annotations

from pathlib import Path

import pytest

from stored_runs import ffn_record, write_calibration, write_evaluation, write_kernels, write_pair
from widecli.errors import UsageError
from widecli.report.charts import Chart, front_chart
from widecli.report.ffn_time import FfnTime, ffn_fronts, ffn_times, without_time
from widecli.report.find import find_runs
from widecli.report.load import load
from widecli.report.pareto import Front
from widecli.report.points import Point, points
from widecli.report.report import build, html_page
from widecli.report.summaries import front_table
from widecli.report.sweeps import sweeps

# `skipped(0.5)` of the stored runs: the FFN's rate is 0.4, so 0.6 of it runs
PERPLEXITIES = {(16, None): 50.0, (64, None): 60.0, (16, 64): 55.0, (16, 16): 90.0}


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Dense, bits at G 16 and 64, 16 and 64 patterns at G 16, and what their kernels take."""
    write_evaluation(tmp_path, "dense", perplexity=20.0, accuracy=None)
    for (group_size, count), perplexity in PERPLEXITIES.items():
        mode = "wide" if count is None else "patterns"
        options = {"group_size": group_size, "patterns": count, "mode": mode, "accuracy": None}
        write_pair(tmp_path, f"g{group_size}-c{count}", perplexity=perplexity, **options)  # type: ignore[arg-type]
    patterns = [ffn_record(16, 9.0, patterns=64, bits=25.0), ffn_record(16, 8.0, patterns=16, bits=27.0)]
    write_kernels(tmp_path / "kernels" / "patterns.json", patterns)
    write_kernels(tmp_path / "kernels" / "bits.json", [ffn_record(64, 6.5)])
    return tmp_path


def read(folder: Path) -> tuple[list[Point], list[FfnTime]]:
    found = find_runs([folder])
    return points(load(found.runs).frame), ffn_times(found.documents)


def only_front(folder: Path) -> Front:
    (front,) = ffn_fronts(*read(folder))
    return front


def by_kind(front: Front) -> dict[tuple[object, object], tuple[float, bool]]:
    return {
        (c.point.group_size, c.point.patterns): (c.gain.value, c.dominated_by is not None) for c in front.candidates
    }


def test_bits_and_patterns_are_joined_with_their_own_times(study: Path) -> None:
    front = only_front(study)
    assert (front.quality, front.gain) == ("perplexity wikitext2", "ffn time llama-3.1-8b T 16384")
    assert by_kind(front) == {
        (None, None): (1.0, False),
        (16, None): (pytest.approx(2.6), True),  # the median of both records; dense is better on both axes
        (64, None): (pytest.approx(0.65), False),
        (16, 64): (pytest.approx(0.9), False),
        (16, 16): (pytest.approx(0.8), True),  # bits at G 64 take less and keep more
    }
    assert [c.gain.value for c in front.front] == pytest.approx([0.65, 0.9, 1.0])  # less time, worse perplexity
    assert [c.quality.value for c in front.front] == [60.0, 55.0, 20.0]


def test_every_point_names_its_runs_and_files_and_the_labels_say_what_is_of_what(study: Path) -> None:
    front = only_front(study)
    chart = front_chart(front)
    marks = {mark.label: mark for series in chart.series if series.dots for mark in series.marks}
    assert marks["patterns, S 50 %, G 16, C 64, 300 steps"].runs == ("eval-g16-c64", "patterns.json")
    assert marks["wide, S 50 %, G 64, 300 steps"].runs == ("eval-g64-cNone", "bits.json")
    assert "timed at density 0.5, the model runs 0.60 of its FFN" in marks["wide, S 50 %, G 64, 300 steps"].note
    assert chart.x_label == "FFN time in llama-3.1-8b shapes, 16,384 tokens, % of dense" and chart.x_percent
    assert "Quality is that of tiny, time that of one FFN in llama-3.1-8b shapes" in chart.caption
    table = front_table(front)
    assert table.caption == front.caption and {"flops", "note"} <= {column.key for column in table.columns}
    rows = {row["configuration"]: row for row in table.rows}
    assert rows["dense"]["gain"].value == 1.0 and rows["dense"]["flops"].value == 0.0  # type: ignore[union-attr]


def edges(chart: Chart) -> dict[str, list[float]]:
    return {series.name: [mark.x for mark in series.marks] for series in chart.series if not series.dots}


def test_bits_and_patterns_have_a_front_each(study: Path) -> None:
    chart = front_chart(only_front(study))
    assert edges(chart) == {
        "front of bits": pytest.approx([0.65, 1.0]),
        "front of patterns": pytest.approx([0.8, 0.9, 1.0]),
    }
    # left of a point only the one before it can be had: the quality changes after x has moved on
    assert {series.line for series in chart.series if not series.dots} == {"steps after"}
    page = html_page(build([study]))
    assert 'class="line edge dotted"' in page and "tiny: token perplexity, wikitext2 against FFN time" in page


def test_a_name_stands_once_at_the_best_of_its_kind(study: Path) -> None:
    changes = ("train.learning_rate=0.1",)
    write_pair(
        study, "worse", perplexity=58.0, group_size=16, patterns=64, mode="patterns", accuracy=None, changes=changes
    )
    chart = front_chart(only_front(study))
    assert {text: mark.y for mark, text in chart.named} == {
        **{"dense": 20.0, "G 16": 50.0, "G 64": 60.0},
        **{"G 16, C 64": 55.0, "G 16, C 16": 90.0},
    }


def test_sweeps_of_patterns_say_how_many(study: Path) -> None:
    write_pair(study, "g64-c64", perplexity=66.0, group_size=64, patterns=64, mode="patterns", accuracy=None)
    (sweep,) = sweeps(read(study)[0])
    assert sorted(name for name, _ in sweep.lines) == ["patterns, S 50 %, C 64, 300 steps", "wide, S 50 %, 300 steps"]


def test_what_was_not_timed_is_left_out_and_said(study: Path) -> None:
    write_pair(study, "g64-c64", perplexity=66.0, group_size=64, patterns=64, mode="patterns", accuracy=None)
    write_pair(study, "s25", perplexity=30.0, sparsity=0.25, group_size=16, accuracy=None)  # runs 0.85 of its FFN
    write_pair(study, "token", perplexity=99.0, mode="token", accuracy=None)
    made, times = read(study)
    assert by_kind(ffn_fronts(made, times)[0]).keys() == {(None, None), *PERPLEXITIES}
    told = without_time(made, times)
    assert len(told) == 3 and all("no FFN time for 1 configuration" in line for line in told)
    assert any("64 patterns of G 64 are not timed" in line for line in told)
    assert any("S 25 %" in line and "not within 0.15" in line for line in told)
    assert list(build([study]).notes) == told


def test_the_nearest_density_of_the_most_tokens_counts(study: Path) -> None:
    records = [
        ffn_record(64, 7.5, density=0.6),
        ffn_record(64, 2.0, rows=4096, density=0.6),
        ffn_record(64, 1.0, density=0.6, masks="layers.3"),  # recorded masks of another model
        ffn_record(64, 1.0, density=0.6, dtype="fp32"),
        ffn_record(64, 1.0, density=0.6, op="gemm_mn"),
        {"left_out": "T=1"},
    ]
    write_kernels(study / "kernels" / "more.json", records)
    assert by_kind(only_front(study))[64, None][0] == pytest.approx(0.75)


def test_kernels_alone_are_nothing_to_report_and_runs_alone_have_no_times(study: Path) -> None:
    write_calibration(study / "other", "x")
    assert ffn_fronts(*read(study / "other")) == [] and build([study / "other"]).notes == ()
    with pytest.raises(UsageError, match="2 records found hold no calibration"):
        build([study / "kernels"])


def test_the_records_of_the_repository_hold_times_of_bits_and_patterns(repository: Path) -> None:
    times = ffn_times(find_runs([repository / "reports" / "kernels"]).documents)
    kinds = {(time.group_size, time.patterns) for time in times if time.density == 0.5}
    assert {(16, None), (64, None), (16, 16), (16, 64), (16, 256)} <= kinds
    assert {time.where for time in times} == {("llama-3.1-8b", 16384, "NVIDIA H200")}
    assert all(0.05 < time.share < 4 for time in times)

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stored_runs import layout_result, write_calibration, write_training_speed
from widecli.errors import UsageError
from widecli.report.find import find_runs
from widecli.report.report import build, document_of, html_page
from widecli.report.scaling import ScalingPoint, scaling_points
from widecli.report.scaling_view import scaling_charts, scaling_table
from widecli.report.tables import Value, markdown


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """One, two and four cards; `offloaded` on one card alone."""
    folder = tmp_path / "speed"
    one = [layout_result("whole", 1, 1000.0), layout_result("offloaded", 1, 400.0, peak=20.0, estimated=18.0)]
    write_training_speed(folder / "one.json", 1, one)
    two = [layout_result("whole", 2, 1800.0), layout_result("dealt", 2, 1600.0, peak=30.0, estimated=30.0)]
    write_training_speed(folder / "two.json", 2, two)
    write_training_speed(folder / "four.json", 4, [layout_result("dealt", 4, 3000.0)], batch=32)
    return folder


def rows(folder: Path) -> dict[tuple[object, object], dict[str, Value]]:
    table = scaling_table(scaling_points(find_runs([folder]).documents))
    return {(row["layout"], row["cards"]): dict(row) for row in table.rows}


def test_a_row_says_what_more_cards_give_and_what_the_estimate_is_worth(measured: Path) -> None:
    found = rows(measured)
    assert found.keys() == {("whole", 1), ("offloaded", 1), ("whole", 2), ("dealt", 2), ("dealt", 4)}
    dealt = found["dealt", 2]
    assert dealt["speedup"] == pytest.approx(1.6) and dealt["efficiency"] == pytest.approx(0.8)  # over `whole` on one
    assert (dealt["model"], dealt["batch"], dealt["sequence"], dealt["peak_gib"]) == ("Llama-3.1-8B", 8, 4096, 30)
    assert dealt["shape"] == "32 layers, D 4096, D' 14336, 32/8 heads"
    assert dealt["runs"] == "two.json" and str(dealt["command"]).startswith("torchrun --nproc-per-node 2 -m widecli.")
    assert found["whole", 2]["speedup"] == pytest.approx(1.8)
    assert found["dealt", 4]["speedup"] == pytest.approx(3.0)  # 32 on four cards beside 8 on one
    assert found["whole", 1]["speedup"] is None and found["whole", 1]["estimate_error"] == pytest.approx(0.1)
    assert found["offloaded", 1]["estimate_error"] == pytest.approx(-0.1)
    assert found["whole", 1]["hours"] == pytest.approx(10_000 * 16 * 4096 / 1000 / 3600)
    assert found["whole", 1]["hours_tenth"] == pytest.approx(1_000 * 16 * 4096 / 1000 / 3600)


def test_what_was_measured_otherwise_is_compared_with_nothing(tmp_path: Path) -> None:
    write_training_speed(tmp_path / "one.json", 1, [layout_result("whole", 1, 1000.0)], batch=16)
    write_training_speed(tmp_path / "two.json", 2, [layout_result("whole", 2, 1800.0)], batch=8)
    assert rows(tmp_path)["whole", 2]["speedup"] is None
    write_training_speed(
        tmp_path / "one.json", 1, [layout_result("whole", 1, 1000.0)], changes=("model.dtype=float32",)
    )
    assert rows(tmp_path)["whole", 2]["speedup"] is None
    write_training_speed(tmp_path / "one.json", 1, [layout_result("whole, checkpointing", 1, 1000.0)])
    assert rows(tmp_path)["whole", 2]["speedup"] is None


def test_the_same_global_batch_goes_before_the_same_batch_a_card(tmp_path: Path) -> None:
    write_training_speed(tmp_path / "small.json", 1, [layout_result("whole", 1, 1000.0)], batch=8)
    write_training_speed(tmp_path / "large.json", 1, [layout_result("whole", 1, 1250.0)], batch=16)
    write_training_speed(tmp_path / "two.json", 2, [layout_result("whole", 2, 2000.0)], batch=16)
    assert rows(tmp_path)["whole", 2]["speedup"] == pytest.approx(1.6)


def test_the_plot_starts_on_one_card_and_ends_beside_the_ideal(measured: Path) -> None:
    (chart,) = scaling_charts(scaling_points(find_runs([measured]).documents))
    lines = {series.name: [(mark.x, mark.y) for mark in series.marks] for series in chart.series}
    assert lines == {
        "whole, batch 8": [(1, 1000), (2, 1800)],
        "dealt, batch 8": [(1, 1000), (2, 1600)],
        "dealt, batch 8 a card": [(1, 1000), (4, 3000)],
        "offloaded, batch 8": [(1, 400)],
        "ideal, from whole": [(1, 1000), (4, 4000)],
    }
    assert [series.name for series in chart.series if not series.dots] == ["ideal, from whole"]
    assert all(mark.runs for series in chart.series if series.dots for mark in series.marks)


def test_one_card_alone_makes_a_table_and_no_plot(tmp_path: Path) -> None:
    write_training_speed(tmp_path / "one.json", 1, [layout_result("whole", 1, 1000.0, peak=None)])
    points = scaling_points(find_runs([tmp_path]).documents)
    assert scaling_charts(points) == []
    assert {"peak_gib", "speedup"}.isdisjoint(column.key for column in scaling_table(points).columns)


def test_earlier_documents_are_read(tmp_path: Path) -> None:
    path = write_training_speed(tmp_path / "old.json", 1, [])
    old = {
        key: value for key, value in json.loads(path.read_text()).items() if key not in ("command", "shape", "ranks")
    }
    old["results"] = [{"variant": "bf16, eager", "tokens_per_second": 500.0, "peak_memory_bytes": 2**30}]
    old["environment"]["command_line"] = ["speed.py", "smollm2_s50_g64", "--steps", "21"]
    path.write_text(json.dumps(old))
    (row,) = rows(tmp_path).values()
    assert (row["layout"], row["cards"], row["batch"], row["peak_gib"]) == ("bf16, eager", 1, 8, 1)
    assert row["command"] == "python -m widecli.train.speed smollm2_s50_g64 --steps 21"


def test_documents_stand_in_the_report_with_their_files(measured: Path) -> None:
    write_calibration(measured, "x")
    report = build([measured])
    page, document = html_page(report), document_of(report)
    assert page.count("Training speed by layout and cards</h") == 1 and "Llama-3.1-8B: training speed by cards" in page
    assert page.count('href="#run-two.json"') == 2 and 'id="run-two.json"' in page
    assert [entry["file"] for entry in document["measurements"]] == ["four.json", "one.json", "two.json"]
    assert len(document["training_speed"]) == 5
    (table,) = [table for table in report.tables() if table.name == "training-speed"]
    assert "| dealt | 2 | 8 | 1 | 4096 | 1,600 | 1.60x | 80.0 | 30.00 | 30.00 | 0.0 |" in markdown(table)


def test_files_are_named_directly_and_others_refused(measured: Path) -> None:
    report = build([measured / "one.json"])
    assert isinstance(report.scaling[0], ScalingPoint) and report.models == ()
    assert "1 file on Llama-3.1-8B" in html_page(report)
    other = measured.parent / "other.json"
    other.write_text('{"schema": "something/1"}')
    with pytest.raises(UsageError, match="holds no measurements"):
        build([other])


def test_what_cannot_be_read_is_named_with_its_reason(measured: Path) -> None:
    (measured / "torn.json").write_text('{"schema": "wide.train_speed/1", "resul')
    (measured / "newer.json").write_text('{"schema": "wide.train_speed/2"}')
    (measured / "odd.json").write_text('{"schema": "wide.train_speed/1", "results": {"a": 1}}')
    (measured / "foreign.json").write_text("[1]")
    found = find_runs([measured])
    assert {document.label for document in found.documents} == {"one.json", "two.json", "four.json"}
    reasons = {skipped.path.name: skipped.reason for skipped in found.skipped}
    assert reasons.keys() == {"torn.json", "newer.json", "odd.json"}
    assert "cannot be read" in reasons["torn.json"] and "'wide.train_speed/2'" in reasons["newer.json"]

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from stored_runs import speed_point, write_profile
from widecli.report.charts import throughput_chart
from widecli.report.find import find_runs
from widecli.report.report import build, html_page
from widecli.report.summaries import share_table
from widecli.report.sweeps import ThroughputPoint, share_curves, throughput

SHARES = (0.0, 0.2, 0.5, 0.7)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Speed-ups by share for two group sizes and both phases, and a run with two shares at another prompt."""
    for phase in ("ttft", "tpot"):
        points = [
            speed_point(phase, 1 + share * gain, sparsity=share, group_size=size, masks="random")
            for size, gain in ((64, 1.0), (512, 2.0))
            for share in SHARES
        ]
        write_profile(tmp_path, f"{phase}-shares", of=None, points=points, model="llama-3.1-8b")
    two = [speed_point("ttft", 1.1, sparsity=share, prompt=4096, masks="random") for share in (0.0, 0.5)]
    write_profile(tmp_path, "two", of=None, points=two, model="llama-3.1-8b")
    return tmp_path


def read(folder: Path) -> list[ThroughputPoint]:
    runs = find_runs([folder]).runs
    return throughput(runs, {run.label: "llama-3.1-8b" for run in runs})


def test_a_curve_holds_what_one_run_measured_at_three_shares_or_more(sweep: Path) -> None:
    curves = share_curves(read(sweep))
    assert [(c[0].phase, c[0].group_size, c[0].run) for c in curves] == [
        ("ttft", 64, "profile-ttft-shares"),
        ("ttft", 512, "profile-ttft-shares"),
        ("tpot", 64, "profile-tpot-shares"),
        ("tpot", 512, "profile-tpot-shares"),
    ]
    assert all([point.sparsity for point in curve] == list(SHARES) for curve in curves)


def test_the_table_has_a_column_for_each_share_and_the_papers_figures_labelled(sweep: Path) -> None:
    table = share_table("llama-3.1-8b", read(sweep))
    assert [c.head for c in table.columns if c.kind == "times"] == ["0 %", "20 %", "50 %", "70 %"]
    ours = {(r["phase"], r["group_size"]): r for r in table.rows if r["masks"] == "random"}
    assert ours["TTFT", 512]["share 0.7"] == pytest.approx(2.4) and ours["TPOT", 64]["share 0"] == 1.0
    published = {r["phase"]: r for r in table.rows if "runs" not in r}
    assert published.keys() == {"TTFT, published", "TPOT, published"}
    assert published["TTFT, published"]["share 0.5"] == 1.68 and published["TPOT, published"]["share 0.5"] == 1.55
    assert published["TTFT, published"]["masks"] == "WIDE, Llama-3.1-8B, RTX 5090, whole model"


def test_the_plot_has_a_line_for_each_group_size_and_the_papers_point(sweep: Path) -> None:
    charts = {chart.name: chart for chart in throughput_chart("llama-3.1-8b", read(sweep))}
    chart = charts["throughput-llama-3.1-8b-ttft-sparsity"]
    lines = {series.name: [mark.x for mark in series.marks] for series in chart.series}
    assert lines == {
        "batch 1, prompt 1024, G 64": list(SHARES),
        "batch 1, prompt 1024, G 512": list(SHARES),
        "published: WIDE, Llama-3.1-8B, RTX 5090, whole model": [0.5],
    }
    (published,) = chart.series[-1].marks
    assert published.y == 1.68 and published.hollow and "not measured here, RTX 5090" in published.note
    assert all(mark.runs == ("profile-ttft-shares",) for series in chart.series[:-1] for mark in series.marks)


def test_two_shares_are_no_curve_and_stand_beside_nothing_published(sweep: Path) -> None:
    measured = read(sweep / "profile-two")
    assert share_table("m", measured).rows == ()
    (chart,) = [c for c in throughput_chart("m", measured) if c.name.endswith("sparsity")]
    assert not any(series.published for series in chart.series)


def test_random_and_learned_masks_are_told_apart_in_one_plot(tmp_path: Path) -> None:
    points = [speed_point("ttft", 1.5, prompt=p, masks=m) for m in ("random", "learned") for p in (1024, 4096)]
    write_profile(tmp_path, "x", of=None, points=points)
    (chart,) = throughput_chart("m", read(tmp_path))
    assert [series.name.rsplit(", ", 1)[-1] for series in chart.series] == ["random masks", "learned masks"]


def test_what_one_checkpoint_skips_by_itself_is_no_axis_and_of_two_it_is(tmp_path: Path) -> None:
    def record(name: str, shares: tuple[float, float]) -> None:
        points = [
            speed_point("ttft", 1.5, prompt=prompt, sparsity=share, masks="learned")
            for prompt, share in zip((1024, 4096), shares, strict=True)
        ]
        write_profile(tmp_path, name, of=None, points=points)

    record("one", (0.49, 0.5))
    (chart,) = throughput_chart("m", read(tmp_path))
    assert chart.name.endswith("ttft-prompt")
    assert {series.name: [mark.x for mark in series.marks] for series in chart.series} == {
        "batch 1, G 64": [1024, 4096]
    }
    record("two", (0.24, 0.25))
    by_share = next(c for c in throughput_chart("m", read(tmp_path)) if c.name.endswith("sparsity"))
    assert [[mark.x for mark in series.marks] for series in by_share.series] == [[0.24, 0.49], [0.25, 0.5]]


def test_the_page_and_the_page_of_the_profiles_show_the_same(sweep: Path, repository: Path) -> None:
    assert "llama-3.1-8b: speed-up by the share skipped" in html_page(build([sweep]))
    page = renderer(repository)
    text = page.curves(page.load(sweep))
    row = "| TTFT | 1 | 1024 | 512 | random | 1.00x | 1.40x | 2.00x | 2.40x | profile-ttft-shares |"
    assert row in text and "TTFT, published |  |  |  | WIDE, Llama-3.1-8B, RTX 5090, whole model |" in text
    assert page.curves(page.load(sweep / "nothing")) == ""


def renderer(repository: Path) -> ModuleType:
    folder = repository / "reports"
    specification = importlib.util.spec_from_file_location("render_profile", folder / "render_profile.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])
        specification.loader.exec_module(module)
    return module

"""`wide profile` as a whole on a CPU: every option, the document's form, what the report makes of it, bad input."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from whole_commands import SHAPE, Outcome, Wide

from widecli.profiling import energy, measurement, memory
from widecli.profiling.hugging_face import HuggingFace

TIMES = {"p50_ms", "p90_ms", "p99_ms", "min_ms", "mean_ms", "n"}
POINT = {"phase", "batch", "prompt", "gen", "sparsity", "group_size", "masks", "skip_rate", "recorded", "speedup"}
POINT |= {"mode", "compensation", "dense", "routed", "hugging_face", "run"}
ALWAYS = TIMES | {"tokens_per_second", "bound_ms", "bound_reached"}


def check_point(
    point: dict[str, Any], extra: frozenset[str] | set[str] = frozenset(), *, compared: bool = False
) -> None:
    """The documented form."""
    assert list(point)[:7] == ["phase", "batch", "prompt", "gen", "sparsity", "group_size", "masks"]
    assert set(point) == POINT
    assert (point["hugging_face"] is not None) == compared
    if compared:
        assert set(point["hugging_face"]) == TIMES | {"tokens_per_second", "attention", "compiled", "in_turn"}
    assert point["recorded"] is False  # no GPU, no graphs
    assert point["phase"] in ("ttft", "tpot") and point["masks"] in ("learned", "random")
    for side in ("dense", "routed"):
        figures = point[side]
        assert set(figures) - {"fixed_share"} == ALWAYS | extra
        assert 0 < figures["min_ms"] <= figures["p50_ms"] <= figures["p90_ms"] <= figures["p99_ms"]
        assert figures["n"] >= 3 * (1 if point["phase"] == "ttft" else point["gen"] - 1)
        assert figures["bound_reached"] == pytest.approx(figures["bound_ms"] / figures["p50_ms"])
        tokens = point["batch"] * (point["prompt"] if point["phase"] == "ttft" else 1)
        assert figures["tokens_per_second"] == pytest.approx(1e3 * tokens / figures["p50_ms"])
    assert point["speedup"] == pytest.approx(point["dense"]["p50_ms"] / point["routed"]["p50_ms"])
    assert Path(point["run"], "summary.json").is_file()


def test_the_report_draws_what_a_sweep_over_shares_measured(wide: Wide, workplace: Path) -> None:
    done = wide("profile", *SHAPE, "--ttft", "--prompt", 8, "--sparsity", "0,0.3,0.6", "--G", "64,128", "--json")
    assert done.code == 0, done.err
    assert wide("report", "--format", "csv,md,html", "--out", "out").code == 0
    rows = list(csv.DictReader((workplace / "out" / "tables" / "shares-128x256x2.csv").open()))
    measured = {(p["group_size"], f"share {p['sparsity']:g}"): p["speedup"] for p in done.document["points"]}
    routed = [row for row in rows if "published" not in row["phase"]]
    assert {(float(row["group_size"]), key): float(row[key]) for row in routed for key in row if key[:6] == "share "
            and row[key]} == measured  # fmt: skip
    assert [row["runs"] for row in routed] == [Path(done.document["run_dir"]).name] * 2
    assert "128x256x2: TTFT speed-up by sparsity" in (workplace / "out" / "report.html").read_text()


def test_a_shape_over_a_grid(wide: Wide, workplace: Path) -> None:
    done = wide("profile", *SHAPE, "--batch", "1,2", "--prompt", 8, "--sparsity", "0,0.5", "--G", "64,128", "--json")
    assert done.code == 0, done.err
    document = done.document
    assert document["schema"] == "wide.summary/1" and document["command"] == "profile"
    assert (document["device"], document["dtype"], document["plan"]) == ("cpu", "float32", None)
    assert document["peaks"]["source"] == "measured" and document["points_schema"] == "wide.points/4"
    points = document["points"]
    keys = ("phase", "batch", "prompt", "sparsity", "group_size")
    assert [tuple(point[key] for key in keys) for point in points] == [
        (phase, batch, prompt, sparsity, size)
        for prompt in (8,)
        for batch in (1, 2)
        for phase in ("ttft", "tpot")
        for size in (64, 128)
        for sparsity in (0.0, 0.5)
    ]
    for point in points:
        check_point(point)
        assert point["masks"] == "random" and point["gen"] == 4
        assert point["skip_rate"]["mean"] == pytest.approx(point["sparsity"], abs=0.25)  # two layers of few groups
    for nothing, half in zip(points[::2], points[1::2], strict=True):
        assert nothing["skip_rate"]["mean"] == 0 and nothing["dense"] == half["dense"]
        assert nothing["routed"]["bound_ms"] > nothing["dense"]["bound_ms"]  # routers still run
        assert nothing["routed"]["bound_ms"] > half["routed"]["bound_ms"]
    assert "no GPU" in done.err and "on the CPU, float32, plus loading" in done.err
    assert any("saves no time" in note for note in document["notes"])
    run = Path(document["run_dir"])
    assert run.name.startswith("profile-128x256x2-random-")
    assert json.loads((run / "summary.json").read_text()) == document
    assert len((run / "metrics.jsonl").read_text().splitlines()) == len(points)
    assert (run / "environment.json").is_file() and "128x256x2" in (run / "recipe.yaml").read_text()
    report = wide("report", "--format", "csv", "--out", "out")
    assert report.code == 0, report.err
    tables = "".join(path.read_text() for path in (workplace / "out").rglob("*.csv"))
    assert tables.count("TTFT") == tables.count("TPOT") == 8


def test_the_baseline_may_be_the_librarys(wide: Wide) -> None:
    done = wide("profile", *SHAPE, "--tpot", "--prompt", 8, "--dense", "library", "--json")
    assert done.code == 0, done.err
    assert done.document["settings"]["dense"] == "library"
    assert any("changes nothing here" in note for note in done.document["notes"]), "on a CPU"
    for bad, sentence in (
        (("--wandb", "foo"), "--wandb must be one of auto, online, offline, off, got 'foo'"),
        (("--seconds", "inf"), "--seconds must be a finite time"),
    ):
        wide("profile", *SHAPE, "--prompt", 8, *bad, "--dry-run").refused_with(sentence)
    refused = wide("profile", *SHAPE, "--dense", "theirs")
    assert refused.code == 2 and "--dense must be one of own, library, got 'theirs'" in refused.err


@pytest.mark.parametrize("fits", [True, False], ids=["in turn", "alone"])
def test_transformers_stands_beside_where_asked(
    wide: Wide, workplace: Path, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    monkeypatch.setattr(measurement, "fits_beside", lambda *arguments: fits)
    done = wide("profile", *SHAPE, "--batch", 2, "--prompt", 8, "--sparsity", "0,0.5", "--compare-hf", "--json")
    assert done.code == 0, done.err
    points = done.document["points"]
    assert len(points) == 4
    for point in points:
        check_point(point, compared=True)
        theirs = point["hugging_face"]
        assert theirs["in_turn"] is fits and theirs["compiled"] is False and theirs["attention"] is None
        assert theirs["n"] >= 3 * (1 if point["phase"] == "ttft" else 3)
        tokens = 2 * (8 if point["phase"] == "ttft" else 1)
        assert theirs["tokens_per_second"] == pytest.approx(1e3 * tokens / theirs["p50_ms"])
    assert points[0]["hugging_face"] == points[1]["hugging_face"] != points[2]["hugging_face"]
    report = wide("report", "--format", "csv", "--out", "out")
    assert report.code == 0, report.err
    tables = "".join(path.read_text() for path in (workplace / "out").rglob("*.csv"))
    assert "transformers" in tables


def test_transformers_that_does_not_fit_is_said_and_left_out(wide: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_token(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(HuggingFace, "first_token", first_token)
    monkeypatch.setattr(HuggingFace, "may_set_up", property(lambda self: True))
    done = wide("profile", *SHAPE, "--prompt", 8, "--compare-hf", "--json")
    assert done.code == 0, done.err
    first, further = done.document["points"]
    assert first["hugging_face"] is None and further["hugging_face"]["n"] >= 9
    assert "transformers, TTFT at batch 1, prompt 8: out of memory" in done.document["notes"]
    monkeypatch.setattr(HuggingFace, "may_set_up", property(lambda self: False))
    done = wide("profile", *SHAPE, "--prompt", 8, "--compare-hf", "--overwrite", "--json")
    assert [point["hugging_face"] for point in done.document["points"]] == [None, None]
    assert any("no time to compile it" in note for note in done.document["notes"])


@pytest.mark.slow
def test_what_compensation_costs_is_seen_in_one_run(wide: Wide, workplace: Path) -> None:
    grid = ("--prompt", 16, "--sparsity", "0.25,0.5,0.75", "--G", 16, "--throughput", "--breakdown", "--batch", "1,2")
    done = wide("profile", *SHAPE, *grid, "--compensation", "none,8,0", "--run-dir", "kept/one", "--json")
    assert done.code == 0, done.err
    assert done.document["settings"]["compensations"] == [None, 8, 0]
    made = [None, {"mean": True, "rank": 8}, {"mean": True, "rank": 0}]
    keys = ("batch", "phase", "compensation", "sparsity")
    assert [tuple(point[key] for key in keys) for point in done.document["points"]] == [
        (batch, phase, compensation, sparsity)
        for batch in (1, 2)
        for phase in ("ttft", "tpot")
        for compensation in made
        for sparsity in (0.25, 0.5, 0.75)
    ]
    for point in done.document["points"]:
        check_point(point, {"breakdown_ms", "bound_parts_ms"})
    without, ranked, means = (point["routed"]["bound_parts_ms"] for point in done.document["points"][1:9:3])
    for part in ("norm_route", "o", "down"):
        assert without[part] < ranked[part] and without[part] <= means[part]
    assert len(done.document["throughput"]) == 2 * 3 * 3
    assert [most["compensation"] for most in done.document["throughput"][:9:3]] == made
    for words in ("means and rank 8", "rank 8 ", "none", "compen-"):
        assert words in done.err
    metrics = [json.loads(line) for line in (workplace / "kept" / "one" / "metrics.jsonl").read_text().splitlines()]
    assert [line["ttft compensation_rank"] for line in metrics[:9]] == [None] * 3 + [8] * 3 + [0] * 3
    wide("profile", *SHAPE, *grid, "--run-dir", "kept/one", "--resume").refused_with("compensations was [None, 8, 0]")
    report = wide("report", "kept/one", "--format", "csv,html", "--out", "out")
    assert report.code == 0, report.err
    rows = list(csv.DictReader((workplace / "out" / "tables" / "shares-128x256x2.csv").open()))
    shown = [row["compensation"] for row in rows if "published" not in row["phase"]]
    assert shown == ["", "means", "means and rank 8"] * 4


def test_new_runs_compensate_and_old_records_say_nothing_of_it(
    wide: Wide, workplace: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(repository / "reports"))
    import render_profile

    done = wide("profile", *SHAPE, "--tpot", "--prompt", 8, "--run-dir", "kept/new", "--json")
    assert done.code == 0, done.err
    assert [point["compensation"] for point in done.document["points"]] == [{"mean": True, "rank": 32}]
    old = json.loads((workplace / "kept" / "new" / "summary.json").read_text())
    del old["points"][0]["compensation"], old["settings"]["compensations"], old["identity"]["settings"]["compensations"]
    (workplace / "kept" / "old").mkdir()
    (workplace / "kept" / "old" / "summary.json").write_text(json.dumps(old))
    shutil.copy(workplace / "kept" / "new" / "environment.json", workplace / "kept" / "old")
    render_profile.render(workplace / "kept")
    text = (workplace / "kept" / "README.md").read_text()
    assert "| random, G=64, means and rank 32 |" in text and "| random, G=64 |" in text
    report = wide("report", "kept/old", "kept/new", "--format", "csv,md,html", "--out", "out")
    assert report.code == 0, report.err
    again = ("profile", *SHAPE, "--tpot", "--prompt", 8, "--run-dir", "kept/old", "--resume")
    wide(*again).refused_with("compensations was None and is now [32]")


def test_memory_energy_breakdown_and_throughput(wide: Wide) -> None:
    options = ("--memory", "--energy", "--breakdown", "--throughput", "--tpot", "--batch", "1,2", "--prompt", 8)
    done = wide("profile", *SHAPE, *options, "--json")
    assert done.code == 0, done.err
    document = done.document
    for point in document["points"]:
        check_point(point, {"memory", "breakdown_ms", "bound_parts_ms"})
        assert point["phase"] == "tpot"
        for side in ("dense", "routed"):
            parts, model = point[side]["breakdown_ms"], point[side]["memory"]["model"]
            assert {"qkv", "attention", "o", "norm_route", "gate_up", "down", "lm_head", "launch_gaps"} <= set(parts)
            assert sum(parts.values()) >= point[side]["p50_ms"] * 0.999
            assert model["total_bytes"] == sum(v for k, v in model.items() if k != "total_bytes")
            assert (model["routers_bytes"] > 0) == (side == "routed")
            assert point[side]["memory"]["peak_bytes"] is None
        assert 0 < point["dense"]["fixed_share"] < 1
    (most,) = document["throughput"]
    rates = [point["dense"]["tokens_per_second"] for point in document["points"]]
    assert most["dense"]["tokens_per_second"] == max(rates) and most["dense"]["batch"] in (1, 2)
    assert any("energy is not measured" in note for note in document["notes"])
    assert "launch_gaps" in done.err or "lm_head" in done.err
    assert "cannot be skipped" in done.err and "tokens/s at batch" in done.err


def test_its_records_become_a_page(
    wide: Wide, workplace: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(repository / "reports"))
    import render_profile

    shares = ("--sparsity", "0,0.25,0.5")
    first = wide(
        "profile", *SHAPE, *shares, "--prompt", 8, "--breakdown", "--compare-hf", "--run-dir", "kept/both", "--json"
    )
    other = ("--G", 16, "--compensation", "none")
    second = wide("profile", *SHAPE, "--prompt", 8, *other, "--run-dir", "kept/other", "--json")
    assert first.code == second.code == 0, first.err + second.err
    (workplace / "kept" / "notes.json").write_text('{"both": "launches limit it"}')
    records = render_profile.render(workplace / "kept")
    assert [record.name for record in records] == ["both", "other"]
    text = (workplace / "kept" / "README.md").read_text()
    points = first.document["points"]
    for point in points:
        figures = [render_profile.milliseconds(point[side]["p50_ms"]) for side in ("dense", "routed")]
        masks = f"random, G=64, means and rank 32 | {100 * point['sparsity']:.1f}"
        start = f"| 128x256x2 | {point['phase'].upper()} | 1 | 8 | {masks} |"
        (row,) = [row for row in text[: text.index("## Nothing skipped")].splitlines() if row.startswith(start)]
        theirs = render_profile.milliseconds(point["hugging_face"]["p50_ms"])
        for shown in (*figures, theirs, f"{point['speedup']:.2f}x", f"{100 * point['routed']['bound_reached']:.1f}"):
            assert f" {shown} |" in row
    for title in ("Nothing skipped", "End to end", "By what is skipped", "Where the time goes", "Runs"):
        assert f"## {title}" in text
    assert "## Memory" not in text and "random, G=16 |" in text
    assert f"{100 * points[0]['speedup']:.1f} | `both` |" in text
    nothing, half = points[0], points[2]
    again = {point["phase"]: point for point in points if point["sparsity"] == 0.5}
    dense, routed = (again["ttft"][side]["p50_ms"] + 63 * again["tpot"][side]["p50_ms"] for side in ("dense", "routed"))
    assert f"| 50.0 | {dense / routed:.2f}x |" in text
    assert f"| {nothing['speedup']:.2f}x | " in text and f" | {half['speedup']:.2f}x | both |" in text
    assert "| gate and up | " in text and "  - launches limit it" in text
    table = render_profile.short(records)
    assert "TTFT, batch 1, prompt 8 | random, G=16 |" in table and "`both`" not in table, "that is a curve"
    few = [point for point in points if point["sparsity"] != 0.25]
    table = render_profile.short([records[0]._replace(summary=records[0].summary | {"points": few}), records[1]])
    assert table.count("TTFT, batch 1, prompt 8") == 2 and f"| {100 * nothing['speedup']:.1f} |" in table


def test_a_meter_adds_joules(wide: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    class Meter:
        def joules(self, call: Any) -> float:
            assert call()
            return 24.0

    monkeypatch.setattr(energy.EnergyMeter, "open", classmethod(lambda cls, device: (Meter(), "")))
    done = wide("profile", *SHAPE, "--energy", "--batch", 2, "--prompt", 8, "--json")
    assert done.code == 0, done.err
    for point in done.document["points"]:
        check_point(point, {"joules_per_token"})
        tokens = 2 * (8 if point["phase"] == "ttft" else 3)
        assert point["routed"]["joules_per_token"] == 24.0 / tokens


def test_a_checkpoint_decides_for_itself_on_real_text(
    wide: Wide, run: Outcome, workplace: Path, held_out: Path
) -> None:
    done = wide("profile", "calibrated", "--text", held_out, "--prompt", "16,32", "--gen", 4, "--seconds", 0, "--json")
    assert done.code == 0, done.err
    document = done.document
    assert document["checkpoint"].startswith("calibrated/checkpoints/") and document["plan"]["ffn_group_size"] == 16
    assert document["backbone"] == run.document["backbone"] and document["text"] == str(held_out)
    assert [point["phase"] for point in document["points"]] == ["ttft", "tpot"] * 2
    for point in document["points"]:
        check_point(point)
        assert point["masks"] == "learned" and point["group_size"] == 16
        assert point["sparsity"] == point["skip_rate"]["mean"]
        assert 0.1 < point["sparsity"] < 0.9
    report = wide("report", "calibrated", document["run_dir"], "--format", "csv", "--out", "out")
    assert report.code == 0, report.err
    tables = "".join(path.read_text() for path in (workplace / "out").rglob("*.csv"))
    assert "learned" in tables


def test_random_masks_on_a_checkpoint_take_any_rate_and_group_size(wide: Wide, run: Outcome) -> None:
    done = wide(
        *("profile", "calibrated", "--masks", "random", "--sparsity", 0.75, "--G", 32, "--prompt", 16, "--gen", 4),
        *("--ttft", "--seconds", 0, "--json"),
    )
    assert done.code == 0, done.err
    (point,) = done.document["points"]
    assert (point["masks"], point["sparsity"], point["group_size"]) == ("random", 0.75, 32)
    assert done.document["settings"]["compensations"] == []
    assert point["compensation"] == (done.document["plan"].get("compensation") or None), "its own"
    done = wide("profile", "calibrated", "--masks", "random", "--prompt", 8, "--tpot", "--compensation", "4", "--json")
    assert [point["compensation"] for point in done.document["points"]] == [{"mean": True, "rank": 4}]


def test_a_dtype_may_be_asked_for(wide: Wide) -> None:
    done = wide("profile", *SHAPE, "--dtype", "bfloat16", "--prompt", 8, "--tpot", "--json")
    assert done.code == 0, done.err
    assert done.document["dtype"] == "bfloat16" and done.document["points"][0]["routed"]["p50_ms"] > 0


def test_the_newest_checkpoint_is_taken(wide: Wide, run: Outcome, workplace: Path) -> None:
    for age, name in enumerate(["calibrate-b", "calibrate-a"]):
        shutil.copytree(workplace / "calibrated", workplace / "runs" / name)
        os.utime(workplace / "runs" / name, (1e9 - age, 1e9 - age))
    done = wide("profile", "--dry-run", "--json")
    assert done.code == 0, done.err
    assert "calibrate-b" in done.document["checkpoint"] and "the newest checkpoint" in done.err


def test_without_any_checkpoint_it_is_the_embedded_model(wide: Wide) -> None:
    done = wide("profile", "--dry-run", "--json")
    assert done.code == 0, done.err
    assert done.document["model"] == "smollm2-135m" and done.document["settings"]["masks"] == "random"
    assert "no checkpoint below runs/" in done.err


def test_a_dense_model_is_measured_with_random_masks(wide: Wide, model_folder: Path) -> None:
    arguments = ("--model", model_folder, "--G", 16, "--prompt", 8, "--gen", 3, "--seconds", 0, "--tpot", "--json")
    done = wide("profile", *arguments)
    assert done.code == 0, done.err
    check_point(done.document["points"][0])


def test_a_dry_run_estimates_and_writes_nothing(wide: Wide, workplace: Path) -> None:
    done = wide("profile", *SHAPE, "--dry-run", "--json")
    assert done.code == 0, done.err
    assert done.document["schema"] == "wide.dry_run/1" and done.document["seconds"] > 0
    assert [cell["phase"] for cell in done.document["cells"]] == ["ttft", "tpot"]
    assert not (workplace / "runs").exists()


def test_throughput_leaves_out_batches_that_do_not_fit(wide: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    from widecli.profiling import request

    arguments = (*SHAPE, "--throughput", "--prompt", 512, "--dry-run", "--json")
    whole = wide("profile", *arguments).document["settings"]["batches"]
    assert whole == [1, 2, 4, 8, 16, 32, 64]
    monkeypatch.setattr(request, "free_bytes", lambda device: 100 << 20)
    fewer = wide("profile", *arguments).document["settings"]["batches"]
    assert fewer == whole[: len(fewer)] and 1 < len(fewer) < 7


def test_a_finished_run_is_not_replaced_unasked(wide: Wide) -> None:
    arguments = ("profile", *SHAPE, "--tpot", "--prompt", 8)
    assert wide(*arguments).code == 0
    wide(*arguments).refused_with("holds a finished run", "--overwrite")
    assert wide(*arguments, "--overwrite").code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--shape", "llama-9"), ["no model shape 'llama-9'", "llama-3.1-8b", "qwen3-8b"]),
        (("--shape", "smollm2-135m", "--prompt", "8190"), ["8190", "8192", "--prompt"]),
        (("--shape", "128x256x2", "--model", "x"), ["one thing to measure", "--shape and --model"]),
        (("--shape", "128x256x2", "--batch", "1,x"), ["--batch", "'1,x'"]),
        (("--shape", "128x256x2", "--batch", "0"), ["--batch", "1 or more"]),
        (("--shape", "128x256x2", "--prompt", "-4"), ["--prompt", "'-4'"]),
        (("--shape", "128x256x2", "--sparsity", "1"), ["--sparsity", "below 1"]),
        (("--shape", "128x256x2", "--G", "48"), ["48", "16, 32, 64"]),
        (("--shape", "128x256x2", "--gen", "1"), ["--gen", "at least 2", "got 1"]),
        (("--shape", "128x256x2", "--masks", "learned"), ["no routers", "--masks random"]),
        (("--shape", "128x256x2", "--masks", "real"), ["learned or random", "'real'"]),
        (("--shape", "128x256x2", "--dtype", "int8"), ["--dtype", "bfloat16", "'int8'"]),
        (("--shape", "128x256x2", "--compensation", "-1"), ["--compensation takes none or ranks", "got '-1'"]),
        (("--shape", "128x256x2", "--compensation", "8,no"), ["--compensation takes none or ranks", "got '8,no'"]),
        (("--shape", "128x256x2", "--compensation", "200"), ["compensation.rank=200", "hidden size 128"]),
        (("calibrated", "--compensation", "8"), ["--G and --compensation need --masks random"]),
        (("nowhere",), ["nowhere", "neither a checkpoint"]),
        (("calibrated", "--sparsity", "0.5"), ["--sparsity, --G and --compensation need --masks random"]),
        (("calibrated", "--prompt", "200"), ["216", "128"]),
        (("calibrated", "--text", "missing.txt"), ["missing.txt"]),
    ],
)
def test_bad_input_is_one_sentence(wide: Wide, run: Outcome, arguments: tuple[str, ...], words: list[str]) -> None:
    wide("profile", *arguments).refused_with(*words)


def test_more_than_the_memory_names_the_largest_batch(wide: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 100 << 20)
    done = wide("profile", *SHAPE, "--batch", 5000, "--prompt", 512)
    done.refused_with("batch 5000 with 516 tokens each needs", "the largest batch that fits is")


def test_a_checkpoint_without_routers_is_refused(wide: Wide, run: Outcome, workplace: Path) -> None:
    (next((workplace / "calibrated" / "checkpoints").glob("step-000008")) / "router.safetensors").unlink()
    wide("profile", "calibrated").refused_with("lacks its router.safetensors")

"""`wide profile` that ends early, by a person or a scheduler, and goes on with --resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from whole_commands import SHAPE, Outcome, Wide

from widecli.profiling import measurement
from widecli.profiling.hugging_face import HuggingFace

Start = Callable[..., "subprocess.Popen[str]"]


def test_a_killed_run_goes_on_with_the_cells_that_it_has_not_measured(
    wide: Wide, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = ("--batch", "1,2", "--prompt", "8,16", "--sparsity", 0.5, "--run-dir", "kept")
    real, measured = measurement.Cell.measure, []

    def interrupted(cell: measurement.Cell) -> list[measurement.Point]:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append((cell._batch, cell._prompt))
        return real(cell)

    monkeypatch.setattr(measurement.Cell, "measure", interrupted)
    broken = wide("profile", *SHAPE, *grid)
    assert broken.code == 130 and "--resume continues it" in broken.err
    kept = json.loads((workplace / "kept" / "cells.json").read_text())["points"]
    assert len(kept) == 6  # both phases of three cells
    with (workplace / "kept" / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 6, "torn')  # of a cell that was cut off
    wide("profile", *SHAPE, *grid).refused_with("kept holds an unfinished run (--resume continues it)")
    wide("profile", *SHAPE, *grid, "--ttft", "--resume").refused_with("cannot be resumed: phases was", "--overwrite")

    left = wide("profile", *SHAPE, *grid, "--resume", "--dry-run", "--json")
    assert left.document["kept"] == 3 and "3 of 4 cells (a batch and a prompt each) are measured already" in left.err
    assert [(c["phase"], c["batch"], c["prompt"]) for c in left.document["cells"]] == [("ttft", 2, 16), ("tpot", 2, 16)]
    wide("profile", *SHAPE, *grid, "--dry-run").refused_with("kept holds an unfinished run (--resume continues it)")
    anew = wide("profile", *SHAPE, *grid, "--dry-run", "--overwrite", "--json").document
    assert (anew["kept"], len(anew["cells"])) == (0, 8) and left.document["seconds"] < anew["seconds"]
    wide("profile", *SHAPE, *grid, "--ttft", "--resume", "--dry-run").refused_with("cannot be resumed: phases was")
    assert json.loads((workplace / "kept" / "cells.json").read_text())["points"] == kept

    monkeypatch.setattr(measurement.Cell, "measure", real)
    whole = wide("profile", *SHAPE, *grid, "--resume", "--json")
    assert whole.code == 0 and whole.err.count("measured before") == 3
    points = whole.document["points"]
    assert [point for point in points if (point["batch"], point["prompt"]) in measured] == kept
    assert [(p["batch"], p["prompt"]) for p in points[::2]] == [(1, 8), (2, 8), (1, 16), (2, 16)]
    steps = [json.loads(line)["step"] for line in (workplace / "kept" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(8))
    assert not (workplace / "kept" / "cells.json").exists()

    nothing = wide("profile", *SHAPE, *grid, "--resume", "--dry-run", "--json")
    assert [nothing.document[key] for key in ("kept", "cells", "seconds")] == [4, [], 0]
    assert "nothing is left to measure" in nothing.err
    again = wide("profile", *SHAPE, *grid, "--resume", "--json")
    assert again.document == whole.document and "is finished already" in again.err
    wide("profile", *SHAPE, *grid, "--ttft", "--resume").refused_with("cannot be resumed: phases was")
    wide("profile", *SHAPE, *grid, "--resume", "--overwrite").refused_with("give one of them")
    wide("profile", *SHAPE, *grid, "--dtype", "bfloat16", "--resume").refused_with("device was the CPU, float32 and")


def test_a_scheduler_ends_a_run_as_resumable(wide: Wide, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = ("--ttft", "--batch", "1,2", "--prompt", 8, "--run-dir", "kept")
    real, measured = measurement.Cell.measure, []

    def told_to_stop(cell: measurement.Cell) -> list[measurement.Point]:
        if measured:
            os.kill(os.getpid(), signal.SIGTERM)
        measured.append(cell)
        return real(cell)

    monkeypatch.setattr(measurement.Cell, "measure", told_to_stop)
    wide("profile", *SHAPE, *grid).refused_with("stopped by a signal; --resume continues kept", code=75)
    monkeypatch.setattr(measurement.Cell, "measure", real)
    cells = workplace / "kept" / "cells.json"
    whole = cells.read_text()
    damaged = json.loads(whole)
    damaged["points"][0] = {}
    cells.write_text(json.dumps(damaged))
    wide("profile", *SHAPE, *grid, "--resume").refused_with("holds nothing that wide profile could continue")
    cells.write_text(whole)
    done = wide("profile", *SHAPE, *grid, "--resume")
    assert done.code == 0 and done.err.count("measured before") == 1


def test_only_a_profile_is_resumed_by_a_profile(wide: Wide, workplace: Path) -> None:
    other = workplace / "runs" / "calibrate-x"
    (other / "checkpoints").mkdir(parents=True)
    (other / "recipe.yaml").write_text("model: {name: 128x256x2}\n")
    (other / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n')
    again = ("profile", *SHAPE, "--prompt", 8, "--run-dir", other, "--resume")
    wide(*again).refused_with("holds nothing that wide profile could continue")
    (other / "summary.json").write_text('{"schema": "wide.summary/1", "command": "calibrate"}')
    wide(*again).refused_with("holds nothing that wide profile could continue")
    (other / "checkpoints" / "step-000001").mkdir()
    wide(*again[:-1], "--overwrite").refused_with("holds the checkpoints of a training run")
    assert (other / "metrics.jsonl").read_text() == '{"step": 1, "loss": 3.0}\n'
    assert wide("profile", *SHAPE, "--prompt", 8, "--run-dir", "new", "--resume").code == 0  # starts what is not there


def test_a_resumed_throughput_takes_the_batches_that_its_run_began_with(
    wide: Wide, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from widecli.profiling import memory, request

    grid = ("profile", *SHAPE, "--throughput", "--ttft", "--prompt", 8, "--sparsity", 0.5)
    real, measured = measurement.Cell.measure, []

    def interrupted(cell: measurement.Cell) -> list[measurement.Point]:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(cell._batch)
        return real(cell)

    def free(mebibytes: float) -> None:
        for module in (request, memory):
            monkeypatch.setattr(module, "free_bytes", lambda device: int(mebibytes * 2**20))

    free(40)
    monkeypatch.setattr(measurement.Cell, "measure", interrupted)
    assert wide(*grid).code == 130 and measured == [1, 2]
    monkeypatch.setattr(measurement.Cell, "measure", real)
    for mebibytes, other in ((1000, 64), (38, 2)):
        free(mebibytes)
        assert wide(*grid, "--dry-run", "--overwrite", "--json").document["settings"]["batches"][-1] == other
    wide(*grid, "--resume").refused_with("batch 4 with 8 tokens each needs")
    free(1000)
    done = wide(*grid, "--resume", "--json")
    assert done.code == 0, done.err
    assert [point["batch"] for point in done.document["points"]] == [1, 2, 4]
    assert done.err.count("measured before") == 2
    assert wide(*grid, "--resume", "--json").document == done.document


def test_a_resumed_run_measures_the_cells_again_that_had_no_time_for_transformers(
    wide: Wide, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = ("profile", *SHAPE, "--compare-hf", "--ttft", "--batch", "1,2,3", "--prompt", 8, "--run-dir", "kept")
    monkeypatch.setattr(HuggingFace, "may_set_up", property(lambda self: self._spent == 0.0))  # once a start
    documents = []
    for start, measured_before in enumerate([0, 2, 2]):  # a cell without its time now is not measured, either
        done = wide(*grid, *(["--resume"] if start else []), "--json")
        assert done.code == 0, done.err
        document = done.document
        documents.append(document)
        assert [point["batch"] for point in document["points"]] == [1, 2, 3]
        assert [bool(point["hugging_face"]) for point in document["points"]] == [place <= start for place in range(3)]
        waiting = [note for note in document["notes"] if "no time to compile it; --resume measures this cell" in note]
        assert len(waiting) == 2 - start
        assert done.err.count("measured before") == measured_before
        left = wide(*grid, "--resume", "--dry-run", "--json").document
        assert (left["kept"], len(left["cells"])) == (1 + start, 2 - start)
        assert (workplace / "kept" / "cells.json").exists() == (start < 2)
    first, second, third = (document["points"] for document in documents)
    assert second[0] == first[0] and second[1] != first[1] and second[2] == first[2]
    assert third[:2] == second[:2]
    steps = [json.loads(line)["step"] for line in (workplace / "kept" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(5))
    again = wide(*grid, "--resume", "--json")
    assert again.document == documents[-1] and "is finished already" in again.err
    wide(*grid).refused_with("holds a finished run")


@pytest.mark.slow
def test_two_processes_do_not_measure_into_one_directory(
    wide: Wide, start_wide: Start, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("profile", *SHAPE, "--ttft", "--prompt", 8, "--run-dir", "kept/both")
    real, meanwhile = measurement.Cell.measure, []

    def measured(cell: measurement.Cell) -> list[measurement.Point]:
        for flag in ("--resume", "--overwrite"):
            other = start_wide(*arguments, flag)
            out, err = other.communicate(timeout=120)
            meanwhile.append(Outcome(other.returncode, out, err))
        return real(cell)

    monkeypatch.setattr(measurement.Cell, "measure", measured)
    assert wide(*arguments).code == 0
    for refused in meanwhile:
        refused.refused_with("another process works on", "kept/both: wait for it", code=1)
    assert [path.name for path in (workplace / "kept").iterdir()] == ["both"]
    monkeypatch.setattr(measurement.Cell, "measure", real)
    (workplace / "kept" / ".both.lock").touch()  # as a killed run leaves it
    assert wide(*arguments, "--overwrite").code == 0
    assert [path.name for path in (workplace / "kept").iterdir()] == ["both"]


def test_batches_that_were_named_are_not_taken_for_those_that_memory_chose(wide: Wide) -> None:
    grid = ("profile", *SHAPE, "--throughput", "--ttft", "--prompt", 8, "--run-dir", "kept")
    assert wide(*grid, "--batch", "1,2").code == 0
    wide(*grid, "--resume").refused_with("cannot be resumed: batches chosen by was --batch and is now free memory")


def test_code_that_changed_is_another_run(wide: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    from widecli.profiling import request

    grid = ("profile", *SHAPE, "--ttft", "--prompt", 8, "--run-dir", "kept")
    assert wide(*grid).code == 0
    monkeypatch.setattr(request, "code_hash", lambda: "another")
    wide(*grid, "--resume").refused_with("cannot be resumed: code was", "and is now another")


def test_what_is_damaged_is_named(wide: Wide, workplace: Path) -> None:
    grid = ("profile", *SHAPE, "--ttft", "--prompt", 8, "--run-dir", "kept")
    assert wide(*grid).code == 0
    summary = json.loads((workplace / "kept" / "summary.json").read_text())
    del summary["points"][0]["routed"]["p50_ms"]
    (workplace / "kept" / "summary.json").write_text(json.dumps(summary))
    wide(*grid, "--resume").refused_with("kept/summary.json is damaged")


def test_bounds_of_one_run_come_from_one_measurement(
    wide: Wide, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from widecli.profiling import bound

    grid = ("profile", *SHAPE, "--ttft", "--batch", "1,2", "--prompt", 8, "--run-dir", "kept")
    real, speeds = measurement.Cell.measure, iter((1e9, 5e9))
    found = lambda device, dtype: bound.Peaks(next(speeds), 1e9, "measured")  # noqa: E731

    def interrupted(cell: measurement.Cell) -> list[measurement.Point]:
        if cell._batch == 2:
            raise KeyboardInterrupt
        return real(cell)

    monkeypatch.setattr(bound, "_found_peaks", found)
    monkeypatch.setattr(bound, "_peaks", {})
    monkeypatch.setattr(measurement.Cell, "measure", interrupted)
    assert wide(*grid).code == 130
    bound._peaks.clear()  # as in another process
    monkeypatch.setattr(measurement.Cell, "measure", real)
    done = wide(*grid, "--resume", "--json").document
    assert done["peaks"]["flops"] == 1e9
    one, two = (point["dense"]["bound_ms"] for point in done["points"])
    assert one < two < 2.1 * one

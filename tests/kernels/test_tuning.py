"""Configurations: the file that the tuner writes, and who is asked first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from wide_kernels.tuning import disk, lookup, table
from wide_kernels.tuning.table import Key, force

CPU = torch.device("cpu")
KEY = Key("few_rows_k", 16, 128, "bfloat16")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lookup.forget()
    yield
    lookup.forget()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU/1")
    return "Some GPU/1"


def test_results_are_kept_and_added_to(tmp_path: Path) -> None:
    path = disk.write_tuned("Some GPU/1", {KEY: {"BN": 64}})
    other = Key("few_rows_mn", 1, 64, "float16")
    disk.write_tuned("Some GPU/1", {other: {"BK": 32}})
    disk.write_tuned("Some GPU/1", {KEY: {"BN": 128}})
    assert path.parent == tmp_path / "wide_kernels" / "tuning"
    assert path.name.startswith("Some-GPU-1-triton")
    assert disk.read_tuned("Some GPU/1") == {KEY: {"BN": 128}, other: {"BK": 32}}
    assert [found.name for found in path.parent.iterdir()] == [path.name]
    assert disk.read_tuned("another GPU") == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1, 2]",
        '{"schema": "old", "entries": []}',
        '{"schema": "wide_kernels.tuning/2", "entries": [{"kernel": "few_rows_k"}]}',
        json.dumps({"schema": disk.SCHEMA, "entries": [{**KEY._asdict(), "config": {"BN": "64"}}]}),
        json.dumps({"schema": disk.SCHEMA, "entries": [{**KEY._asdict(), "rows": None, "config": {}}]}),
    ],
)
def test_a_file_that_makes_no_sense_is_ignored_and_said_so(text: str) -> None:
    path = disk.tuning_file("GPU")
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    with pytest.warns(RuntimeWarning, match="is ignored: .*delete it or tune again"):
        assert disk.read_tuned("GPU") == {}


def test_the_benchmark_comes_before_the_file_and_the_file_before_the_table(
    gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "TABLES", {"sm_90": {KEY: {"BN": 32, "BK": 32, "SPLITS": 3}}})
    monkeypatch.setattr(lookup, "TABLES", table.TABLES)
    disk.write_tuned(gpu, {KEY: {"BN": 64, "BK": 64}})
    with force("few_rows_k", {"BN": 128}):
        assert lookup.tuned("few_rows_k", 13, 128, torch.bfloat16) == {"BN": 128, "BK": 64, "SPLITS": 3}
    assert lookup.tuned("few_rows_k", 16, 128, torch.bfloat16) == {"BN": 64, "BK": 64, "SPLITS": 3}
    assert lookup.tuned("few_rows_k", 17, 128, torch.bfloat16) == {}
    assert lookup.tuned("few_rows_k", 16, 128, torch.float16) == {}


def test_a_launch_reads_no_file(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lookup.tuned("few_rows_k", 16, 128, torch.bfloat16)
    monkeypatch.setattr(Path, "read_text", lambda *args, **kwargs: pytest.fail("a file was read"))
    for rows in (9, 16, 3):  # a key that was not there before finds the file read as well
        lookup.tuned("few_rows_k", rows, 128, torch.bfloat16)


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_token_counts_enter_keys_as_powers_of_two(rows: int, bucket: int) -> None:
    assert lookup.token_bucket(rows) == bucket


def test_the_tuner_keeps_what_beat_the_built_in_configuration(gpu: str) -> None:
    from wide_kernels.benchmarks.cases import Sizes
    from wide_kernels.benchmarks.shapes import model_shape
    from wide_kernels.benchmarks.tune import save

    sizes = Sizes(model_shape("32x64"), 13, 16, 0.5, torch.float16, "cpu")
    slower: dict[str, object] = {"config": {}, "p50_ms": 2.0}
    assert save([("few_rows_k", sizes, [slower]), ("few_rows_mn", sizes, [])]) is None
    save([("few_rows_k", sizes, [{"config": {"BN": 64}, "p50_ms": 1.0}, slower])])
    assert lookup.tuned("few_rows_k", 15, 16, torch.float16) == {"BN": 64}


def test_the_router_finds_what_the_tuner_kept_by_the_size_of_the_model(gpu: str) -> None:
    from wide_kernels.benchmarks.cases import Sizes
    from wide_kernels.benchmarks.shapes import model_shape
    from wide_kernels.benchmarks.tune import save
    from wide_kernels.norm_route.configs import chunk_config

    sizes = Sizes(model_shape("4096x8192"), 13, 16, 0.5, torch.float16, "cpu")
    built_in = chunk_config(13, 4096, torch.float16, CPU)
    save([("norm_route", sizes, [{"config": {"BM": 128}, "p50_ms": 1.0}])])
    assert chunk_config(16, 4096, torch.float16, CPU) == built_in | {"BM": 128, "BN": 128}
    assert chunk_config(13, 2048, torch.float16, CPU)["BM"] == built_in["BM"]


def test_every_table_entry_names_a_kernel_and_a_power_of_two() -> None:
    for family, entries in table.TABLES.items():
        assert family.startswith("sm_")
        for key in entries:
            assert key.kernel in table.TUNED
            assert key.rows & (key.rows - 1) == 0


def test_a_user_without_a_home_has_a_place_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert tmp_path in disk.tuning_file("GPU").parents
    assert disk.read_tuned("a GPU that nobody has") == {}

from __future__ import annotations

from pathlib import Path

import pytest

from widecli.data.hub import HubDataset
from widecli.data.local_files import LocalFiles
from widecli.data.python_text import PydocTopics, StandardLibrary
from widecli.data.sources import open_source
from widecli.errors import UsageError
from widecli.recipe.schema import DataSection

SECTION = DataSection(text_field="body", subset="en", split="validation")


def test_each_name_opens_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner/name").mkdir(parents=True)
    (tmp_path / "owner/name/a.txt").write_text("x")
    (tmp_path / "self").mkdir()
    (tmp_path / "self/a.txt").write_text("x")
    for name, kind in (
        ("stdlib", StandardLibrary),
        ("pydoc-topics", PydocTopics),
        ("owner/name", LocalFiles),
        ("./self", LocalFiles),
        ("owner/**/*.txt", LocalFiles),
        ("allenai/c4", HubDataset),
        (("owner/name", "self/a.txt"), LocalFiles),
        (("stdlib",), StandardLibrary),
    ):
        assert type(open_source(name, section=SECTION)) is kind, name


def test_the_section_says_how_a_hub_set_and_files_are_read(tmp_path: Path) -> None:
    hub = open_source("allenai/c4", section=SECTION, offline=True, cache_dir=tmp_path)
    assert hub.identity().items() >= {"id": "allenai/c4", "subset": "en", "split": "validation"}.items()
    (tmp_path / "a.jsonl").write_text('{"body": "hello"}\n')
    assert list(open_source(str(tmp_path / "a.jsonl"), section=SECTION).documents()) == ["hello"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "data.source is empty"),
        ((), "data.source is empty"),
        ("no such thing", "neither a file that exists nor a Hub id"),
        ("missing.jsonl", "does not exist"),
        ("data.csv", "does not exist"),
        ("self", "no model is loaded here"),
        (("stdlib", "also"), "several must all be local files"),
        (("allenai/c4", "/x.txt"), "'allenai/c4' is no local file"),
    ],
)
def test_names_that_mean_nothing_are_refused(name: str | tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_source(name, section=SECTION)

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from widecli.data.hub import HubDataset
from widecli.errors import UsageError, WideError

SHA = "0123456789abcdef"


class Rows:
    """What `datasets` hands out, as far as it is used."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def shuffle(self, **_: Any) -> Rows:
        return self

    def __iter__(self) -> Iterator[Any]:
        for row in self.rows:
            if isinstance(row, Exception):
                raise row
            yield row


class Hub:
    """A stand-in for the Hub: what it answers, and what it was asked."""

    def __init__(self) -> None:
        self.info: Any = SimpleNamespace(sha=SHA)
        self.rows: list[Any] = [{"text": "one", "id": 1}, {"text": "", "id": 2}, {"text": None}, {"text": "two"}]
        self.failures: dict[str | None, Exception] = {}
        self.loads: list[dict[str, Any]] = []

    def dataset_info(self, *_: Any, **__: Any) -> Any:
        if isinstance(self.info, Exception):
            raise self.info
        return self.info

    def load_dataset(self, name: str, subset: str | None, **options: Any) -> Rows:
        self.loads.append({"name": name, "subset": subset, **options})
        if options["revision"] in self.failures:
            raise self.failures[options["revision"]]
        return Rows(self.rows)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    import datasets
    import huggingface_hub

    stand_in = Hub()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: stand_in)
    monkeypatch.setattr(datasets, "load_dataset", stand_in.load_dataset)
    return stand_in


def opened(cache: Path, **options: Any) -> HubDataset:
    return HubDataset(
        "owner/name", **{"subset": None, "split": "train", "text_field": "text", "cache_dir": cache, **options}
    )


def test_documents_are_streamed_at_the_revision_of_the_identity(hub: Hub, cache: Path) -> None:
    source = opened(cache, subset="en")
    assert source.identity()["revision"] == SHA
    assert list(source.documents()) == ["one", "two"]
    assert hub.loads == [{"name": "owner/name", "subset": "en", "split": "train", "revision": SHA, "streaming": True}]


def test_a_loading_script_falls_back_to_the_hubs_own_conversion(hub: Hub, cache: Path) -> None:
    hub.failures[SHA] = RuntimeError("Dataset scripts are no longer supported, but found name.py")
    assert list(opened(cache).documents()) == ["one", "two"]
    assert [load["revision"] for load in hub.loads] == [SHA, "refs/convert/parquet"]


def test_a_revision_seen_once_is_remembered_without_a_network(hub: Hub, cache: Path) -> None:
    online = opened(cache).identity()
    hub.info = ConnectionError("no route")
    assert opened(cache).identity() == online
    assert opened(cache, offline=True).identity() == online


def test_an_unreachable_hub_is_one_sentence(hub: Hub, cache: Path) -> None:
    hub.info = ConnectionError("no route to host\nand a long trace")
    with pytest.raises(WideError, match=r"The Hub cannot be reached .*no route to host") as caught:
        opened(cache).identity()
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)


def test_a_connection_that_breaks_says_how_far_it_came(hub: Hub, cache: Path) -> None:
    hub.rows = [{"text": "one"}, ConnectionError("reset")]
    with pytest.raises(WideError, match="broke off after 1 documents"):
        list(opened(cache).documents())


def test_an_unknown_data_set_is_a_usage_error(hub: Hub, cache: Path) -> None:
    from huggingface_hub.errors import RepositoryNotFoundError

    error = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    hub.info = error
    with pytest.raises(UsageError, match="no data set 'owner/name' on the Hub"):
        opened(cache).identity()


def test_a_wrong_split_repeats_what_the_hub_offers(hub: Hub, cache: Path) -> None:
    hub.failures[SHA] = ValueError('Bad split: test. Available splits: ["train"]')
    with pytest.raises(UsageError, match=r"data.split=test.*Available splits: \[.train"):
        list(opened(cache, split="test").documents())


def test_a_wrong_field_lists_the_fields(hub: Hub, cache: Path) -> None:
    with pytest.raises(UsageError, match=r"no field 'body'.*text, id"):
        list(opened(cache, text_field="body").documents())
    with pytest.raises(UsageError, match="holds int, not text"):
        list(opened(cache, text_field="id").documents())


def test_offline_without_a_copy_says_what_to_do(hub: Hub, cache: Path) -> None:
    hub.failures[None] = ConnectionError("offline")
    source = opened(cache, offline=True)
    assert source.identity()["revision"] == "unknown"
    with pytest.raises(UsageError, match="not on this machine and the network is off"):
        next(itertools.chain(source.documents()))
    assert hub.loads[0]["streaming"] is False


def test_offline_asks_nobody(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    seen = []
    hub.info = AssertionError("asked")

    def load_dataset(*_: Any, **__: Any) -> Rows:
        seen.append(constants.HF_HUB_OFFLINE)
        return Rows([{"text": "kept"}])

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert list(opened(cache, offline=True).documents()) == ["kept"]
    assert seen == [True]
    assert constants.HF_HUB_OFFLINE is False

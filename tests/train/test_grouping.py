from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tiny_models import random_ids, tiny_model, tiny_plan
from widecli.errors import UsageError
from widecli.model import regroup
from widecli.model.channel_order import present_order, stored_order
from widecli.model.plan import CompensationPlan
from widecli.model.routed import RoutedModel
from widecli.train.grouping import set_up_groups

BATCHES = [(random_ids(4, 24, seed=i), None) for i in range(3)]
BOTH = CompensationPlan(True, 2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "wide" / "groups"


def set_up(text: str = "a text", seed: int = 0, **plan: object) -> tuple[RoutedModel, list[str]]:
    routed = RoutedModel.attach(tiny_model(), tiny_plan(**plan))
    said: list[str] = []
    set_up_groups(routed, BATCHES, text, seed, said.append)
    return routed, said


def means_of(routed: RoutedModel) -> dict[str, torch.Tensor]:
    return {name: p.clone() for name, p in routed.compensations.named_parameters() if name.endswith("mean")}


def test_what_one_run_finds_the_next_one_takes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, said = set_up(grouping="clustered", compensation=BOTH)
    order = present_order(first.backbone)
    assert order is not None and not torch.equal(order, stored_order(first.shape))
    assert "channel statistics" in said and len(list(cache.iterdir())) == 1
    monkeypatch.setattr(regroup, "channel_statistics", lambda *_: pytest.fail("it was found before"))
    second, said = set_up(grouping="clustered", compensation=BOTH)
    assert said == ["groups and means are those of an earlier run"]
    assert torch.equal(order, present_order(second.backbone))  # type: ignore[arg-type]
    for name, mean in means_of(first).items():
        assert torch.equal(mean, means_of(second)[name]) and bool(mean.any())


@pytest.mark.parametrize("change", ["text", "seed", "groups"])
def test_another_text_seed_or_size_of_groups_is_found_anew(cache: Path, change: str) -> None:
    set_up(grouping="clustered")
    if change == "groups":
        set_up(grouping="clustered", ffn_group_size=32)
    else:
        set_up(**{"text": {"text": "another"}, "seed": {"seed": 1}}[change], grouping="clustered")  # type: ignore[arg-type]
    assert len(list(cache.iterdir())) == 2


def test_a_damaged_cache_is_found_anew_and_written_over(cache: Path) -> None:
    first, _ = set_up(grouping="clustered")
    (file,) = cache.iterdir()
    good = file.read_bytes()
    file.write_bytes(good[: len(good) // 2])
    second, said = set_up(grouping="clustered")
    assert "channel statistics" in said and file.read_bytes() == good
    assert torch.equal(present_order(first.backbone), present_order(second.backbone))  # type: ignore[arg-type]


def test_nothing_is_cached_for_a_text_without_a_name(cache: Path) -> None:
    routed, _ = set_up(text="", grouping="clustered")
    assert present_order(routed.backbone) is not None and not cache.exists()


def test_a_cache_that_cannot_be_written_costs_nothing(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    routed, _ = set_up(grouping="clustered")
    assert present_order(routed.backbone) is not None


def test_contiguous_groups_get_means_and_keep_their_order() -> None:
    routed, _ = set_up(compensation=BOTH)
    assert present_order(routed.backbone) is None
    assert all(bool(mean.any()) for mean in means_of(routed).values())


def test_without_either_nothing_runs(cache: Path) -> None:
    _, said = set_up()
    assert not said and not cache.exists()


def test_too_little_text_is_refused_with_what_it_takes() -> None:
    routed = RoutedModel.attach(tiny_model(), tiny_plan(grouping="clustered"))
    with pytest.raises(UsageError, match="needs at least 16 tokens, and there were 8"):
        set_up_groups(routed, [(random_ids(1, 8), None)], "", 0, lambda _: None)
    assert present_order(routed.backbone) is None

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_writer
import pytest
import torch
from torch import nn

from tiny_models import shake_routers, tiny_model, tiny_plan
from widecli.errors import UsageError, WideError
from widecli.model import checkpoint
from widecli.model.identity import BackboneIdentity
from widecli.model.plan import LayerOverride, RoutingPlan
from widecli.model.routed import RoutedModel

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
IDENTITY = BackboneIdentity("some/model", None, "c0ffee", "abc")


def config(plan: RoutingPlan | None = None, **achieved: Any) -> checkpoint.CheckpointConfig:
    return checkpoint.CheckpointConfig(IDENTITY, plan or tiny_plan(), 7, "12345678", achieved)


def routers(seed: int = 0, **plan: Any) -> nn.ModuleDict:
    routed = RoutedModel.attach(tiny_model(), tiny_plan(**plan))
    shake_routers(routed, seed)
    routed.detach()
    return routed.routers


def save(directory: Path, made: nn.ModuleDict, plan: RoutingPlan | None = None) -> None:
    checkpoint.save(directory, made, config(plan), "model:\n  name: some/model\n")


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / checkpoint.ROUTERS)
    change(tensors)
    save_file(tensors, directory / checkpoint.ROUTERS)


@pytest.mark.parametrize("mode", ["wide", "token", "layer"])
def test_a_checkpoint_gives_back_exactly_what_was_saved(tmp_path: Path, mode: str) -> None:
    plan = tiny_plan(mode=mode, tap="normalised", overrides={1: LayerOverride(parts="none")})
    made = routers(mode=mode, overrides={1: LayerOverride(parts="none")})
    save(tmp_path / "c", made, plan)
    read = checkpoint.read_config(tmp_path / "c")
    assert read == config(plan)
    fresh = RoutedModel.attach(tiny_model(), read.plan).routers
    checkpoint.load_routers(tmp_path / "c", fresh)
    assert all(torch.equal(fresh.state_dict()[k], v) for k, v in made.state_dict().items())
    assert (tmp_path / "c" / "recipe.yaml").is_file()


def test_no_file_of_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    save(tmp_path / "c", routers())
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [
        "README.md",
        "recipe.yaml",
        "router.safetensors",
        "wide_config.json",
    ]


def test_other_people_can_read_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "c", routers())
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o755
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "c").iterdir()} == {0o644}


def test_a_missing_router_is_refused_with_its_name(tmp_path: Path) -> None:
    save(tmp_path / "c", routers())
    rewrite(tmp_path / "c", lambda t: t.pop("1.ffn.up.weight"))
    fresh = routers(seed=1)
    before = {k: v.clone() for k, v in fresh.state_dict().items()}
    with pytest.raises(UsageError, match=r"router.safetensors does not fit its own plan: missing 1\.ffn\.up\.weight"):
        checkpoint.load_routers(tmp_path / "c", fresh)
    assert all(torch.equal(fresh.state_dict()[k], v) for k, v in before.items()), "nothing may be loaded in part"


def test_an_unexpected_router_is_refused_with_its_name(tmp_path: Path) -> None:
    save(tmp_path / "c", routers())
    rewrite(tmp_path / "c", lambda t: t.update({"9.ffn.up.weight": torch.zeros(2)}))
    with pytest.raises(UsageError, match=r"unexpected 9\.ffn\.up\.weight"):
        checkpoint.load_routers(tmp_path / "c", routers())


def test_a_misshaped_router_is_refused_with_both_shapes(tmp_path: Path) -> None:
    save(tmp_path / "c", routers())
    rewrite(tmp_path / "c", lambda t: t.update({"0.attention.down.weight": torch.zeros(5, 32)}))
    with pytest.raises(UsageError, match=r"0\.attention\.down\.weight has shape \(5, 32\) instead of \(4, 32\)"):
        checkpoint.load_routers(tmp_path / "c", routers())


def test_a_router_in_another_precision_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "c", routers())
    rewrite(tmp_path / "c", lambda t: t.update({"0.ffn.up.bias": t["0.ffn.up.bias"].bfloat16()}))
    with pytest.raises(UsageError, match=r"0\.ffn\.up\.bias is torch\.bfloat16 instead of torch\.float32"):
        checkpoint.load_routers(tmp_path / "c", routers())


def test_all_problems_are_named_at_once(tmp_path: Path) -> None:
    save(tmp_path / "c", routers(ffn_group_size=32))
    with pytest.raises(UsageError, match=r"0\.ffn\.up\.bias has shape \(4,\).*1\.ffn\.up\.weight has shape"):
        checkpoint.load_routers(tmp_path / "c", routers())


@pytest.mark.parametrize("keep", [0, 5, 200])
def test_a_truncated_router_file_is_refused(tmp_path: Path, keep: int) -> None:
    save(tmp_path / "c", routers())
    path = tmp_path / "c" / checkpoint.ROUTERS
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UsageError, match=r"router.safetensors cannot be read .* another checkpoint"):
        checkpoint.load_routers(tmp_path / "c", routers())


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"schema": "wide.checkpoint/1"}', '{"schema": "wide.checkpoint/1", "plan": 3}']
)
def test_a_broken_config_is_refused_in_a_sentence(tmp_path: Path, content: str) -> None:
    save(tmp_path / "c", routers())
    (tmp_path / "c" / checkpoint.CONFIG).write_text(content)
    with pytest.raises(UsageError, match=r"wide_config\.json"):
        checkpoint.read_config(tmp_path / "c")


def test_a_config_with_an_unknown_plan_key_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "c", routers())
    path = tmp_path / "c" / checkpoint.CONFIG
    data = json.loads(path.read_text())
    data["plan"]["novelty"] = 16
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match="novelty"):
        checkpoint.read_config(tmp_path / "c")


def test_another_schema_is_refused_with_both_names(tmp_path: Path) -> None:
    save(tmp_path / "c", routers())
    path = tmp_path / "c" / checkpoint.CONFIG
    path.write_text(path.read_text().replace("wide.checkpoint/1", "wide.checkpoint/9"))
    with pytest.raises(UsageError, match=r"schema 'wide.checkpoint/9'; this version reads 'wide.checkpoint/1'"):
        checkpoint.read_config(tmp_path / "c")


def test_a_checkpoint_whose_tokens_pick_patterns_is_refused_with_what_reads_it(tmp_path: Path) -> None:
    save(tmp_path / "c", routers())
    path = tmp_path / "c" / checkpoint.CONFIG
    data = json.loads(path.read_text()) | {"schema": "wide.checkpoint/3", "patterns": {"count": 64, "segments": 1}}
    data["plan"] |= {"mode": "patterns", "patterns": {"count": 64, "segments": 1, "parts": "ffn"}}
    path.write_text(json.dumps(data))
    for read in (checkpoint.read_config, checkpoint.section_of, checkpoint.refuse_incomplete, checkpoint.origin_of):
        with pytest.raises(UsageError) as error:
            read(tmp_path / "c")
        assert str(error.value) == (
            f"{tmp_path / 'c'} was trained with routing.mode=patterns, which this version no longer has (independent "
            "groups are better at the same speed); use widecli 0.1 for it"
        )


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"neither a checkpoint \(no wide_config.json\) nor a run directory"):
        checkpoint.resolve(tmp_path)
    with pytest.raises(UsageError, match=r"has no wide_config\.json"):
        checkpoint.read_config(tmp_path)


def test_a_run_directory_means_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    made = routers()
    for step in (2, 100, 20):
        save(tmp_path / "checkpoints" / f"step-{step:06d}", made)
    (tmp_path / "checkpoints" / "step-000300").mkdir()
    (tmp_path / "checkpoints" / ".step-000400.tmp").mkdir()
    (tmp_path / "checkpoints" / "step-000100-copy").mkdir()
    (tmp_path / "checkpoints" / "step-000100-copy" / checkpoint.CONFIG).write_text("{}")
    assert [step for step, _ in checkpoint.steps(tmp_path / "checkpoints")] == [2, 20, 100]
    assert checkpoint.resolve(tmp_path) == tmp_path / "checkpoints" / "step-000100"
    assert checkpoint.resolve(tmp_path / "checkpoints" / "step-000002").name == "step-000002"


def test_saving_again_replaces_the_checkpoint_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    save(tmp_path / "c", routers(seed=0))
    new = routers(seed=1)
    save(tmp_path / "c", new)
    again = routers(seed=2)
    checkpoint.load_routers(tmp_path / "c", again)
    assert torch.equal(again.state_dict()["0.ffn.up.bias"], new.state_dict()["0.ffn.up.bias"])
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_an_error_while_writing_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    old = routers(seed=0)
    save(tmp_path / "c", old)

    def fail(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(WideError, match=r"cannot write .*/c: No space left on device; free some space") as caught:
        checkpoint.save(tmp_path / "c", routers(seed=1), config(), "", {"optimizer.safetensors": fail})
    assert caught.value.exit_code == 1
    again = routers(seed=2)
    checkpoint.load_routers(tmp_path / "c", again)
    assert torch.equal(again.state_dict()["0.ffn.up.bias"], old.state_dict()["0.ffn.up.bias"])
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_full_disk_under_the_routers_themselves_is_one_sentence(tmp_path: Path) -> None:
    """Through a file size limit, because safetensors reports a failed write in a way of its own."""
    done = subprocess.run(
        [sys.executable, checkpoint_writer.__file__, str(tmp_path), "1000"],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )
    assert "said: cannot write" in done.stdout, done.stderr[-2000:]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WideError, match="cannot write"):
        save(tmp_path / "file" / "c", routers())


@pytest.mark.slow
def test_kill_9_while_writing_leaves_only_loadable_checkpoints(tmp_path: Path) -> None:
    for trial in range(3):
        root = tmp_path / str(trial)
        child = subprocess.Popen(
            [sys.executable, checkpoint_writer.__file__, str(root)], stdout=subprocess.PIPE, env=ENVIRONMENT
        )
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        time.sleep(0.1 + 0.037 * trial)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        found = checkpoint.steps(root / "checkpoints")
        assert found, "it was killed before it wrote anything"
        for step, path in found:
            assert checkpoint.read_config(path).step == step
            fresh = checkpoint_writer.seeded_routers(5)
            checkpoint.load_routers(path, fresh)
            expected = checkpoint_writer.seeded_routers(step % 2).state_dict()
            assert all(torch.equal(fresh.state_dict()[k], v) for k, v in expected.items())
            assert (path / "recipe.yaml").read_text() == checkpoint_writer.RECIPE


def test_the_model_card_says_what_the_checkpoint_is() -> None:
    text = checkpoint.model_card(
        config(
            skip_rate={"attention": 0.61, "ffn": None, "mean": 0.61},
            flops_skipped={"prunable": 0.5, "total": 0.25, "context_tokens": 1024},
        )
    )
    assert "some/model" in text and "attention 61.0%" in text and "ffn" not in text.split("skip rate")[1].split("\n")[0]
    assert "50.0% of the prunable, 25.0% of all at 1024 tokens" in text


def flip(path: Path, at: int = -3) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x01
    path.write_bytes(content)


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    save(tmp_path / "c", routers())
    flip(tmp_path / "c" / checkpoint.ROUTERS)
    fresh = routers(seed=1)
    before = {k: v.clone() for k, v in fresh.state_dict().items()}
    with pytest.raises(UsageError, match=r"router\.safetensors is not the file that was saved: its checksum differs"):
        checkpoint.load_routers(tmp_path / "c", fresh)
    assert all(torch.equal(fresh.state_dict()[k], v) for k, v in before.items())


def test_every_file_that_programs_read_has_a_checksum(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        path.mkdir()
        (path / "deep.json").write_text("{}")

    checkpoint.save(tmp_path / "c", routers(), config(), "", {"more": write})
    assert set(checkpoint.read_config(tmp_path / "c").files) == {"router.safetensors", "more/deep.json"}


def test_people_may_edit_the_recipe_and_the_card(tmp_path: Path) -> None:
    save(tmp_path / "c", routers())
    for name in ("recipe.yaml", "README.md"):
        (tmp_path / "c" / name).write_text("model: {name: moved}\n")
    checkpoint.load_routers(tmp_path / "c", routers())
    assert checkpoint.section_of(tmp_path / "c").name == "moved"


def test_a_checkpoint_from_before_checksums_loads(tmp_path: Path) -> None:
    made = routers()
    save(tmp_path / "c", made)
    path = tmp_path / "c" / checkpoint.CONFIG
    data = json.loads(path.read_text())
    del data["files"]
    for key in ("settings",):
        data["backbone"].pop(key)
    path.write_text(json.dumps(data))
    fresh = routers(seed=1)
    checkpoint.load_routers(tmp_path / "c", fresh)
    assert all(torch.equal(fresh.state_dict()[k], v) for k, v in made.state_dict().items())
    assert checkpoint.read_config(tmp_path / "c") == config()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_router_that_is_not_finite_is_refused_with_its_name(tmp_path: Path, value: float) -> None:
    made = routers()
    made.state_dict()["1.ffn.up.weight"].view(-1)[5] = value
    save(tmp_path / "c", made)
    with pytest.raises(UsageError, match=r"router\.safetensors is not finite: 1\.ffn\.up\.weight holds NaN or inf"):
        checkpoint.load_routers(tmp_path / "c", routers(seed=1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rank": -3}, "rank is -3, not a whole number above 0"),
        ({"rank": 0}, "rank is 0"),
        ({"rank": "32"}, "rank is '32'"),
        ({"rank": 4.0}, "rank is 4.0"),
        ({"rank": True}, "rank is True"),
        ({"rank": None}, "rank is None"),
        ({"ffn_group_size": 0}, "ffn_group_size is 0"),
        ({"attention_group_size": -2}, "attention_group_size is -2"),
        ({"mode": "deep"}, "mode 'deep' is not one of wide, token, layer"),
        ({"tap": ["residual"]}, "tap"),
        ({"parts": "some"}, "parts 'some' is not one of all, attention, ffn"),
        ({"grouping": "sorted"}, "grouping 'sorted'"),
        ({"overrides": {"1": {"ffn_group_size": 0}}}, "layer 1's ffn_group_size is 0"),
        ({"overrides": {"one": {}}}, "one"),
        ({"compensation": {"mean": True, "rank": -1}}, "compensation's rank is -1"),
    ],
)
def test_a_plan_that_no_recipe_lets_in_is_refused_in_a_sentence(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    save(tmp_path / "c", routers())
    path = tmp_path / "c" / checkpoint.CONFIG
    data = json.loads(path.read_text())
    data["plan"] |= change
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match=r"wide_config\.json is damaged or from another version") as error:
        checkpoint.read_config(tmp_path / "c")
    assert said in str(error.value)

"""Checkpoints whose content changed after they were written: no command goes on with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from whole_commands import STRONG, Wide

LAST = "checkpoints/step-000008"
STARTS = [
    *(["eval", "--no-dense"], ["lora", "--run-dir", "r"], ["generate", "--prompt", "a"], ["inspect"]),
    ["export", "--out", "x"],
    *(["profile", "--gen", "4", "--seconds", "0.01", "--prompt", "8"], ["export", "--out", "x", "--merge"]),
]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x01
    path.write_bytes(content)


def nothing_came_of_it() -> bool:
    return not Path("x").exists() and not list(Path().glob("r*/**/summary.json"))


@pytest.mark.parametrize("command", STARTS, ids=" ".join)
@pytest.mark.parametrize("file", ["router", "compensation"])
def test_a_flipped_bit_is_refused_by_every_command(wide: Wide, run: Any, file: str, command: list[str]) -> None:
    flip(Path("calibrated", LAST, f"{file}.safetensors"))
    name, *options = command
    wide(name, "calibrated", *options).refused_with(f"{file}.safetensors is not the file that was saved", "checksum")
    assert nothing_came_of_it()


@pytest.mark.parametrize("command", [c for c in STARTS if c != ["export", "--out", "x"]], ids=" ".join)
@pytest.mark.parametrize("file", ["router", "compensation"])
def test_nan_is_refused_by_every_command_with_or_without_checksums(
    wide: Wide, run: Any, file: str, command: list[str]
) -> None:
    path = Path("calibrated", LAST, f"{file}.safetensors")
    tensors = load_file(path)
    name = sorted(tensors)[-1]
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, path)
    config = path.with_name("wide_config.json")
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "files"}))
    command_name, *options = command
    wide(command_name, "calibrated", *options).refused_with(f"{file}.safetensors is not finite: {name} holds NaN")
    assert nothing_came_of_it()


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_that_changed_is_refused(wide: Wide, adapted: Any, file: str) -> None:
    path = Path("adapted", LAST, "adapter", file)
    if file.endswith(".json"):
        path.write_text(path.read_text().replace('"lora_alpha": 32', '"lora_alpha": 64'))
    else:
        flip(path)
    for command in (["eval", "--no-dense", "--run-dir", "r"], ["generate", "--prompt", "a"]):
        name, *options = command
        wide(name, "adapted", *options).refused_with(f"adapter/{file} is not the file that was saved")
    assert nothing_came_of_it()


def test_an_adapter_with_nan_is_refused(wide: Wide, adapted: Any) -> None:
    path = Path("adapted", LAST, "adapter", "adapter_model.safetensors")
    tensors = load_file(path)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[0] = float("inf")
    save_file(tensors, path, metadata={"format": "pt"})
    wide("eval", "adapted", "--no-dense", "--run-dir", "r").refused_with("not finite", name)


@pytest.mark.parametrize("file", ["optimizer.safetensors", "training_state.json"])
def test_a_training_state_that_changed_is_not_resumed(wide: Wide, run: Any, tiny_recipe: Path, file: str) -> None:
    Path("calibrated/summary.json").unlink()
    path = Path("calibrated", LAST, file)
    if file.endswith(".json"):
        path.write_text(path.read_text().replace('"step": 8', '"step": 6'))
    else:
        flip(path)
    refused = wide("calibrate", tiny_recipe, "--run-dir", "calibrated", "--resume")
    refused.refused_with(f"{file} is not the file that was saved")


def test_an_export_carries_the_checksums_on(wide: Wide, adapted: Any) -> None:
    for out, options in (("copy", []), ("merged", ["--merge"])):
        assert wide("export", "adapted", "--out", out, *options).code == 0
        assert wide("eval", out, "--no-dense", "--run-dir", f"r-{out}").code == 0
        flip(Path(out, "router.safetensors"))
        wide("eval", out, "--no-dense", "--run-dir", "r").refused_with(f"{out}/router.safetensors", "checksum")


@pytest.mark.parametrize("command", [["eval"], ["lora", *STRONG], ["generate", "--prompt", "a"], ["inspect"]])
@pytest.mark.parametrize(("rank", "said"), [(-1, "rank is -1"), (10**8, "between 1 and the hidden size 32")])
def test_an_absurd_rank_in_a_checkpoint_is_one_sentence(
    wide: Wide, run: Any, command: list[str], rank: int, said: str
) -> None:
    path = Path("calibrated", LAST, "wide_config.json")
    data = json.loads(path.read_text())
    data["plan"]["rank"] = rank
    path.write_text(json.dumps(data))
    name, *options = command
    refused = wide(name, "calibrated", *options, *(["--run-dir", "r"] if name != "generate" else []))
    refused.refused_with("rank" if name == "lora" else said)


@pytest.mark.parametrize("dry", [True, False])
def test_a_rank_beyond_the_hidden_size_is_refused(wide: Wide, tiny_recipe: Path, workplace: Path, dry: bool) -> None:
    refused = wide("calibrate", tiny_recipe, "routing.rank=100000000", *(["--dry-run"] if dry else []))
    refused.refused_with("routing.rank=100000000 must lie between 1 and the hidden size 32")
    assert not (workplace / "runs").exists()


def test_a_run_that_cannot_fit_this_machine_is_refused_before_it_begins(wide: Wide, run: Any, workplace: Path) -> None:
    refused = wide("lora", "calibrated", "lora.rank=1000000000", "--run-dir", "r")
    refused.refused_with("this cannot fit", "lora.rank", "GiB")
    assert not (workplace / "r").exists()

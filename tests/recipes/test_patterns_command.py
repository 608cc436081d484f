"""`wide patterns`, training with patterns, and what the other commands make of such checkpoints."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_resume import steps_of, stop_after
from whole_commands import Outcome, Wide

from widecli.model import checkpoint

PATTERNS = ("routing.mode=patterns", "routing.pattern_count=3", "routing.pattern_parts=all")


@pytest.fixture
def converted(wide: Wide, run: Outcome) -> Outcome:
    """The calibration in `calibrated/` with three patterns a layer, in `three/`."""
    done = wide("patterns", "calibrated", "--size", 3, "--tokens", 256, "--out", "three", "--json")
    assert done.code == 0, done.err
    return done


def stored(run: str, step: int = 8) -> dict[str, bytes]:
    folder = Path(run, "checkpoints", f"step-{step:06d}")
    return {name: (folder / name).read_bytes() for name in ("router.safetensors", "patterns.safetensors")}


def test_a_conversion_says_what_it_found_and_writes_a_checkpoint(converted: Outcome) -> None:
    found = converted.document
    assert found["schema"] == "wide.patterns/1" and found["patterns"] == {"count": 3, "segments": 1, "parts": "ffn"}
    assert 0.5 < found["agreement"]["ffn"] <= 1 and set(found["agreement"]) == {"ffn"}
    rates = found["skip_rate"]
    assert rates["matched"]["ffn"] == pytest.approx(rates["bits"]["ffn"], abs=0.03)
    assert [layer["layer"] for layer in found["layers"]] == [0, 1]
    assert all(sum(layer["counts"][0]) == found["measured_tokens"] for layer in found["layers"])
    config = json.loads(Path("three/wide_config.json").read_text())
    assert config["schema"] == "wide.checkpoint/3"
    assert config["patterns"] == {"count": 3, "segments": 1, "parts": "ffn", "file": "patterns.safetensors"}
    assert config["origin"]["checkpoint"] == "calibrated/checkpoints/step-000008"
    patterns = load_file("three/patterns.safetensors")
    assert {name: (p.shape, p.dtype) for name, p in patterns.items()} == {
        f"{layer}.ffn.bits": (torch.Size([1, 3, 4]), torch.bool) for layer in (0, 1)
    }


def test_the_commands_take_a_converted_checkpoint(wide: Wide, converted: Outcome) -> None:
    evaluated = wide("eval", "three", "--run-dir", "evaluated", "--json")
    assert evaluated.code == 0, evaluated.err
    assert 0 < evaluated.document["skip_rate"]["ffn"] < 1
    bits = wide("eval", "calibrated", "--run-dir", "bits", "--json").document
    assert evaluated.document["perplexity"] != bits["perplexity"]
    assert evaluated.document["dense"]["perplexity"] == bits["dense"]["perplexity"]
    inspected = wide("inspect", "three", "--tokens", 64, "--text", "pydoc-topics", "--format", "html", "--json")
    assert inspected.code == 0, inspected.err
    exported = wide("export", "three", "--merge", "--out", "whole")
    assert exported.code == 0, exported.err
    assert Path("whole/patterns.safetensors").read_bytes() == Path("three/patterns.safetensors").read_bytes()
    again = wide("eval", "whole", "--no-dense", "--run-dir", "again", "--json")
    assert again.code == 0, again.err
    assert again.document["perplexity"] == pytest.approx(evaluated.document["perplexity"], rel=1e-5)


def test_the_engine_runs_the_masks_that_the_patterns_are(wide: Wide, converted: Outcome) -> None:
    from widecli.engine.model import InferenceModel
    from widecli.model.backbone import load_backbone

    done = wide("generate", "three", "--prompt", "Line", "--max-new-tokens", 3)
    assert done.code == 0, done.err
    ids = torch.randint(2, 250, (2, 9), generator=torch.Generator().manual_seed(0))
    folder = Path("three")
    backbone = load_backbone(checkpoint.section_of(folder))
    routed, _ = checkpoint.attach(folder, backbone)
    with torch.no_grad():
        expected = backbone.model(input_ids=ids).logits[:, -1]
    routed.detach()
    engine = InferenceModel.from_checkpoint("three")
    session = engine.session(2, 9)
    assert torch.allclose(session.prefill(ids).float(), expected, atol=1e-3)


def test_a_profile_of_patterns_runs_and_names_them(wide: Wide, converted: Outcome, held_out: Path) -> None:
    common = ("--prompt", 16, "--gen", 4, "--seconds", 0, "--json")
    done = wide("profile", "three", "--text", held_out, "--breakdown", "--compare-hf", *common)
    assert done.code == 0, done.err
    assert [point["phase"] for point in done.document["points"]] == ["ttft", "tpot"]
    for point in done.document["points"]:
        assert (point["mode"], point["patterns"], point["masks"]) == ("patterns", 3, "learned")
        assert 0.1 < point["skip_rate"]["ffn"] < 0.9 and point["hugging_face"]["n"] >= 3
        parts = {"ffn"} if point["phase"] == "ttft" else {"gate_up", "down"}
        assert parts | {"norm_route"} <= set(point["routed"]["breakdown_ms"])
    by_groups = wide("profile", "three", "--masks", "random", "--tpot", "--G", 16, *common)
    assert by_groups.code == 0, by_groups.err
    (point,) = by_groups.document["points"]
    assert (point["mode"], point["patterns"], point["masks"]) == ("wide", None, "random")
    wide("profile", "three", "--patterns", 3).refused_with("--patterns need --masks random")


def test_all_patterns_are_the_independent_bits(wide: Wide, run: Outcome) -> None:
    done = wide("patterns", "calibrated", "--size", 16, "--parts", "all", "--tokens", 256, "--out", "all", "--json")
    assert done.code == 0, done.err
    assert done.document["agreement"] == {"attention": 1.0, "ffn": 1.0}
    bits, patterns = (wide("eval", name, "--run-dir", f"e-{name}", "--json").document for name in ("calibrated", "all"))
    assert patterns["perplexity"] == pytest.approx(bits["perplexity"], rel=1e-3)
    assert patterns["skip_rate"] == pytest.approx(bits["skip_rate"], abs=5e-3)


def test_a_second_stage_starts_from_a_converted_checkpoint(wide: Wide, converted: Outcome) -> None:
    done = wide("lora", "three", "--steps", 2, "--run-dir", "adapted", "routing.pattern_update=learned", "--json")
    assert done.code == 0, done.err
    assert done.document["origin"]["checkpoint"] == "three"
    frozen = wide("lora", "three", "--steps", 2, "--freeze-routers", "--run-dir", "frozen")
    assert frozen.code == 0, frozen.err
    assert stored("frozen", 2)["patterns.safetensors"] == Path("three/patterns.safetensors").read_bytes()
    again = wide("patterns", "adapted", "--size", 3, "--tokens", 256, "--out", "x")
    again.refused_with("has patterns already (3, parts ffn)")


@pytest.mark.parametrize(
    "how",
    [
        ["routing.pattern_update=learned"],
        ["routing.pattern_update=refit"],
        ["routing.pattern_update=learned", "routing.pattern_after=0.6"],  # stopped before patterns decide
        ["routing.pattern_after=0.3"],  # and after
    ],
)
def test_n_steps_then_n_more_equal_2n_steps_bit_for_bit(
    wide: Wide, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch, how: list[str]
) -> None:
    arguments = ("calibrate", tiny_recipe, *PATTERNS, *how, "routing.pattern_refit_every=3")
    done = wide(*arguments, "--run-dir", "whole", "--json")
    assert done.code == 0, done.err
    with monkeypatch.context() as patch:
        stop_after(patch, 3, signal.SIGTERM)
        assert wide(*arguments, "--run-dir", "cut").code == 75
    assert wide(*arguments, "--run-dir", "cut", "--resume").code == 0
    assert stored("cut") == stored("whole")
    assert steps_of("cut") == steps_of("whole")
    start, end = (load_file(f"whole/checkpoints/step-00000{step}/patterns.safetensors") for step in (0, 8))
    changed = any(not torch.equal(end[name], start[name]) for name in start)
    assert changed
    evaluated = wide("eval", "whole", "--no-dense", "--run-dir", "evaluated", "--json")
    assert evaluated.document["perplexity"]["held-out/token_ppl"] == pytest.approx(
        done.document["validation"]["final"], rel=1e-5
    )


def test_training_starts_at_its_share_of_the_budget_or_at_random(wide: Wide, tiny_recipe: Path) -> None:
    done = wide("calibrate", tiny_recipe, *PATTERNS, "train.steps=0", "--run-dir", "start", "--json")
    assert done.document["skip_rate"]["mean"] == pytest.approx(0.4, abs=0.1)
    other = wide("calibrate", tiny_recipe, *PATTERNS, "routing.pattern_start=random", "--steps", 1, "--run-dir", "r")
    assert other.code == 0, other.err
    first = load_file("r/checkpoints/step-000000/patterns.safetensors")["0.ffn.bits"][0]
    assert bool(first[0].all()), "the first random pattern is the dense one"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--size", 17], ["4 groups have 16 patterns", "17"]),
        (["--size", 4, "--segments", 3], ["3 pattern segments do not divide the 4 ffn groups", "1, 2, 4"]),
        (["--size", 9, "--tokens", 8], ["9 patterns cannot be found in 8 tokens", "--tokens"]),
        (["--data", "nowhere/at all.txt"], ["nowhere/at all.txt"]),
        (["--parts", "some"], []),
    ],
)
def test_what_cannot_be_converted_is_refused(wide: Wide, run: Outcome, arguments: list[Any], words: list[str]) -> None:
    refused = wide(
        "patterns", "calibrated", "--out", "x", *(arguments if "--size" in arguments else ["--size", 3, *arguments])
    )
    assert refused.code == 2 and not Path("x").exists()
    if words:
        refused.refused_with(*words)


def test_other_modes_old_versions_and_damaged_files_are_refused(
    wide: Wide, converted: Outcome, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide("patterns", "three", "--size", 3, "--out", "x").refused_with("patterns already")
    wide("calibrate", tiny_recipe, "routing.pattern_count=8").refused_with("pattern_count", "routing.mode=patterns")
    wide("calibrate", tiny_recipe, "--mode", "patterns").refused_with("4 groups have 16 patterns, and 64 are asked for")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "SCHEMAS", checkpoint.SCHEMAS[:2])  # as before there were patterns
        wide("eval", "three", "--run-dir", "e").refused_with("wide.checkpoint/3")
    assert wide("calibrate", tiny_recipe, "--mode", "token", "--steps", 1, "--run-dir", "tokens").code == 0
    wide("patterns", "tokens", "--size", 2, "--out", "x").refused_with("routing.mode=token")
    shutil.copytree("three", "without")
    Path("without/patterns.safetensors").unlink()
    wide("eval", "without", "--run-dir", "e").refused_with("lacks its patterns.safetensors")
    patterns = load_file("three/patterns.safetensors")
    save_file({k: v for k, v in patterns.items() if k.startswith("0")}, "three/patterns.safetensors")
    wide("eval", "three", "--run-dir", "e2").refused_with("missing 1.ffn.bits")

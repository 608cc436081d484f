"""From a calibration at its defaults to a merged model: every command goes on where the one before ended."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from whole_commands import Outcome, Wide

from widecli.model import checkpoint


def figure(summary: str) -> float:
    (value,) = json.loads(Path(summary, "summary.json").read_text())["perplexity"].values()
    return float(value)


def test_every_command_goes_on_where_the_one_before_ended(wide: Wide, adapted: Outcome, calibration: Outcome) -> None:
    config = checkpoint.read_config(checkpoint.resolve("adapted"))
    assert config.plan.grouping == "clustered" and config.plan.compensation is not None
    first, second = calibration.document, adapted.document
    assert first["flops_skipped"]["prunable"] < first["flops_skipped"]["prunable_gross"]
    assert figure("eval-calibrated") == pytest.approx(first["validation"]["final"], rel=1e-5)
    assert second["validation"]["start"] == pytest.approx(first["validation"]["final"], rel=1e-5)
    assert figure("eval-adapted") == pytest.approx(second["validation"]["final"], rel=1e-5)
    assert wide("export", "adapted", "--merge", "--out", "merged").code == 0

    def said(name: str) -> str:
        done = wide("generate", name, "--prompt", "the old fox", "--max-new-tokens", 12, "--json")
        assert done.code == 0, done.err
        assert done.document["routed"]
        text: str = done.document["text"]
        return text

    before = said("adapted")
    seen = wide("inspect", "adapted", "--tokens", 128, "--format", "html", "--json").document
    shutil.rmtree("adapted")
    shutil.rmtree("calibrated")
    measured = wide("eval", "merged", "--no-dense", "--json")
    assert measured.code == 0, measured.err
    (value,) = measured.document["perplexity"].values()
    assert value == pytest.approx(figure("eval-adapted"), rel=1e-4)
    assert said("merged") == before
    again = wide("inspect", "merged", "--tokens", 128, "--format", "html", "--json")
    assert again.code == 0, again.err
    assert again.document["grouping"] == seen["grouping"]
    for one, other in zip(again.document["compensation"], seen["compensation"], strict=True):
        for part in one:
            assert one[part] == pytest.approx(other[part], rel=1e-3, abs=1e-3)


def test_compensation_and_order_are_what_a_checkpoint_is_measured_with(wide: Wide, adapted: Outcome) -> None:
    """Each file by itself moves the figure: none of them is left aside."""
    from safetensors.torch import load_file, save_file

    folder, before = Path("adapted/checkpoints/step-000008"), figure("eval-adapted")
    config = folder / "wide_config.json"  # without its checksums, which refuse a file that was changed
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "files"}))
    for name in ("compensation", "channels"):
        path = folder / f"{name}.safetensors"
        kept = path.read_bytes()
        tensors = load_file(path)
        changed = {key: t.flip(1).contiguous() if name == "channels" else t * 3 for key, t in tensors.items()}
        save_file(changed, path)
        assert wide("eval", "adapted", "--no-dense", "--run-dir", f"eval-{name}").code == 0
        assert figure(f"eval-{name}") != pytest.approx(before, rel=1e-3)
        path.write_bytes(kept)

"""An export without widecli: transformers loads it, lm-eval measures it, the Hub reads its card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from whole_commands import QUESTIONS, Outcome, Wide, write_questions

from tiny_models import random_ids
from widecli.evaluate.language_model import ScoringModel
from widecli.model import checkpoint
from widecli.model.backbone import load_backbone
from widecli.recipe.schema import ModelSection

PAIRS = [("the old fox", " sees a river"), ("Line 7: the cold", " train"), ("", "seven stones")]


def task_config(data: Path) -> dict[str, Any]:
    """lm-eval's own openbookqa, its data set below `data`."""
    import lm_eval.tasks

    config: dict[str, Any] = yaml.safe_load(
        Path(lm_eval.tasks.__file__).with_name("openbookqa").joinpath("openbookqa.yaml").read_text()
    )
    config.pop("tag", None)
    return {**config, "dataset_path": str(data / "allenai/openbookqa")}


@pytest.mark.slow
def test_without_widecli_the_card_s_code_runs_and_lm_eval_gives_the_figures_of_wide_eval(
    wide: Wide, adapted: Outcome, workplace: Path
) -> None:
    write_questions(workplace / "data")
    assert wide("export", "adapted", "--merge", "--out", "merged").code == 0
    ids = random_ids(2, 24, vocabulary=200)
    said = {"ids": ids.tolist(), "pairs": PAIRS, "config": task_config(workplace / "data")}
    Path("task.json").write_text(json.dumps(said))
    worker = Path(__file__).with_name("alone_worker.py")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    alone = subprocess.run(
        [sys.executable, "-P", worker, "merged", "task.json", "found.safetensors"],
        capture_output=True,
        text=True,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    assert alone.returncode == 0, alone.stderr
    document = json.loads(alone.stdout.splitlines()[-1])
    assert len(document["printed"]) == 1 and document["printed"][0].startswith("The river")

    backbone = load_backbone(ModelSection(name="merged"))
    routed, _ = checkpoint.attach(Path("merged"), backbone)
    with torch.no_grad(), routed.tracing(keep_masks=True) as trace:
        logits = backbone.model(ids).logits
    found = load_file("found.safetensors")
    torch.testing.assert_close(found.pop("logits"), logits, rtol=1e-5, atol=1e-5)
    assert trace.masks is not None and len(found) == len(trace.masks) == 4
    for (layer, part), masks in trace.masks.items():
        assert torch.equal(found[f"{layer}.{part}"].flatten(), masks[0].bool().flatten())
    scorer = ScoringModel(backbone.model, backbone.tokenizer, batch_size=2, max_length=64, name="merged")
    ours = scorer._loglikelihood_tokens(
        [(p, *tokens) for p, tokens in zip(PAIRS, scorer.encode_pairs(PAIRS), strict=True)]
    )
    assert document["loglikelihoods"] == pytest.approx([value for value, _ in ours], rel=1e-4)

    measured = wide("eval", "merged", "--no-dense", *QUESTIONS, "--json").document["tasks"]["openbookqa"]
    theirs = document["results"]["openbookqa"]
    assert {key: theirs[key] for key in ("acc,none", "acc_norm,none")} == pytest.approx(
        {key: measured[key] for key in ("acc,none", "acc_norm,none")}
    )


def test_the_hub_reads_what_a_card_says_was_measured(wide: Wide, adapted: Outcome, workplace: Path) -> None:
    from huggingface_hub import ModelCard

    write_questions(workplace / "data")
    assert wide("eval", "adapted", *QUESTIONS, "--limit", 4, "--run-dir", "eval-tasks").code == 0
    assert wide("export", "adapted", "--merge", "--out", "merged").code == 0
    data = ModelCard.load(Path("merged/README.md")).data
    assert data.library_name == "transformers" and data.pipeline_tag == "text-generation" and "wide" in data.tags
    results = {(r.dataset_name, r.metric_type): r for r in data.eval_results}
    newer = json.loads(Path("eval-tasks/summary.json").read_text())
    assert results["held-out", "perplexity"].metric_value == newer["perplexity"]["held-out/token_ppl"]
    accuracy = results["openbookqa", "acc_norm"]
    assert accuracy.metric_value == newer["tasks"]["openbookqa"]["acc_norm,none"]
    assert accuracy.metric_args == {"limit": 4} and accuracy.metric_name == "acc_norm, routed, run eval-tasks"
    assert {name for name, _ in results} == {"held-out", "openbookqa"}, "an average is no data set"


def test_a_card_without_an_evaluation_has_no_results(wide: Wide, adapted: Outcome) -> None:
    assert wide("export", "adapted/checkpoints/step-000004", "--out", "half").code == 0
    front = yaml.safe_load(Path("half/README.md").read_text().split("---")[1])
    assert "model-index" not in front and front["library_name"] == "transformers"

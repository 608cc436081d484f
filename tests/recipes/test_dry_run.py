"""`--dry-run` of every shipped recipe that trains: offline, nothing loaded, nothing written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from whole_commands import PLAIN, Outcome, Wide

from widecli.recipe.files import shipped_recipes

TRAINING = [name for name in shipped_recipes() if name.startswith(("calibrate/", "lora/")) or name == "demo"]


@pytest.fixture
def sealed(monkeypatch: pytest.MonkeyPatch, workplace: Path) -> Path:
    """No network, no model, no cache to write to: everything would lie below this folder."""
    import socket

    import transformers

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a dry run must not load, connect or convert anything")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refuse)
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HOME"):
        monkeypatch.setenv(name, str(workplace / "home"))
    return workplace


@pytest.mark.parametrize("name", TRAINING)
def test_every_shipped_recipe_can_be_dry_run_offline_and_touches_nothing(wide: Wide, sealed: Path, name: str) -> None:
    command = name.split("/")[0] if "/" in name else "calibrate"
    done = wide(command, name.split("/")[-1], "--dry-run", "--offline", "--json")
    assert done.code == 0, done.err
    document = done.document
    assert document["schema"] == "wide.dry_run/1" and document["command"] == command
    estimate, shape = document["estimate"], document["shape"]
    assert estimate["tokens"] == (
        document["recipe"]["train"]["steps"]
        * document["recipe"]["train"]["batch_size"]
        * document["recipe"]["data"]["sequence_length"]
    )
    assert estimate["memory_bytes"] > estimate["weights_bytes"] > 0
    assert (estimate["adapter_parameters"] > 0) == (command == "lora")
    assert shape["intermediate_size"] % document["plan"]["ffn_group_size"] == 0
    assert list(sealed.iterdir()) == []


def test_the_dry_run_counts_router_and_compensation_parameters_as_they_are(
    wide: Wide, tiny_recipe: Path, workplace: Path
) -> None:
    from tiny_models import tiny_model
    from widecli.model.plan import CompensationPlan, RoutingPlan
    from widecli.model.routed import RoutedModel

    estimate = wide("calibrate", tiny_recipe, "--dry-run", "--json").document["estimate"]
    routed = RoutedModel.attach(tiny_model(), RoutingPlan(2, 16, rank=4, compensation=CompensationPlan(True, 4)))
    assert estimate["router_parameters"] == sum(p.numel() for p in routed.routers.parameters())
    assert estimate["compensation_parameters"] == sum(p.numel() for p in routed.compensations.parameters())
    assert estimate["groups_per_token"] == routed.total_groups
    without = wide("calibrate", tiny_recipe, *PLAIN, "--dry-run", "--json").document["estimate"]
    assert without["compensation_parameters"] == 0 and without["flops"] < estimate["flops"]
    assert not (workplace / "runs").exists()


def words(done: Outcome) -> str:
    """The table's text in one line."""
    return " ".join(done.err.replace("│", " ").split())


def test_the_table_says_how_channels_are_grouped_what_skipping_leaves_and_who_teaches(
    wide: Wide, tiny_recipe: Path
) -> None:
    made = words(wide("calibrate", tiny_recipe, "train.distill=0.3", "--dry-run"))
    assert "FFN channels regrouped: those that tokens need together share a group; found before the first step" in made
    assert "a skipped group leaves its mean and a bypass of rank 4 " in made
    assert "objective 30% the KL divergence from the dense model, which runs beside it, the LM loss 70%" in made
    assert "router parameters, 1,408 of compensation" in made
    plain = words(wide("calibrate", tiny_recipe, *PLAIN, "--dry-run"))
    assert "FFN channels grouped as they are stored" in plain
    assert "a skipped group leaves nothing: it is not compensated" in plain
    assert "objective" not in plain and "of compensation" not in plain
    mean = words(wide("calibrate", tiny_recipe, "compensation.rank=0", "--dry-run"))
    assert "a skipped group leaves its mean budget" in mean
    parts = words(wide("calibrate", tiny_recipe, "--mode", "token", "~compensation.rank", "--dry-run"))
    assert "FFN channels" not in parts and "leaves nothing" in parts
    taught = words(wide("lora", tiny_recipe, "lora.objective=distill", "--dry-run"))
    assert "as the calibration regrouped them" in taught and "objective 100% the KL divergence" in taught


def test_the_dry_run_counts_adapter_parameters_as_published(wide: Wide) -> None:
    """41.9 million for rank 16 on Llama-3.1-8B: 32 layers x 16 x (2 x 8192 + 2 x 5120 + 3 x 18432)."""
    document = wide("lora", "llama-3.1-8b_s50_g64", "--dry-run", "--json").document
    assert document["estimate"]["adapter_parameters"] == 41_943_040
    frozen, taught = (
        wide("lora", "llama-3.1-8b_s50_g64", change, "--dry-run", "--json").document["estimate"]
        for change in ("lora.freeze_routers=true", "lora.objective=distill")
    )
    assert frozen["trainable_bytes"] == 16 * 41_943_040 < document["estimate"]["trainable_bytes"]
    # the teacher's pass has no routers and no compensation
    assert taught["flops"] == pytest.approx(document["estimate"]["flops"] * 4 / 3, rel=0.01)


def test_without_a_checkpoint_only_a_recipe_can_be_dry_run(wide: Wide, workplace: Path) -> None:
    wide("lora", "--dry-run").refused_with("no calibrated checkpoint below runs/")
    wide("lora", "smollm2_s50_g64").refused_with("no calibrated checkpoint below runs/")
    assert "no checkpoint was checked" in wide("lora", "smollm2_s50_g64", "--dry-run").err
    assert list(workplace.iterdir()) == []


def test_the_backbone_of_the_estimate_is_the_real_one(wide: Wide) -> None:
    document = wide("calibrate", "smollm2_s50_g64", "--dry-run", "--json").document
    assert document["estimate"]["backbone_parameters"] == pytest.approx(134.5e6, rel=0.01)
    document = wide("calibrate", "llama-3.1-8b_s50_g64", "--dry-run", "--json").document
    assert document["estimate"]["backbone_parameters"] == pytest.approx(8.03e9, rel=0.01)


def test_without_json_people_get_a_table_on_stderr(wide: Wide) -> None:
    done = wide("calibrate", "smollm2_s50_g64", "--dry-run")
    assert done.code == 0 and done.out == ""
    assert "nothing was loaded or written" in done.err and "30 layers, D 576" in done.err


def test_a_dry_run_says_what_it_takes_here_where_there_is_no_gpu(wide: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from widecli.cli import cost_card

    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        cost_card._cpu_rate.cache_clear()
        done = wide("calibrate", "smollm2_s50_g64", "--dry-run", "--offline")
        said = " ".join(done.err.replace("│", " ").split())  # wherever the table breaks its lines
        assert "on one H200" in said
        assert ("on this machine, which has no GPU, about" in said) is not there
    cost_card._cpu_rate.cache_clear()


def test_a_dry_run_refuses_what_the_run_would(wide: Wide, workplace: Path) -> None:
    wide("calibrate", "smollm2_s50_g64", "--dry-run", "--G", 100).refused_with("FFN group size 100", "valid sizes")
    wide("calibrate", "--dry-run", "budget.kind=parts").refused_with("budget.attention")
    assert not (workplace / "runs").exists()


def test_the_short_form_of_the_readme_dry_runs_on_any_machine(wide: Wide) -> None:
    document = wide("calibrate", "--sparsity", 0.5, "--dry-run", "--json").document
    assert document["recipe"]["budget"]["sparsity"] == 0.5
    assert document["recipe"]["model"]["name"] == "smollm2-135m"


@pytest.mark.slow
def test_a_real_process_prints_one_document_and_nothing_else_on_stdout(workplace: Path) -> None:
    import json

    done = subprocess.run(
        [sys.executable, "-m", "widecli", "calibrate", "llama-3.1-8b_s25_g32", "--dry-run", "--json"],
        capture_output=True,
        text=True,
        cwd=workplace,
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p),
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["recipe"]["train"]["steps"] == 10_000


def test_data_that_is_not_there_is_refused(wide: Wide, tiny_recipe: Path, workplace: Path) -> None:
    done = wide("calibrate", str(tiny_recipe), "data.source=missing/*.jsonl", "--dry-run")
    assert done.code == 2
    assert "missing/*.jsonl" in done.err


@pytest.mark.parametrize("arguments", [["--dry-run"], []])
def test_a_validation_text_that_is_not_there_is_refused_before_anything_is_loaded(
    wide: Wide, tiny_recipe: Path, workplace: Path, arguments: list[str]
) -> None:
    refused = wide("calibrate", tiny_recipe, "data.validation=held-uot.txt", *arguments)
    refused.refused_with("held-uot.txt is no perplexity text")
    assert "loading" not in refused.err and not (workplace / "runs").exists()


def test_a_dry_run_of_several_gpus_says_what_each_takes_and_what_to_change(wide: Wide) -> None:
    tight = ("calibrate", "llama-3.1-8b_s50_g64", "distributed.memory_gib=20", "--dry-run")
    done = wide(*tight, "--nproc", 2, "--json")
    estimate = done.document["estimate"]
    assert estimate["ranks"] == 2 and not estimate["fits"] and estimate["reference"] == "2 H200s"
    assert estimate["gpu_hours_on_reference"] == pytest.approx(2 * estimate["seconds_on_reference"] / 3600)
    assert "that does not fit 20.0 GiB; this does:" in " ".join(done.err.replace("│", " ").split())
    changed = wide(*tight, *estimate["changes_to_fit"], "--nproc", 2, "--json").document["estimate"]
    assert changed["fits"] and changed["changes_to_fit"] == []
    assert changed["memory_bytes"] < 20 * 2**30 < estimate["memory_bytes"]


def test_a_batch_that_ranks_cannot_share_is_refused_before_anything_starts(wide: Wide, tiny_recipe: Path) -> None:
    wide("calibrate", tiny_recipe, "--dry-run", "--nproc", 3).refused_with("3 ranks", "2 sequences")
    wide("calibrate", tiny_recipe, "--dry-run", "--nproc", 2, "train.micro_batch_size=2").refused_with("one rank")

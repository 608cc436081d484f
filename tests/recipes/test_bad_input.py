"""What cannot work ends in one sentence and exit code 2 (1 at run time), before anything is lost."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from whole_commands import Wide


def no_run(workplace: Path) -> bool:
    return not (workplace / "runs").exists()


def test_a_group_size_that_does_not_divide_lists_the_valid_ones(wide: Wide, tiny_recipe: Path, workplace: Path) -> None:
    wide("calibrate", tiny_recipe, "--G", 48).refused_with("FFN group size 48", "valid sizes: 16, 32, 64")
    assert no_run(workplace)


def test_a_head_group_that_breaks_gqa_lists_the_valid_ones(wide: Wide, tiny_recipe: Path, workplace: Path) -> None:
    refused = wide("calibrate", tiny_recipe, "routing.attention_group_size=3")
    refused.refused_with("attention group size 3", "4 query heads with 2 KV heads", "valid sizes: 1, 2, 4")
    assert no_run(workplace)


@pytest.mark.parametrize("changes", [["--mode", "patterns"], ["routing.pattern_count=16"], ["routing.mode=patterns"]])
def test_a_recipe_with_patterns_is_refused(wide: Wide, tiny_recipe: Path, workplace: Path, changes: list[str]) -> None:
    wide("calibrate", tiny_recipe, *changes).refused_with("routing.", "no longer has", "use widecli 0.1 for it")
    assert no_run(workplace)


@pytest.mark.parametrize(
    "command",
    [
        *(["eval"], ["lora"], ["generate", "--prompt", "a"], ["inspect"], ["export", "--out", "x"]),
        *(["export", "--out", "x", "--merge"], ["profile"], ["profile", "--masks", "random"]),
    ],
)
def test_a_checkpoint_with_patterns_is_refused_by_every_command(
    wide: Wide, run: Any, workplace: Path, command: list[str]
) -> None:
    for config in (workplace / "calibrated" / "checkpoints").glob("*/wide_config.json"):
        config.write_text(config.read_text().replace("wide.checkpoint/4", "wide.checkpoint/3"))
        recipe = config.with_name("recipe.yaml")
        recipe.write_text(recipe.read_text().replace("mode: wide", "mode: patterns"))
    name, *options = command
    refused = wide(name, "calibrated", *options)
    refused.refused_with("was trained with routing.mode=patterns", "use widecli 0.1 for it")
    assert refused.err.count("routing.mode") == 1 and not (workplace / "x").exists()


@pytest.mark.parametrize("sparsity", [1, 1.5, -0.1, "nan", "half"])
def test_a_sparsity_outside_zero_to_one_is_refused(
    wide: Wide, tiny_recipe: Path, workplace: Path, sparsity: object
) -> None:
    wide("calibrate", tiny_recipe, f"budget.sparsity={sparsity}").refused_with("budget.sparsity", str(sparsity))
    assert no_run(workplace)


def test_the_sparsity_flag_is_checked_too(wide: Wide, tiny_recipe: Path) -> None:
    wide("calibrate", tiny_recipe, "--sparsity", "1.0").refused_with("budget.sparsity", "below 1")


@pytest.mark.parametrize("kind", ["GPT2", "GPTNeoX", "Opt"])
@pytest.mark.parametrize("dry", [True, False])
def test_an_unsupported_architecture_says_what_is_missing(
    wide: Wide, tiny_recipe: Path, workplace: Path, kind: str, dry: bool
) -> None:
    import transformers

    sizes: dict[str, Any] = {
        "GPT2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 300, "n_positions": 64},
        "GPTNeoX": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
        "Opt": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32},
    }[kind]
    name = "OPT" if kind == "Opt" else kind
    getattr(transformers, f"{name}Config")(**sizes).save_pretrained(workplace / "other")
    refused = wide("calibrate", tiny_recipe, "--model", "other", *(["--dry-run"] if dry else []))
    refused.refused_with("is not supported yet", "llama", "families.py")
    assert no_run(workplace)


def test_missing_data_is_named(wide: Wide, tiny_recipe: Path) -> None:
    wide("calibrate", tiny_recipe, "--data", "nowhere/*.jsonl").refused_with("nowhere/*.jsonl")


def test_unreadable_data_is_named_with_its_line(wide: Wide, tiny_recipe: Path, workplace: Path) -> None:
    (workplace / "bad.jsonl").write_text('{"text": "good"}\n{"text": \n')
    wide("calibrate", tiny_recipe, "--data", "bad.jsonl").refused_with("bad.jsonl", "line 2")


def test_a_cut_gzip_file_is_named(wide: Wide, tiny_recipe: Path, workplace: Path) -> None:
    content = gzip.compress(json.dumps({"text": os.urandom(3000).hex()}).encode())
    (workplace / "cut.jsonl.gz").write_bytes(content[: len(content) // 2])
    wide("calibrate", tiny_recipe, "--data", "cut.jsonl.gz").refused_with("cut.jsonl.gz")


def test_an_empty_source_is_named(wide: Wide, tiny_recipe: Path, workplace: Path) -> None:
    (workplace / "empty.txt").write_text("")
    wide("calibrate", tiny_recipe, "--data", "empty.txt").refused_with("empty.txt", "empty")


def test_a_text_shorter_than_one_sequence_says_so(wide: Wide, tiny_recipe: Path, workplace: Path) -> None:
    (workplace / "short.txt").write_text("Too short.")
    wide("calibrate", tiny_recipe, "--data", "short.txt").refused_with("less than one sequence", "sequence_length=32")


def test_a_wrong_text_field_lists_those_that_are_there(wide: Wide, tiny_recipe: Path, workplace: Path) -> None:
    (workplace / "rows.jsonl").write_text(json.dumps({"body": "words " * 50}) + "\n")
    wide("calibrate", tiny_recipe, "--data", "rows.jsonl").refused_with("'text'", "body")


def test_a_held_out_text_that_is_missing_is_named(wide: Wide, tiny_recipe: Path) -> None:
    wide("calibrate", tiny_recipe, "data.validation=nowhere.txt").refused_with("nowhere.txt")


def test_a_model_folder_that_is_missing_is_named(wide: Wide, tiny_recipe: Path, workplace: Path) -> None:
    wide("calibrate", tiny_recipe, "--model", "./nowhere").refused_with("./nowhere is not a folder with a model")
    assert no_run(workplace)


def test_a_model_folder_with_damaged_weights_is_named(
    wide: Wide, tiny_recipe: Path, workplace: Path, model_folder: Path
) -> None:
    shutil.copytree(model_folder, workplace / "damaged")
    path = workplace / "damaged" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    wide("calibrate", tiny_recipe, "--model", "damaged").refused_with("damaged cannot be loaded", "corrupt")


def test_a_model_folder_without_weights_is_named(
    wide: Wide, tiny_recipe: Path, workplace: Path, model_folder: Path
) -> None:
    shutil.copytree(model_folder, workplace / "hollow")
    (workplace / "hollow" / "model.safetensors").unlink()
    wide("calibrate", tiny_recipe, "--model", "hollow").refused_with("hollow cannot be loaded")


def test_an_unreachable_hub_is_one_sentence_for_models(wide: Wide, tiny_recipe: Path, workplace: Path) -> None:
    refused = wide("calibrate", tiny_recipe, "--model", "nobody/no-such-model")
    refused.refused_with("nobody/no-such-model", "nor reachable on the Hub", "smollm2-135m")
    assert no_run(workplace)


def test_an_unreachable_hub_is_one_sentence_for_data(wide: Wide, tiny_recipe: Path) -> None:
    refused = wide("calibrate", tiny_recipe, "--data", "nobody/no-such-data", "--offline")
    assert refused.code in (1, 2)
    refused.refused_with("nobody/no-such-data", code=refused.code)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a gguf file at all" * 20])
def test_a_corrupt_gguf_is_one_sentence(wide: Wide, tiny_recipe: Path, workplace: Path, content: bytes) -> None:
    (workplace / "broken.gguf").write_bytes(content)
    for extra in ([], ["--dry-run"]):
        refused = wide("calibrate", tiny_recipe, "--model", "broken.gguf", *extra)
        refused.refused_with("broken.gguf is not a readable GGUF file")
    assert no_run(workplace)


def test_a_missing_gguf_is_named(wide: Wide, tiny_recipe: Path) -> None:
    wide("calibrate", tiny_recipe, "--model", "nowhere.gguf").refused_with("nowhere.gguf does not exist")


def test_no_space_left_is_one_sentence_with_exit_code_1(
    wide: Wide, tiny_recipe: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from widecli.train import state

    def full(path: Path, step: int) -> None:
        if step >= 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_text(json.dumps({"schema": state.SCHEMA, "step": step}))

    monkeypatch.setattr(state, "write_step", full)
    wide("calibrate", tiny_recipe, "--run-dir", "r").refused_with("step-000004", "No space left", code=1)
    kept = sorted(p.name for p in (workplace / "r/checkpoints").iterdir())
    assert kept == ["step-000000", "step-000002"]
    monkeypatch.undo()
    os.chdir(workplace)
    assert wide("calibrate", tiny_recipe, "--run-dir", "r", "--resume").code == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_run_directory_that_cannot_be_written_is_one_sentence(wide: Wide, tiny_recipe: Path, workplace: Path) -> None:
    (workplace / "locked").mkdir(mode=0o500)
    wide("calibrate", tiny_recipe, "--run-dir", "locked/r").refused_with("locked/r", code=1)


def test_a_run_directory_that_is_something_else_is_left_alone(wide: Wide, tiny_recipe: Path, workplace: Path) -> None:
    (workplace / "mine").mkdir()
    (workplace / "mine" / "thesis.txt").write_text("years")
    wide("calibrate", tiny_recipe, "--run-dir", "mine", "--overwrite").refused_with("not a run directory")
    assert (workplace / "mine" / "thesis.txt").read_text() == "years"


def test_a_run_directory_that_is_a_file_is_refused(wide: Wide, tiny_recipe: Path) -> None:
    wide("calibrate", tiny_recipe, "--run-dir", tiny_recipe).refused_with("is a file")


def test_an_unknown_key_gets_a_suggestion(wide: Wide, tiny_recipe: Path, workplace: Path) -> None:
    wide("calibrate", tiny_recipe, "train.step=3").refused_with("train.step", "train.steps")
    assert no_run(workplace)


def test_without_a_wandb_login_there_is_a_warning_and_the_run_goes_on(
    wide: Wide, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch, workplace: Path
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(workplace / "wandb-config"))
    monkeypatch.setenv("HOME", str(workplace))
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("NETRC", str(workplace / "no-netrc"))
    done = wide("calibrate", tiny_recipe, "--wandb", "auto", "--steps", 1, "--json")
    assert done.code == 0, done.err
    assert "W&B" in done.err
    assert done.document["steps"] == 1


def test_too_little_text_to_regroup_by_says_how_much_is_needed(wide: Wide, tiny_recipe: Path, workplace: Path) -> None:
    (workplace / "short.txt").write_text("Ten words.")
    short = ("--data", "short.txt", "data.sequence_length=8", "--run-dir", "r")
    refused = wide("calibrate", tiny_recipe, *short)
    refused.refused_with("regrouping 64 channels into 4 groups needs at least 16 tokens", "there were 8")
    assert not Path("r/summary.json").exists() and not list(Path("r/checkpoints").iterdir())
    assert wide("calibrate", tiny_recipe, *short, "routing.grouping=contiguous", "--overwrite").code == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["compensation.rank=-1"], ["compensation.rank", "-1"]),
        (["compensation.rank=33"], ["compensation.rank=33", "between 0 and the hidden size 32"]),
        (["compensation.mean=perhaps"], ["compensation.mean", "perhaps"]),
        (["compensation.learning_rate=0"], ["compensation.learning_rate", "above 0"]),
        (["routing.grouping=sorted"], ["routing.grouping", "sorted", "clustered, contiguous"]),
        (["--mode", "token", "routing.grouping=clustered"], ["routing.mode=token", "must be contiguous"]),
        (["train.distill=1.5"], ["train.distill", "1.5"]),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_groups_and_compensation_that_cannot_be_are_refused(
    wide: Wide, tiny_recipe: Path, workplace: Path, changes: list[str], words: list[str], dry: bool
) -> None:
    wide("calibrate", tiny_recipe, *changes, *(["--dry-run"] if dry else [])).refused_with(*words)
    assert no_run(workplace)


STARTS = [
    *(["eval", "--no-dense"], ["lora"], ["generate", "--prompt", "a"], ["inspect"]),
    ["export", "--out", "x", "--merge"],
]


@pytest.mark.parametrize("command", STARTS)
@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("channels", lambda t: {"order": t["order"].clamp_min(1)}, ["is damaged", "layer 0 are no permutation"]),
        ("channels", lambda t: {"order": t["order"][:, :48].clone()}, ["(2, 48)", "another model"]),
        ("channels", lambda t: {"order": t["order"].long()}, ["torch.int64", "another model"]),
        ("channels", lambda t: {}, ["lacks its tensor 'order'"]),
        ("channels", None, ["take another checkpoint"]),
        ("compensation", lambda t: dict(list(t.items())[1:]), ["does not fit its own plan", "missing 0.attention."]),
        (
            "compensation",
            lambda t: {k: v[:1].clone() for k, v in t.items()},
            ["does not fit its own plan", "has shape"],
        ),
        ("compensation", None, ["take another checkpoint"]),
    ],
)
def test_routing_files_that_do_not_fit_are_named_by_every_command(
    wide: Wide, run: Any, file: str, change: Any, words: list[str], command: list[str]
) -> None:
    path = Path("calibrated/checkpoints/step-000008", f"{file}.safetensors")
    if change is None:
        path.unlink()
    else:
        save_file(change(load_file(path)), path)
    name, *options = command
    wide(name, "calibrated", *options, *(["--run-dir", "r"] if name == "lora" else [])).refused_with(path.stem, *words)
    assert not Path("x").exists() and not list(Path().glob("r*/**/*.safetensors"))
    if change is None:
        assert not Path("runs").exists()  # a file that is missing is seen before anything begins


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([], "the model predicts NaN in float32"),
        (["data.validation=null"], "ffn of layer 1 gives NaN or infinity"),
        (["data.validation=null", "routing.grouping=contiguous"], "ffn of layer 1 gives NaN or infinity"),
    ],
)
def test_activations_that_are_not_finite_are_named(
    wide: Wide, tiny_recipe: Path, workplace: Path, model_folder: Path, changes: list[str], said: str
) -> None:
    shutil.copytree(model_folder, workplace / "broken")
    weights = load_file(workplace / "broken/model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"].fill_(1e38)  # finite, but no sum of them is
    save_file(weights, workplace / "broken/model.safetensors", metadata={"format": "pt"})
    options = ("--model", "broken", "--run-dir", "r", *changes)
    wide("calibrate", tiny_recipe, *options).refused_with(said, "check the model")
    assert not list(Path("r").glob("checkpoints/*"))


def test_a_plan_that_routes_nothing_is_refused(wide: Wide, tiny_recipe: Path, workplace: Path) -> None:
    refused = wide("calibrate", tiny_recipe, "routing.layers={0: {parts: none}, 1: {parts: none}}")
    refused.refused_with("routes nothing")
    assert no_run(workplace)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["budget.kind=parts"], ["budget.attention or budget.ffn"]),
        (["budget.attention=0.5"], ["budget.kind=parts"]),
        (["--mode", "layer", "routing.parts=ffn"], ["routing.mode=layer"]),
        (["routing.layers={7: {parts: ffn}}"], ["layer 7", "0 to 1"]),
        (["train.micro_batch_size=3"], ["train.micro_batch_size=3", "train.batch_size=2"]),
        (["--mode", "narrow"], ["routing.mode", "narrow", "wide, token, layer"]),
        (["--steps", "-1"], ["train.steps", "-1"]),
    ],
)
def test_choices_that_contradict_each_other_are_refused(
    wide: Wide, tiny_recipe: Path, workplace: Path, changes: list[str], words: list[str]
) -> None:
    wide("calibrate", tiny_recipe, *changes).refused_with(*words)
    assert no_run(workplace)


@pytest.mark.parametrize("where", ["/proc/none", "a-file", "a-file/below"])
@pytest.mark.parametrize("source", [None, "self"])
def test_a_cache_folder_that_cannot_be_made_is_one_sentence(
    wide: Wide, tiny_recipe: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch, where: str, source: str | None
) -> None:
    (workplace / "a-file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(workplace / where))
    refused = wide("calibrate", tiny_recipe, *(["--data", source] if source else []), "--run-dir", "r")
    refused.refused_with("cache folder", "is not writable", "XDG_CACHE_HOME", code=1)
    assert not list(Path("r").glob("checkpoints/*"))

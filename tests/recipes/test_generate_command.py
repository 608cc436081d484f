"""`wide generate` as a whole: text on stdout, figures on stderr, one document with `--json`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from whole_commands import Wide, invoke, write_recipe


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, text_file: Path, held_out: Path) -> Path:
    """The run directory of one calibration."""
    folder = tmp_path_factory.mktemp("calibration")
    write_recipe(folder / "tiny.yaml", model_folder, text_file, held_out)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        done = invoke("calibrate", "tiny.yaml", "train.steps=2", "--run-dir", "calibrated", "--json")
    assert done.code == 0, done.err
    return folder / "calibrated"


def test_the_text_goes_to_stdout_and_the_figures_to_stderr(wide: Wide, calibrated: Path) -> None:
    done = wide("generate", calibrated, "--prompt", "Line 4: the old", "--max-new-tokens", 12)
    assert done.code == 0, done.err
    document = wide("generate", calibrated, "--prompt", "Line 4: the old", "--max-new-tokens", 12, "--json").document
    assert done.out == document["text"] + "\n"
    assert "tokens/s" in done.err and "skipped: attention" in done.err
    assert document["schema"] == "wide.generation/1" and document["routed"] is True
    assert document["prefill"]["tokens"] == 15 and document["decode"]["tokens"] >= len(document["tokens"]) - 1
    assert 0 < document["skip_rate"]["mean"] < 1 and 0 < document["flops_skipped"]["prunable"] < 1
    assert document["checkpoint"] == str(calibrated)


def test_the_newest_checkpoint_is_taken_and_its_dense_backbone_on_request(
    wide: Wide, calibrated: Path, workplace: Path, model_folder: Path
) -> None:
    for age, name in enumerate(["calibrate-b", "calibrate-a"]):
        shutil.copytree(calibrated, workplace / "runs" / name)
        os.utime(workplace / "runs" / name, (1e9 - age, 1e9 - age))
    asked = ("--prompt", "the fox", "--max-new-tokens", 6, "--json")
    newest = wide("generate", *asked)
    assert newest.code == 0, newest.err
    assert "calibrate-b" in newest.document["checkpoint"] and "the newest checkpoint" in newest.err
    dense = wide("generate", "--dense", *asked).document
    assert dense["routed"] is False and dense["skip_rate"] is None
    assert dense["tokens"] == wide("generate", "--model", model_folder, *asked).document["tokens"]


def test_prompts_come_from_files_too_and_draws_from_their_seed(wide: Wide, calibrated: Path, workplace: Path) -> None:
    (workplace / "prompt.txt").write_text("the cold child", encoding="utf-8")
    drawn = [
        wide("generate", calibrated, "--prompt-file", "prompt.txt", "--temperature", 1.0, "--seed", seed, "--json")
        for seed in (1, 1, 2)
    ]
    assert drawn[0].code == 0, drawn[0].err
    tokens = [d.document["tokens"] for d in drawn]
    assert tokens[0] == tokens[1] != tokens[2]
    assert drawn[0].document["prompt"] == "the cold child"
    most = 128 - 14  # nothing said about new tokens: no more than the model can hold
    assert all(len(t) == most or d.document["finish"] == "stop" for t, d in zip(tokens, drawn, strict=True))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ["--prompt TEXT or --prompt-file"]),
        (("--prompt", "a", "--prompt-file", "b"), ["one of the two"]),
        (("--prompt-file", "missing.txt"), ["missing.txt", "cannot be read"]),
        (("--prompt", ""), ["the prompt is empty"]),
        (("--prompt", "a", "--top-p", "0"), ["top_p must be above 0", "0.0"]),
        (("--prompt", "a", "--temperature", "-1"), ["temperature", "-1.0"]),
        (("--prompt", "a", "--max-new-tokens", "0"), ["at least one new token", "0"]),
        (("--prompt", "a", "--max-new-tokens", "500"), ["at most 127 new tokens"]),
        (("--prompt", "a" * 300), ["300 tokens", "at most 128"]),
        (("--prompt", "a", "--chat"), ["no chat template", "--chat"]),
        (("--prompt", "a", "--model", "x"), ["names its own model"]),
    ],
)
def test_bad_input_is_one_sentence(wide: Wide, calibrated: Path, arguments: tuple[str, ...], words: list[str]) -> None:
    wide("generate", calibrated, *arguments).refused_with(*words)


def test_without_any_checkpoint_it_says_what_to_do(wide: Wide) -> None:
    wide("generate", "--prompt", "a").refused_with("no checkpoint below runs/", "--model")
    wide("generate", "nowhere", "--prompt", "a").refused_with("nowhere", "neither a checkpoint")


TEMPLATES = {
    "refuses": (
        "{{ raise_exception('A system message is needed') }}",
        ["does not take the prompt", "A system"],
    ),
    "undefined": ("{{ date.year }}", ["does not take the prompt", "'date' is undefined"]),
    "syntax": ("{% for m in messages %}", ["does not take the prompt", "endfor"]),
    "names": ({"tool_use": "a", "rag": "b"}, ["for special uses alone (rag, tool_use)", "none of them called default"]),
    "nothing": ("", ["has no chat template"]),
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_chat_template_that_cannot_be_used_is_one_sentence(
    wide: Wide, workplace: Path, model_folder: Path, kind: str
) -> None:
    template, words = TEMPLATES[kind]
    write_template(workplace / "m", model_folder, template)
    refused = wide("generate", "--model", "m", "--chat", "--prompt", "river")
    refused.refused_with(*words, "leave out --chat")
    assert wide("generate", "--model", "m", "--prompt", "river", "--max-new-tokens", 2).code == 0


@pytest.mark.parametrize("end", ['"x"', "[1, 2.5]", "true"])
def test_an_end_of_text_that_is_no_token_is_one_sentence(
    wide: Wide, workplace: Path, model_folder: Path, end: str
) -> None:
    model = shutil.copytree(model_folder, workplace / "model")
    (model / "generation_config.json").write_text(f'{{"eos_token_id": {end}}}')
    refused = wide("generate", "--model", model, "--prompt", "a river", "--max-new-tokens", 2)
    refused.refused_with("as a token that ends a text", "mend eos_token_id in its generation_config.json")


def test_of_named_chat_templates_the_default_is_used(wide: Wide, workplace: Path, model_folder: Path) -> None:
    plain = "{{ messages[0]['content'] }}!"
    write_template(workplace / "one", model_folder, plain)
    write_template(workplace / "named", model_folder, {"default": plain, "rag": "{{ raise_exception('no') }}"})
    found = []
    for name in ("one", "named"):
        done = wide("generate", "--model", name, "--chat", "--prompt", "river", "--max-new-tokens", 4, "--json")
        assert done.code == 0, done.err
        found.append((done.document["tokens"], done.document["prefill"]["tokens"]))
    assert found[0] == found[1] and found[0][1] == len("river!")


def write_template(folder: Path, model_folder: Path, template: object) -> None:
    from transformers import AutoTokenizer

    shutil.copytree(model_folder, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template or None
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("content", [b"caf\xe9", b"\xff\xfea", b"a\xed\xa0\x80"])
@pytest.mark.parametrize("way", ["file", "stdin", "argument"])
def test_a_prompt_that_is_no_utf8_is_one_sentence(
    workplace: Path, model_folder: Path, way: str, content: bytes
) -> None:
    (workplace / "prompt.txt").write_bytes(content)
    given = os.fsdecode(content)
    asked = {"file": "--prompt-file=prompt.txt", "stdin": "--prompt-file=-", "argument": f"--prompt={given}"}
    done = invoke("generate", "--model", model_folder, asked[way], stdin=content)
    done.refused_with("UTF-8 text")


def test_standard_input_is_read_alike_in_every_locale(workplace: Path, model_folder: Path) -> None:
    """Where the locale is C, Python lets any byte of it through."""
    command = [sys.executable, "-m", "widecli", "generate", "--model", str(model_folder), "--prompt-file", "-"]
    paths = os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p)
    environment = {**os.environ, "PYTHONPATH": paths, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(command, input=b"caf\xe9", capture_output=True, env=environment, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: standard input cannot be read as UTF-8 text"), done.stderr


def test_a_prompt_from_standard_input_is_read_as_utf8(workplace: Path, model_folder: Path) -> None:
    asked = ("--prompt-file", "-", "--max-new-tokens", 2, "--json")
    done = invoke("generate", "--model", model_folder, *asked, stdin="né à Łódź".encode())
    assert done.code == 0 and done.document["prompt"] == "né à Łódź"

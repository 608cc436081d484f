"""`wide eval` as a whole: a checkpoint, a dense model, both side by side."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from whole_commands import Outcome, Wide, write_questions

KEYS = {
    "schema",
    "command",
    "model",
    "plan",
    "skip_rate",
    "flops_skipped",
    "steps",
    "tokens_per_second",
    "checkpoint",
    "run_dir",
    "perplexity",
    "tasks",
    "average",
    "retention",
    "dense",
}


@pytest.fixture
def questions(workplace: Path) -> Path:
    """A data root with `allenai/openbookqa`, a few rows."""
    return write_questions(workplace / "data")


def test_json_prints_exactly_one_document_with_the_documented_keys(wide: Wide, run: Outcome) -> None:
    done = wide("eval", "calibrated", "--json")
    assert done.code == 0, done.err
    document = done.document
    assert document.keys() >= KEYS
    assert document["schema"] == "wide.summary/1" and document["command"] == "eval"
    assert set(document["skip_rate"]) == {"attention", "ffn", "mean"}
    assert set(document["flops_skipped"]) == {"prunable", "prunable_gross", "total", "context_tokens"}
    assert set(document["perplexity"]) == {"held-out/token_ppl"} == set(document["dense"]["perplexity"])
    assert document["steps"] == 8 and document["plan"] == run.document["plan"]
    assert document["tasks"] == {} and document["average"] is None and document["retention"] is None
    assert json.loads((Path(document["run_dir"]) / "summary.json").read_text()) == document


def test_it_finds_what_the_calibration_found(wide: Wide, run: Outcome) -> None:
    document = wide("eval", "calibrated", "--json").document
    validation = run.document["validation"]
    assert document["perplexity"]["held-out/token_ppl"] == pytest.approx(validation["final"], rel=1e-5)
    assert document["dense"]["perplexity"]["held-out/token_ppl"] == pytest.approx(validation["dense"], rel=1e-5)
    assert document["skip_rate"] == pytest.approx(run.document["skip_rate"])


def test_the_skip_rates_are_those_of_the_evaluated_text_whatever_the_batch(wide: Wide, run: Outcome) -> None:
    found = [
        wide("eval", "calibrated", f"eval.batch_size={n}", "--run-dir", f"e{n}", "--json").document for n in (1, 3)
    ]
    assert found[0]["skip_rate"] == pytest.approx(found[1]["skip_rate"], abs=1e-9)
    assert found[0]["perplexity"] == pytest.approx(found[1]["perplexity"], rel=1e-5)
    (by_text,) = found[0]["skip_by_text"].values()  # one text: its rates are the rates
    assert by_text["skip_rate"] == pytest.approx(found[0]["skip_rate"])


def test_tasks_run_offline_from_a_data_root(wide: Wide, run: Outcome, questions: Path) -> None:
    done = wide(
        "eval", "calibrated", "--tasks", "openbookqa", "--limit", 4, "--data-root", questions, "--offline", "--json"
    )
    assert done.code == 0, done.err
    document = done.document
    assert 0 <= document["tasks"]["openbookqa"]["acc_norm,none"] <= 1
    assert document["average"] is None, "an average over one task is not the average over the seven"
    untouched = json.loads((Path(document["run_dir"]) / "lm_eval_routed.json").read_text())
    assert untouched["results"]["openbookqa"]["acc,none"] == document["tasks"]["openbookqa"]["acc,none"]
    assert (Path(document["run_dir"]) / "lm_eval_dense.json").is_file()


def test_batched_and_one_by_one_tasks_agree(wide: Wide, run: Outcome, questions: Path) -> None:
    documents = [
        wide(
            "eval", "calibrated", "--tasks", "openbookqa", "--data-root", questions, "--offline", "--no-dense",
            f"eval.batch_size={size}", "eval.perplexity=[]", "--run-dir", f"b{size}", "--json",
        ).document
        for size in (1, 5)
    ]  # fmt: skip
    assert documents[0]["tasks"] == documents[1]["tasks"]
    assert documents[0]["skip_rate"] == pytest.approx(documents[1]["skip_rate"], abs=1e-9)


def test_the_dense_model_is_measured_once_for_a_protocol(wide: Wide, run: Outcome) -> None:
    first = wide("eval", "calibrated", "--run-dir", "e1", "--json").document
    second = wide("eval", "calibrated/checkpoints/step-000004", "--run-dir", "e2", "--json").document
    assert second["dense"]["from_cache"] and second["dense"]["perplexity"] == first["dense"]["perplexity"]
    assert second["steps"] == 4
    other = wide("eval", "calibrated", "eval.perplexity_window=32", "--run-dir", "e3", "--json").document
    assert not other["dense"]["from_cache"]
    assert other["dense"]["perplexity"] != first["dense"]["perplexity"]


def test_without_the_dense_model_there_is_no_comparison(wide: Wide, run: Outcome) -> None:
    document = wide("eval", "calibrated", "--no-dense", "--json").document
    assert document["dense"] is None and document["retention"] is None


def test_a_dense_model_alone(wide: Wide, model_folder: Path, held_out: Path) -> None:
    done = wide("eval", "--model", model_folder, f"eval.perplexity={held_out}", "eval.perplexity_window=64", "--json")
    assert done.code == 0, done.err
    document = done.document
    assert document.keys() >= KEYS
    assert document["checkpoint"] is None and document["plan"] is None and document["skip_rate"] is None
    assert document["dense"] is None and document["perplexity"]["held-out/token_ppl"] > 1


def test_texts_of_one_name_have_a_figure_each_and_none_passes_for_wikitext(
    wide: Wide, model_folder: Path, held_out: Path, workplace: Path
) -> None:
    words = held_out.read_text()
    texts = {"a/t": words[:500], "b/t": words[500:], "wikitext2": words[200:700], "news.v1": words[:300]}
    for name, text in texts.items():
        (workplace / name).parent.mkdir(exist_ok=True)
        (workplace / f"{name}.txt").write_text(text)

    def measured(folder: str, *names: str) -> dict[str, float]:
        asked = "eval.perplexity=" + ",".join(names)
        done = wide("eval", "--model", model_folder, asked, "eval.perplexity_window=64", "--run-dir", folder, "--json")
        assert done.code == 0, done.err
        return dict(done.document["perplexity"])

    together = measured("all", *(f"{name}.txt" for name in texts), "a/t.txt@2", "./b/t.txt")
    assert len(together) == 5 and not any(key.startswith("wikitext2/") for key in together)
    alone = [figure for i, name in enumerate(texts) for figure in measured(f"r{i}", f"{name}.txt").values()]
    assert list(together.values())[:4] == pytest.approx(alone, rel=1e-6)
    # the same texts elsewhere: what is stored of the dense model has other names
    (workplace / "a").rename(workplace / "c")
    assert "c/t.txt/token_ppl" in measured("moved", "c/t.txt", "b/t.txt")


def test_rows_have_their_text_where_the_recipe_says_for_training_and_for_perplexity(
    wide: Wide, tiny_recipe: Path, text_file: Path, held_out: Path, workplace: Path
) -> None:
    for name, source in (("train", text_file), ("held", held_out)):
        (workplace / f"{name}.jsonl").write_text(json.dumps({"id": 1, "body": source.read_text()}) + "\n")
    changes = ("data.text_field=body", "data.validation=held.jsonl", "eval.perplexity=held.jsonl", "--steps", 2)
    trained = wide("calibrate", tiny_recipe, "--data", "train.jsonl", *changes, "--run-dir", "r", "--json")
    assert trained.code == 0, trained.err
    measured = wide("eval", "r", "--json")
    assert measured.code == 0, measured.err
    final = trained.document["validation"]["final"]
    assert measured.document["perplexity"]["held/token_ppl"] == pytest.approx(final, rel=1e-5)
    wide("eval", "r", "data.text_field=text", "--run-dir", "e").refused_with(
        "held.jsonl line 1", "its fields: id, body"
    )


def test_odd_names_go_all_the_way(wide: Wide, run: Outcome, held_out: Path, workplace: Path) -> None:
    odd = workplace / "runs" / "lr=0.001 #1"
    odd.parent.mkdir()
    (workplace / "calibrated").rename(odd)
    text = Path("caf\udce9") / "t[\udce9]xt#.txt"  # a byte that is no UTF-8
    text.parent.mkdir()
    text.write_bytes(held_out.read_bytes())
    measured = wide("eval", "runs/lr=0.001 #1", f"eval.perplexity={text}", "--run-dir", "e=1", "--json")
    assert measured.code == 0, measured.err
    assert wide("export", odd, "--out", "x/exp=1").code == 0
    again = wide("eval", "./x/exp=1", f"eval.perplexity={text}", "--run-dir", "e=2", "--json")
    assert list(again.document["perplexity"].values()) == pytest.approx(list(measured.document["perplexity"].values()))
    trained = wide("calibrate", "--data", text, "--steps", 2, "--run-dir", "~r", odd / "recipe.yaml", "--json")
    assert trained.code == 0, trained.err
    assert wide("report", "e=1", "e=2", "~r", "--format", "html,md,csv,tex").code == 0
    wide("calibrate", odd / "recipe.yaml", "--run-dir", "r\udce9").refused_with("no UTF-8", "--run-dir")
    wide("export", odd, "--out", "r\udce9").refused_with("no UTF-8", "--out")


def test_the_newest_run_is_meant_when_none_is_named(wide: Wide, tiny_recipe: Path, workplace: Path) -> None:
    for seed, age in ((0, 100), (1, 0)):
        document = wide("calibrate", tiny_recipe, "--steps", 2, "--seed", seed, "--json").document
        stat = Path(document["run_dir"]).stat()
        os.utime(document["run_dir"], (stat.st_atime - age, stat.st_mtime - age))
    done = wide("eval", "--json")
    assert done.code == 0, done.err
    assert done.document["checkpoint"] == document["checkpoint"]


def test_a_dry_run_loads_and_writes_nothing(wide: Wide, run: Outcome, workplace: Path) -> None:
    before = sorted(p for p in workplace.rglob("*"))
    done = wide("eval", "calibrated", "--dry-run", "--json")
    assert done.code == 0, done.err
    assert done.document["schema"] == "wide.dry_run/1" and done.document["command"] == "eval"
    assert sorted(p for p in workplace.rglob("*")) == before


def test_a_checkpoint_moved_elsewhere_evaluates_the_same(wide: Wide, run: Outcome, workplace: Path) -> None:
    """A checkpoint directory is all that is needed: it names its backbone, plan and recipe."""
    first = wide("eval", "calibrated", "--run-dir", "e1", "--json").document
    shutil.copytree("calibrated/checkpoints/step-000008", "moved/here")
    shutil.rmtree("calibrated")
    second = wide("eval", "moved/here", "--run-dir", "e2", "--json").document
    assert second["perplexity"] == first["perplexity"] and second["skip_rate"] == first["skip_rate"]


def test_a_moved_backbone_is_found_with_model(wide: Wide, run: Outcome, model_folder: Path, workplace: Path) -> None:
    shutil.copytree(model_folder, workplace / "elsewhere")
    done = wide("eval", "calibrated", "--model", "elsewhere", "--json")
    assert done.code == 0, done.err
    expected = run.document["validation"]["final"]
    assert done.document["perplexity"]["held-out/token_ppl"] == pytest.approx(expected, rel=1e-5)


def test_an_existing_evaluation_is_refused_then_replaced(wide: Wide, run: Outcome) -> None:
    assert wide("eval", "calibrated").code == 0
    wide("eval", "calibrated").refused_with("--overwrite")
    assert wide("eval", "calibrated", "--overwrite").code == 0


def test_the_calibration_is_never_written_over(wide: Wide, run: Outcome) -> None:
    """Its recipe names its run directory, and the checkpoint's recipe is what an evaluation starts from."""
    before = Path("calibrated/summary.json").read_bytes()
    assert wide("eval", "calibrated", "--overwrite").code == 0
    wide("eval", "calibrated", "--run-dir", "calibrated", "--overwrite").refused_with("holds the checkpoint")
    wide("eval", "calibrated", "--run-dir", ".", "--overwrite").refused_with("holds the checkpoint")
    assert Path("calibrated/summary.json").read_bytes() == before
    assert Path("calibrated/checkpoints/step-000008/router.safetensors").is_file()


def test_a_checkpoint_of_another_model_is_refused(wide: Wide, run: Outcome, other_model_folder: Path) -> None:
    wide("eval", "calibrated", "--model", other_model_folder).refused_with("another model", "weights differ")


def test_a_checkpoint_with_a_router_missing_is_refused_with_its_name(wide: Wide, run: Outcome) -> None:
    from safetensors.torch import load_file, save_file

    path = Path("calibrated/checkpoints/step-000008/router.safetensors")
    tensors = load_file(path)
    del tensors["0.ffn.up.weight"]
    save_file(tensors, path)
    wide("eval", "calibrated").refused_with("missing 0.ffn.up.weight")


def test_a_checkpoint_without_its_recipe_is_refused_in_a_sentence(wide: Wide, run: Outcome) -> None:
    Path("calibrated/checkpoints/step-000008/recipe.yaml").unlink()
    wide("eval", "calibrated").refused_with("recipe.yaml")


@pytest.mark.parametrize("arguments", [("empty",), ("nowhere",)])
def test_a_folder_without_a_checkpoint_is_refused(wide: Wide, workplace: Path, arguments: tuple[str, ...]) -> None:
    (workplace / "empty").mkdir()
    wide("eval", *arguments).refused_with(arguments[0])


def test_an_unknown_task_is_refused_with_a_suggestion(wide: Wide, run: Outcome) -> None:
    wide("eval", "calibrated", "--tasks", "arc_eazy").refused_with("arc_eazy", "arc_easy")


def test_nothing_to_evaluate_is_said(wide: Wide, run: Outcome) -> None:
    wide("eval", "calibrated", "eval.perplexity=[]").refused_with("nothing to evaluate")


def test_tasks_that_are_not_on_this_machine_are_refused_offline(wide: Wide, run: Outcome, questions: Path) -> None:
    wide("eval", "calibrated", "--tasks", "piqa", "--data-root", questions, "--offline").refused_with("piqa")
    assert not list(Path("runs").glob("eval-*")) if Path("runs").exists() else True


def change_rope(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace("10000.0", "100.0"))


def change_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "normalizer": {"type": "Lowercase"}}))


@pytest.mark.parametrize("change", [change_rope, change_tokenizer])
def test_a_model_changed_in_place_is_measured_anew(
    wide: Wide, workplace: Path, model_folder: Path, held_out: Path, change: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    shutil.copytree(model_folder, workplace / "m")
    asked = ("--model", "m", f"eval.perplexity={held_out}", "eval.perplexity_window=64", "--json")

    def measured(run: str) -> dict[str, float]:
        done = wide("eval", *asked, "--run-dir", run)
        assert done.code == 0, done.err
        found: dict[str, float] = done.document["perplexity"]
        return found

    before = measured("e1")
    assert measured("e2") == before
    change(workplace / "m")
    changed = measured("e3")
    monkeypatch.setenv("XDG_CACHE_HOME", str(workplace / "another-cache"))
    assert changed == measured("e4") != before


def test_a_document_changed_in_place_is_measured_anew(
    wide: Wide, run: Outcome, questions: Path, monkeypatch: pytest.MonkeyPatch, workplace: Path
) -> None:
    asked = ("eval", "calibrated", "--tasks", "openbookqa", "--data-root", questions, "--offline", "eval.perplexity=[]")
    first = wide(*asked, "--run-dir", "e1", "--json").document["dense"]
    assert wide(*asked, "--run-dir", "e2", "--json").document["dense"]["from_cache"]
    path = questions / "allenai/openbookqa/main/test.jsonl"
    text = path.read_text()
    path.write_text(text.replace('"answerKey": "A"', '"answerKey": "D"'))
    assert path.stat().st_size == len(text)
    again = wide(*asked, "--run-dir", "e3", "--json").document["dense"]
    assert not first["from_cache"] and not again["from_cache"]


def test_a_cache_that_cannot_be_written_costs_a_warning(
    wide: Wide, run: Outcome, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workplace / "a-file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(workplace / "a-file"))
    done = wide("eval", "calibrated", "--json")
    assert done.code == 0, done.err
    assert done.document["dense"]["perplexity"] and not done.document["dense"]["from_cache"]
    (warning,) = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    assert "The dense result cannot be stored in" in warning and "Not a directory" in warning

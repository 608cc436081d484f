from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from widecli.errors import UsageError
from widecli.recipe.keys import recipe_keys
from widecli.recipe.load import default_recipe_name, dump, load_stored, load_text, recipe_hash, resolve
from widecli.recipe.schema import Recipe
from widecli.storage import write_json, write_text


def written(folder: Path, text: str, name: str = "mine.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def refusal(*overrides: str, recipe: str | None = None, **flags: object) -> str:
    with pytest.raises(UsageError) as error:
        resolve(recipe, overrides, flags)
    return str(error.value)


def test_without_anything_the_defaults_hold() -> None:
    resolved = resolve(None)
    assert resolved.recipe == Recipe()
    assert resolved.source == "defaults"
    assert not resolved.provenance


def test_later_sources_win(tmp_path: Path) -> None:
    path = written(tmp_path, "train: {steps: 10, batch_size: 11, seed: 12}\n")
    resolved = resolve(path, ["train.batch_size=21", "train.seed=22"], {"train.seed": 32, "train.steps": None})
    train = resolved.recipe.train
    assert (train.steps, train.batch_size, train.seed) == (10, 21, 32)
    assert train.save_every == Recipe().train.save_every
    assert resolved.provenance == {
        "train.steps": path,
        "train.batch_size": "command line",
        "train.seed": "flag",
    }


def test_tilde_takes_a_key_or_a_section_back_to_its_default(tmp_path: Path) -> None:
    path = written(tmp_path, "train: {steps: 10, seed: 12}\nbudget: {sparsity: 0.1}\n")
    one = resolve(path, ["~train.steps"])
    assert (one.recipe.train.steps, one.recipe.train.seed) == (Recipe().train.steps, 12)
    assert "train.steps" not in one.provenance
    assert resolve(path, ["~train"]).recipe.train == Recipe().train
    assert resolve(path, ["~train.steps", "train.steps=7"]).recipe.train.steps == 7


def test_a_base_is_merged_below_and_found_beside_the_recipe(tmp_path: Path) -> None:
    written(tmp_path, "train: {steps: 10, seed: 1}\n", "base.yaml")
    written(tmp_path, "base: base.yaml\ntrain: {seed: 2}\n", "middle.yaml")
    recipe = resolve(written(tmp_path, "base: middle.yaml\nbudget: {sparsity: 0.2}\n")).recipe
    assert (recipe.train.steps, recipe.train.seed, recipe.budget.sparsity) == (10, 2, 0.2)


def test_a_circle_of_bases_is_refused(tmp_path: Path) -> None:
    written(tmp_path, "base: b.yaml\n", "a.yaml")
    assert "its own base" in refusal(recipe=written(tmp_path, "base: a.yaml\n", "b.yaml"))


def test_a_missing_base_is_named(tmp_path: Path) -> None:
    assert "'gone.yaml'" in refusal(recipe=written(tmp_path, "base: gone.yaml\n"))


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("sparsity=0.5", "budget.sparsity"),
        ("G=64", "routing.ffn_group_size"),
        ("train.step=3", "train.steps"),
        ("trian.steps=3", "train.steps"),
        ("routing.rnk=8", "routing.rank"),
        ("~train.stepz", "train.steps"),
    ],
)
def test_an_unknown_key_is_refused_with_what_was_meant(override: str, meant: str) -> None:
    message = refusal(override)
    assert "Unknown key" in message
    assert f"did you mean {meant}" in message


def test_an_unknown_key_in_a_recipe_names_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "train: {stepz: 3}\n")
    message = refusal(recipe=path)
    assert path in message
    assert "train.stepz" in message
    assert "train.steps?" in message


@pytest.mark.parametrize(
    ("override", "valid"),
    [
        ("train.steps=-1", "a whole number of at least 0"),
        ("train.steps=2.5", "a whole number of at least 0"),
        ("data.sequence_length=1", "a whole number of at least 2"),  # one token has no next one to learn
        ("train.steps=true", "a whole number of at least 0"),
        ("train.steps=", "a whole number of at least 0"),
        ("train.learning_rate=.inf", "a number above 0"),
        ("train.learning_rate=.nan", "a number above 0"),
        ("train.learning_rate=inf", "learning_rate=inf must be a number above 0"),
        ("train.weight_decay=Infinity", "weight_decay=Infinity must be a number"),
        ("budget.sparsity=1.0", "a number of at least 0 and below 1"),
        ("budget.sparsity=50", "0.5 means 50 %"),
        ("routing.mode=wid", "one of wide, token, layer"),
        ("eval.batch_size=many", "a whole number above 0, or auto"),
        ("data.max_tokens=0", "a whole number above 0, or null"),
        ("train.compile=3", "true or false"),
    ],
)
def test_a_bad_value_is_one_sentence_with_key_value_and_what_is_valid(override: str, valid: str) -> None:
    message = refusal(override)
    assert message.startswith(override.split("=")[0] + "=")
    assert valid in message
    assert message.count("\n") == 0


def test_rules_over_several_keys_keep_their_own_sentence() -> None:
    assert refusal("budget.kind=parts") == "budget.kind=parts needs budget.attention or budget.ffn (or both)."


def test_values_are_yaml_one_two() -> None:
    recipe = resolve(None, ["track.wandb=off", "train.learning_rate=2e-3", "train.steps=10_000"]).recipe
    assert recipe.track.wandb == "off"
    assert recipe.train.learning_rate == 0.002
    assert recipe.train.steps == 10_000


def test_a_text_stays_a_text_even_when_it_looks_like_a_number() -> None:
    recipe = resolve(None, ["model.revision=12e4567", "data.source=2024"]).recipe
    assert recipe.model.revision == "12e4567"
    assert recipe.data.source == "2024"


def test_lists_may_be_written_with_commas_and_a_single_source_is_a_text() -> None:
    recipe = resolve(None, ["eval.tasks=piqa, boolq"], {"data.source": ["a.txt"]}).recipe
    assert recipe.eval.tasks == ("piqa", "boolq")
    assert recipe.data.source == "a.txt"
    assert resolve(None, ["data.source=[a.txt, b.txt]"]).recipe.data.source == ("a.txt", "b.txt")
    assert resolve(None, ["eval.tasks="]).recipe.eval.tasks == ()


def test_layers_are_set_and_refused_by_number() -> None:
    recipe = resolve(None, ["routing.layers.3.parts=none", "routing.layers.4.ffn_group_size=32"]).recipe
    assert recipe.routing.layers[3].parts == "none"
    assert recipe.routing.layers[4].ffn_group_size == 32
    assert "routing.layers.3.parts=some" in refusal("routing.layers.3.parts=some")
    assert "routing.layers.x" in refusal("routing.layers.x.parts=none")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train: {steps: 1, steps: 2}\n", "given twice"),
        ("train: [\n", "line 2"),
        ("- a\n", "must hold sections"),
        ("train: 3\n", "is a section"),
        ("base: 3\n", "base in"),
    ],
)
def test_a_malformed_recipe_names_file_and_problem(tmp_path: Path, text: str, says: str) -> None:
    path = written(tmp_path, text)
    message = refusal(recipe=path)
    assert path in message
    assert says in message


def test_binary_and_unreadable_recipes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in refusal(recipe=str(path))
    assert "no recipe" in refusal(recipe=str(tmp_path))


def test_an_empty_recipe_and_a_section_of_comments_are_defaults(tmp_path: Path) -> None:
    assert resolve(written(tmp_path, "train:\n  # steps: 3\n")).recipe == Recipe()
    assert resolve(written(tmp_path, "")).recipe == Recipe()


def test_a_run_directory_names_its_recipe(tmp_path: Path) -> None:
    written(tmp_path, "train: {steps: 5}\n", "recipe.yaml")
    assert resolve(str(tmp_path)).recipe.train.steps == 5


def test_an_unknown_recipe_suggests_a_shipped_one() -> None:
    assert "calibrate/smollm2_s50_g64" in refusal(recipe="smollm_s50_g64")


def test_the_demo_is_the_base_without_a_gpu() -> None:
    assert default_recipe_name(cuda=True) is None
    name = default_recipe_name(cuda=False)
    assert name is not None
    assert resolve(name).source == "recipes/demo.yaml"


def test_hash_ignores_tracking_and_nothing_else() -> None:
    plain = recipe_hash(Recipe())
    assert plain == resolve(None, ["track.wandb=off", "track.run_dir=x"]).hash8
    assert plain != resolve(None, ["train.seed=1"]).hash8
    assert plain != resolve(None, ["eval.limit=1"]).hash8
    assert plain != resolve(None, ["lora.rank=8"]).hash8
    assert len(plain) == 8


def test_a_recipe_from_before_there_was_a_second_stage_keeps_its_hash(repository: Path) -> None:
    run = repository / "reports" / "smollm2-h200" / "calibrate-s50"
    recorded = json.loads((run / "summary.json").read_text())["recipe_hash"]
    assert recipe_hash(load_text((run / "recipe.yaml").read_text())) == recorded


_TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1, max_size=12)
_AWKWARD = st.sampled_from(
    ["off", "no", "null", "~", "2e3", "1_000", "012", "1:30", "true", "<<", ".inf", "2024-01-01"]
)


@given(text=_TEXTS | _AWKWARD, sparsity=st.floats(0, 1, exclude_max=True), rate=st.floats(1e-12, 1e12))
def test_a_stored_recipe_reads_back_equal(text: str, sparsity: float, rate: float) -> None:
    recipe = Recipe.model_validate(
        {
            "model": {"revision": text},
            "data": {"source": [text, "b"]},
            "budget": {"sparsity": sparsity},
            "train": {"learning_rate": rate},
            "routing": {"layers": {7: {"parts": "none"}}},
        }
    )
    assert load_text(dump(recipe)) == recipe


@given(steps=st.integers(0, 10**9))
def test_an_override_equals_the_flag_of_the_same_value(steps: int) -> None:
    assert resolve(None, [f"train.steps={steps}"]).hash8 == resolve(None, [], {"train.steps": steps}).hash8


def test_every_key_of_the_schema_can_be_reset() -> None:
    for key in recipe_keys():
        assert resolve(None, [f"~{key}"]).recipe == Recipe()


def test_a_hash_begins_no_comment_on_the_command_line() -> None:
    recipe = resolve(
        None,
        [
            "track.run_dir=runs/exp #1",
            "track.project='team #2'",
            "data.source=[text/corpus #3.jsonl, b.jsonl]",
            "eval.perplexity=a #4.txt,#5.txt",
            "data.text_field=#6",
        ],
    ).recipe
    assert recipe.track.run_dir == "runs/exp #1" and recipe.track.project == "team #2"
    assert recipe.data.source == ("text/corpus #3.jsonl", "b.jsonl")
    assert recipe.eval.perplexity == ("a #4.txt", "#5.txt") and recipe.data.text_field == "#6"
    assert load_text(dump(recipe)) == recipe
    with pytest.raises(UsageError, match=r"train\.steps=5 #6 must be"):
        resolve(None, ["train.steps=5 #6"])


# nine of nine of nine ...
BOMB = b"a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (c, c, b", ".join([b"*%c" % (c - 1)] * 9)) for c in b"bcdefghi"
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"train: {steps: 3}\n# caf\xe9\n", "r.yaml line 2 is not UTF-8"),
        (b"data: {source: " + b"[" * 5000 + b"]" * 5000 + b"}\n", "nested more than 50 deep"),
        (b"data:\n" + b"".join(b" " * i + b"a:\n" for i in range(1, 3000)), "nested more than 50 deep"),
        (BOMB, "more than 10,000"),
        (b"data: {source: &x [a, *x]}\n", "holds itself"),
        (b"train: {seed: 99999999999999999999}\n", r"train\.seed=99999999999999999999 in .* of at most 63 bits"),
        (b"train: {seed: " + b"9" * 5000 + b"}\n", "cannot be read"),
        (b"routing: {rank: 18446744073709551616}\n", r"routing\.rank=18446744073709551616"),
    ],
)
def test_a_recipe_that_nobody_could_use_is_one_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        resolve(str(path))
    with pytest.raises(UsageError, match=message.replace("in .* ", ".*")):
        load_stored(path)


def test_aliases_that_stay_small_and_long_lists_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("train: &t {steps: 3}\n")
    assert resolve(str(path)).recipe.train.steps == 3
    files = [f"{i}.txt" for i in range(12_000)]
    path.write_text(f"data: {{source: &files [{', '.join(files)}]}}\n")
    assert resolve(str(path)).recipe.data.source == tuple(files)


def test_names_that_are_not_utf8_come_back_from_a_stored_recipe(tmp_path: Path) -> None:
    recipe = resolve(None, ["track.run_dir=runs/x"], {"data.source": ["caf\udce9/a.txt"]}).recipe
    write_text(tmp_path / "recipe.yaml", dump(recipe))
    assert load_stored(tmp_path / "recipe.yaml") == recipe
    write_json(tmp_path / "x.json", {"caf\udce9": "\udcff"})
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == {"caf\udce9": "\udcff"}

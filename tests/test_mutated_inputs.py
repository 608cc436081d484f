"""Recipes, command lines and data files as they get damaged, renamed and linked: never a traceback, never another text.

What is read must be what a clean copy of it gives: a recipe comes back from its own dump, a file has the same text for
training, for perplexity and in every other kind of file.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiny_models import save_model_folder
from widecli.cli.cost_card import dry_run_document
from widecli.cli.options import recipe_from, take_checkpoint
from widecli.data.local_files import LocalFiles
from widecli.errors import WideError
from widecli.evaluate.texts import check_texts, perplexity_text
from widecli.recipe.keys import recipe_keys
from widecli.recipe.load import dump, load_stored, load_text, resolve

RECIPE = """\
# wide calibrate
model: {name: MODEL}
data: {source: [a.txt, "b*.jsonl"], sequence_length: 32, validation: null}
routing: &r {ffn_group_size: 16, rank: 4, layers: {0: {parts: ffn}}}
budget: {kind: parts, ffn: 0.4, attention: 0.3}
train:
  steps: 8
  learning_rate: 2e-3
  seed: 1
  compile: auto
eval: {perplexity: [wikitext2@60, h.txt], tasks: [], max_length: 64}
track: {wandb: off, run_dir: "runs/lr=0.1 #2"}
sweep: {axes: {train.seed: "0:2:1"}, lora: {lora.rank: 2}}
"""
PIECES = [
    *(b"\xff", b"\x00", b"\xef\xbb\xbf", b"\xfe\xff", b"\r\n", b"\r", b"\n\n", b"\t", b" #", b"\\ud800", b"\xc3"),
    *(b"[" * 80, b"{", b"}", b"]", b": ", b"- ", b"*r", b"&r ", b"<<: *r", b"!!python/object:os.system ", b"? "),
    *(b"|\n", b"%", b"null", b"true", b".nan", b"-.inf", b"1e999", b"9" * 40, b"9" * 5000, b"-1", b"0", b"0x10"),
    *(b"~", b'"', b"'", b"x" * 3000, b"\xe2\x80\xa8"),
    *(b'{"text": "more"}\n', b'{"text": null}\n', b'{"text": 3}\n', b'{"page": "x"}\n', b"[]\n"),
]


@st.composite
def edits(draw: st.DrawFn) -> list[tuple[str, float, float, bytes]]:
    """What to do where (as shares of a file's length)."""
    place = st.floats(0, 1)
    kinds = st.sampled_from(["cut", "drop", "double", "insert", "insert", "flip"])
    return draw(st.lists(st.tuples(kinds, place, place, st.sampled_from(PIECES)), max_size=4))


def edited(content: bytes, changes: list[tuple[str, float, float, bytes]]) -> bytes:
    for kind, one, other, piece in changes:
        start, end = sorted((int(one * len(content)), int(other * len(content))))
        match kind:
            case "cut":
                content = content[:end]
            case "drop":
                content = content[:start] + content[end:]
            case "double":
                content = content[:end] + content[start:]
            case "insert":
                content = content[:start] + piece + content[start:]
            case "flip" if start < len(content):
                content = content[:start] + bytes([content[start] ^ 0x41]) + content[start + 1 :]
    return content


@contextmanager
def workplace() -> Iterator[Path]:
    """An empty folder to be in."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=edits(), name=st.sampled_from(["r.yaml", "a=b.yaml", "~r.yaml", "r #1.yaml", "r[1]", "caf\udce9.yaml"]))
def test_a_damaged_recipe_is_refused_in_a_sentence_or_comes_back_from_its_dump(
    model: Path, changes: Any, name: str
) -> None:
    with workplace() as folder:
        (folder / "a.txt").write_text("words")
        (folder / "b1.jsonl").write_text('{"text": "words"}\n')
        Path(name).write_bytes(edited(RECIPE.replace("MODEL", str(model)).encode(), changes))
        try:
            resolved = recipe_from([f"./{name}"])
        except WideError as error:
            assert "\n" not in str(error) and len(str(error)) < 2000
            with pytest.raises(WideError):
                load_stored(Path(name))
            return
        assert load_text(dump(resolved.recipe)) == resolved.recipe
        if resolved.recipe.model.name == str(model):
            try:
                document = dry_run_document(resolved)
            except WideError as error:
                assert "\n" not in str(error)
            else:
                json.dumps(document, allow_nan=False)


VALUES = [
    *("", " ", "null", "~", "true", "0", "-1", "1.5", "1e999", ".nan", "9" * 30, "9" * 5000, "0x10", "auto", "off"),
    *("[", "[]", "[a, b]", "{}", "{a: b}", "{0: {parts: ffn}}", "*x", "&x y", "!!python/name:os.system x", "a: b"),
    *("a #1", "- a", "a,b", ",", "a=b", "@3", "wikitext2@3", "h.txt@0", "../x", "/", "~nobody/x", "x" * 5000),
    *(
        "nul\x00",
        "\udce9",
        "'",
        '"',
        "[" * 3000,
        "concat",
        "sample",
        "all",
        "ffn",
        "none",
        "parts",
        "0.5",
        "64",
        "1:2:3",
    ),
]
KEYS = [*recipe_keys(), "routing.layers.0.parts", "sweep.slurm.extra.qos"]


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    overrides=st.lists(
        st.one_of(
            st.builds(
                "{}={}".format, st.sampled_from([*recipe_keys(), "routing.layers.0.parts"]), st.sampled_from(VALUES)
            ),
            st.builds("~{}".format, st.sampled_from([*recipe_keys(), "train", "nothing"])),
            st.sampled_from(VALUES),
        ),
        max_size=3,
    ),
    steps=st.sampled_from([None, 3, -1]),
)
def test_any_command_line_is_refused_in_a_sentence_or_comes_back_from_its_dump(
    model: Path, overrides: list[str], steps: int | None
) -> None:
    with workplace():
        try:
            _, rest = take_checkpoint(overrides)
            resolved = recipe_from(rest, model=str(model), steps=steps)
        except WideError as error:
            assert "Traceback" not in str(error)
            return
        assert load_text(dump(resolved.recipe)) == resolved.recipe
        assert resolve(None, rest, {"model.name": str(model), "train.steps": steps}).recipe == resolved.recipe
        with suppress(WideError):
            json.dumps(dry_run_document(resolved), allow_nan=False)


TEXTS = ["one  fox", "zwei Füchse\n\nand a tail", "", " \n", "three", "\U0001f98a four", "x" * 70_000 + " end"]
NAMES = ["a.jsonl", "A.JSONL", "a.txt", "a.v1.TXT", "a.jsonl.gz", "a.txt.gz", "caf\udce9.txt", "a[1].jsonl", "a #1.txt"]


def same_words(one: list[str], other: list[str]) -> bool:
    """Whether both hold the same words; the same characters where a word is so long that a document may end in it."""
    found = [sorted(" ".join(texts).split()) for texts in (one, other)]
    if max((len(word) for words in found for word in words), default=0) < 100_000:
        return found[0] == found[1]
    return Counter("".join(found[0])) == Counter("".join(found[1]))


@settings(deadline=None, max_examples=150)
@given(
    texts=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=5),
    name=st.sampled_from(NAMES),
    changes=edits(),
    linked=st.sampled_from(["", "file", "folder", "both"]),
)
def test_a_damaged_renamed_or_linked_file_is_refused_or_has_one_text_for_everybody(
    texts: list[str], name: str, changes: Any, linked: str
) -> None:
    with workplace() as folder:
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        content = edited((rows if "jsonl" in name.lower() else "\n\n".join(texts)).encode(), changes)
        real = folder / "blobs" / "0a1b" if linked in ("file", "both") else folder / "store" / name
        real.parent.mkdir()
        real.write_bytes(gzip.compress(content) if name.lower().endswith(".gz") else content)
        if linked in ("file", "both"):
            (folder / "store").mkdir()
            (folder / "store" / name).symlink_to(real)
        place = folder / "store"
        if linked in ("folder", "both"):
            (folder / "data").mkdir()
            (folder / "data" / "part").symlink_to(folder / "store")
            place = folder / "data"
        named = str(place / "part" / name if linked in ("folder", "both") else place / name)
        try:
            check_texts([named])
            scored = "".join(perplexity_text(named, fields=("text",))[1])
        except WideError as error:
            assert "\n" not in str(error)
            scored = ""
        try:
            trained = list(LocalFiles([str(place)], text_field="text").documents())
        except WideError as error:
            assert "\n" not in str(error) and not scored.strip()
            return
        assert same_words(trained, [scored])
        assert list(LocalFiles([named], text_field="text").documents()) == trained
        if trained:  # a clean copy says the same
            (folder / "clean.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in trained))
            assert same_words(["".join(perplexity_text("clean.jsonl")[1])], [scored])
        shutil.rmtree(real.parent)
        with pytest.raises(WideError):
            list(LocalFiles([named], text_field="text").documents())

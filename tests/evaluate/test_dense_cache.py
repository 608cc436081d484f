from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_models import byte_tokenizer, tiny_model
from widecli.errors import WideError
from widecli.evaluate import dense_cache
from widecli.evaluate.dense_cache import DenseCache, default_cache_dir, dense_key
from widecli.evaluate.protocol import EvalProtocol
from widecli.model.backbone import Backbone
from widecli.model.identity import BackboneIdentity
from widecli.recipe.schema import EvalSection

KEY = {"model": {"weights": "a", "config": {"layers": (1, 2)}}, "texts": []}
RESULT = {"perplexity": {"wikitext2/token_ppl": 20.7}, "tasks": {}}


def test_a_stored_result_comes_back(tmp_path: Path) -> None:
    cache = DenseCache(tmp_path / "new")
    assert cache.load(KEY) is None
    path = cache.store(KEY, RESULT)
    assert cache.load(KEY) == RESULT
    assert list((tmp_path / "new").iterdir()) == [path]


def test_another_key_is_another_entry(tmp_path: Path) -> None:
    cache = DenseCache(tmp_path)
    cache.store(KEY, RESULT)
    assert cache.load({**KEY, "texts": ["t"]}) is None
    assert cache.load({**KEY, "model": {"weights": "b"}}) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": "wide.dense/2"}', '{"schema": "x", "result": {}}'])
def test_a_damaged_file_counts_as_absent(tmp_path: Path, content: str) -> None:
    cache = DenseCache(tmp_path)
    cache.store(KEY, RESULT).write_text(content)
    assert cache.load(KEY) is None


def test_a_figure_that_was_changed_in_the_file_is_not_believed(tmp_path: Path) -> None:
    cache = DenseCache(tmp_path)
    path = cache.store(KEY, RESULT)
    path.write_text(path.read_text().replace("20.7", "10.7"))
    assert cache.load(KEY) is None


def test_a_file_of_another_key_is_not_taken(tmp_path: Path) -> None:
    cache = DenseCache(tmp_path)
    stored = cache.store(KEY, RESULT)
    stored.rename(cache.path({**KEY, "texts": ["t"]}))
    assert cache.load({**KEY, "texts": ["t"]}) is None


def test_a_failed_write_leaves_the_old_result_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DenseCache(tmp_path)
    cache.store(KEY, RESULT)

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(WideError, match=r"The dense result cannot be stored in .*: No space left"):
        cache.store(KEY, {"perplexity": {}})
    assert cache.load(KEY) == RESULT
    assert len(list(tmp_path.iterdir())) == 1


def test_the_cache_lies_under_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "wide" / "dense"


class Task:
    """The part of lm-eval's task that the key reads."""

    VERSION = 1.0

    def __init__(self) -> None:
        self.config: dict[str, Any] = {"task": "quiz", "doc_to_text": "{{q}}", "num_fewshot": 0, "dataset_path": "/a"}
        self.eval_docs = [{"q": "one"}, {"q": "two"}, {"q": "three"}]
        self.examples = [{"q": "zero"}]

    def dump_config(self) -> dict[str, Any]:
        return self.config

    def fewshot_docs(self) -> list[dict[str, str]]:
        return self.examples


class Group:
    def __init__(self, *tasks: Task) -> None:
        self.tasks = tasks

    def get_all_tasks(self) -> list[Task]:
        return list(self.tasks)


class Subject:
    """What a key is taken of; each test changes one thing."""

    def __init__(self, text: Path) -> None:
        text.write_text("The river rises.\n")
        self.text = text
        self.model = tiny_model(vocab_size=258)
        self.tokenizer = byte_tokenizer()
        self.section: dict[str, Any] = {"perplexity": (str(text),), "tasks": ("quiz",)}
        self.task = Task()

    def key(self) -> dict[str, Any]:
        identity = BackboneIdentity.of("wherever", None, self.model.config, None)
        backbone = Backbone(self.model, self.tokenizer, identity, torch.device("cpu"))
        section = EvalSection(**self.section)
        protocol = EvalProtocol.from_section(section)
        return dense_key(backbone, section, protocol, [Group(self.task)], offline=True)


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    return Subject(tmp_path / "text.txt")


def lower_case(subject: Subject) -> None:
    from tokenizers import normalizers

    subject.tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()


def put_bos_in_front(subject: Subject) -> None:
    from tokenizers import processors

    subject.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )


def change_one_weight(subject: Subject) -> None:
    weight = subject.model.model.layers[1].mlp.up_proj.weight
    weight[3, 7] = torch.nextafter(weight[3, 7], torch.tensor(torch.inf))


CHANGES: dict[str, Callable[[Subject], Any]] = {
    "one weight, by one bit": change_one_weight,
    "the dtype": lambda s: s.model.to(torch.bfloat16),
    "rope": lambda s: s.model.config.rope_parameters.update(rope_theta=100.0),
    "the norms": lambda s: setattr(s.model.config, "rms_norm_eps", 0.1),
    "the window": lambda s: setattr(s.model.config, "sliding_window", 8),
    "the longest sequence": lambda s: setattr(s.model.config, "max_position_embeddings", 64),
    "BOS": lambda s: setattr(s.model.config, "bos_token_id", 5),
    "how it generates": lambda s: setattr(s.model.generation_config, "eos_token_id", 9),
    "the attention": lambda s: s.model.set_attn_implementation("eager"),
    "the tokenizer's normalizer": lower_case,
    "the tokenizer's special tokens": put_bos_in_front,
    "the tokenizer's EOS": lambda s: setattr(s.tokenizer, "eos_token", "a"),
    "the text": lambda s: s.text.write_text("The river falls.\n"),
    "the window of the perplexity": lambda s: s.section.update(perplexity_window=64),
    "the limit": lambda s: s.section.update(limit=2),
    "a document": lambda s: s.task.eval_docs[2].update(q="four"),
    "the order of the documents": lambda s: s.task.eval_docs.reverse(),
    "the prompt": lambda s: s.task.config.update(doc_to_text="Question: {{q}}"),
    "the task's version": lambda s: setattr(s.task, "VERSION", 2.0),
    "the number of examples": lambda s: s.task.config.update(num_fewshot=1),
}


@pytest.mark.parametrize("what", CHANGES)
def test_whatever_a_figure_depends_on_is_in_the_key(subject: Subject, what: str) -> None:
    before = subject.key()
    assert subject.key() == before
    CHANGES[what](subject)
    assert subject.key() != before


def test_an_example_in_front_counts_where_examples_are_shown(subject: Subject) -> None:
    before = subject.key()
    subject.task.examples[0]["q"] = "another"
    assert subject.key() == before
    subject.task.config["num_fewshot"] = 1
    shown = subject.key()
    subject.task.examples[0]["q"] = "a third"
    assert subject.key() != shown


def test_documents_beyond_the_limit_and_places_do_not_count(subject: Subject) -> None:
    subject.section["limit"] = 2
    before = subject.key()
    subject.task.eval_docs[2]["q"] = "four"
    subject.task.config["dataset_path"] = "/b"
    subject.model.config._name_or_path = "/c"
    assert subject.key() == before


def test_another_version_or_changed_code_is_another_key(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    before = subject.key()
    honest = dense_cache._version
    for package in ("lm-eval", "transformers", "datasets", "tokenizers", "torch"):
        monkeypatch.setattr(dense_cache, "_version", lambda name, p=package: "0" if name == p else honest(name))
        assert subject.key() != before
    monkeypatch.undo()
    read = Path.read_bytes
    for file in ("perplexity.py", "evaluator.py"):
        monkeypatch.setattr(Path, "read_bytes", lambda self, f=file: read(self) + b"#" * (self.name == f))
        assert subject.key() != before
        monkeypatch.undo()


def test_a_named_text_counts_by_what_it_says_here(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    from pydoc_data import topics

    subject.section["perplexity"] = ("pydoc-topics@2",)
    before = subject.key()
    monkeypatch.setattr(topics, "topics", {**topics.topics, "aaa": "another version of Python"})
    assert subject.key() != before


def test_a_key_is_plain(subject: Subject) -> None:
    key = subject.key()
    assert json.loads(json.dumps(key)) == key

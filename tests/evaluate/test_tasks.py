from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from widecli.errors import UsageError, WideError
from widecli.evaluate import tasks as module
from widecli.evaluate.protocol import PAPER_TASKS
from widecli.evaluate.tasks import check_tasks, load_tasks, templates_compiled_once


def test_paper_stands_for_the_seven_in_order() -> None:
    assert check_tasks(["paper"]) == PAPER_TASKS
    assert check_tasks(["piqa", "paper"])[0] == "piqa"
    assert len(check_tasks(["paper", "piqa"])) == 7


@pytest.mark.parametrize("name", [*PAPER_TASKS, "wikitext"])
def test_the_known_files_are_lm_evals_tasks_of_that_name(name: str) -> None:
    from lm_eval.tasks._yaml_loader import load_yaml

    path = module._tasks_folder() / module._KNOWN_FILES[name]
    config = load_yaml(path, resolve_func=False)
    assert config["task"] == name
    assert module._dataset_path(name) == config["dataset_path"]


def test_checking_the_papers_tasks_imports_nothing_heavy(hub_folder: Path) -> None:
    code = (
        "import sys; from widecli.evaluate.tasks import check_tasks; check_tasks(['paper'], data_root=sys.argv[1]);"
        "assert not {'torch', 'lm_eval', 'datasets', 'transformers'} & set(sys.modules), sorted(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, str(hub_folder)], check=True, env=environment)


def test_any_task_group_or_tag_of_lm_eval_is_known() -> None:
    assert check_tasks(["sciq", "mmlu", "ai2_arc", "lambada_openai"]) == ("sciq", "mmlu", "ai2_arc", "lambada_openai")


@pytest.mark.parametrize(("name", "near"), [("arc_esay", "arc_easy"), ("hellaswg", "hellaswag"), ("papper", "paper")])
def test_an_unknown_task_is_refused_with_the_nearest_names(name: str, near: str) -> None:
    with pytest.raises(UsageError, match=f"{name}.*{near}"):
        check_tasks([name])


def test_a_name_like_no_other_is_refused_too() -> None:
    with pytest.raises(UsageError, match="paper"):
        check_tasks(["qqqqxxxxzzzz"])


def test_a_data_root_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="data_root"):
        check_tasks(["piqa"], data_root=str(tmp_path / "absent"))


def test_offline_names_every_missing_set_at_once(hub_folder: Path) -> None:
    with pytest.raises(UsageError, match="baber/piqa, Rowan/hellaswag") as error:
        check_tasks(["openbookqa", "piqa", "hellaswag"], data_root=str(hub_folder), offline=True)
    assert "openbookqa" not in str(error.value)


@pytest.mark.parametrize("below", ["", "hub"])
def test_a_task_reads_the_data_root_and_records_the_hub_id(hub_folder: Path, tmp_path_factory: Any, below: str) -> None:
    root = hub_folder
    if below:
        root = tmp_path_factory.mktemp("root")
        (root / below).symlink_to(hub_folder)
    (task,) = load_tasks(["openbookqa"], data_root=str(root), offline=True)
    assert len(task.eval_docs) == 12
    assert task.dump_config()["dataset_path"] == "allenai/openbookqa"
    assert task.dump_config()["dataset_name"] == "main"
    assert "dataset_kwargs" not in task.dump_config()
    assert task.dump_config()["metadata"] == {"version": 1.0, "data": "local data root"}
    assert task.VERSION == 1.0


def test_edited_data_and_another_root_are_read_anew(hub_folder: Path, tmp_path_factory: Any) -> None:
    def questions(root: Path) -> list[str]:
        (task,) = load_tasks(["openbookqa"], data_root=str(root), offline=True)
        return [document["question_stem"] for document in task.eval_docs]

    before = questions(hub_folder)
    other = tmp_path_factory.mktemp("other")
    shutil.copytree(hub_folder / "allenai", other / "allenai")
    path = other / "allenai/openbookqa/main/test.jsonl"
    path.write_text(path.read_text().replace(before[0], "what else"))
    assert questions(other)[0] == "what else"
    path.write_text(path.read_text().replace("what else", "something new"))
    assert questions(other)[0] == "something new"
    assert questions(hub_folder) == before


@pytest.mark.parametrize(
    "group",
    ["tag: some_tag\n", "", "group: some_group\n"],
)
def test_groups_and_tags_read_the_data_root_too(
    hub_folder: Path, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    from lm_eval.tasks import TaskManager

    folder = tmp_path_factory.mktemp("tasks")
    text = (module._tasks_folder() / "openbookqa/openbookqa.yaml").read_text()
    kind, _, name = group.strip().partition(": ")
    (folder / "one.yaml").write_text(text + (group if kind == "tag" else ""))
    if kind == "group":
        (folder / "all.yaml").write_text(group + "task:\n  - openbookqa\n")
    monkeypatch.setattr(module, "_manager", lambda: TaskManager(include_defaults=False, include_path=str(folder)))
    (loaded,) = module._from_manager(name or "openbookqa", str(hub_folder))
    (task,) = loaded.get_all_tasks() if kind == "group" else (loaded,)
    assert len(task.eval_docs) == 12
    assert task.dump_config()["dataset_path"] == "allenai/openbookqa"


def test_a_set_that_cannot_be_loaded_is_one_sentence(hub_folder: Path) -> None:
    (hub_folder / "allenai/openbookqa/main/test.jsonl").write_text("{oops\n")
    with pytest.raises(WideError, match=r"allenai/openbookqa of task openbookqa.*data-root") as error:
        load_tasks(["openbookqa"], data_root=str(hub_folder))
    assert "\n" not in str(error.value)


def test_a_hub_out_of_reach_is_said_at_once_and_only_where_it_is_needed(
    hub_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def unreachable(address: tuple[str, int], timeout: float) -> None:
        tried.append(address[0])
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.create_connection", unreachable)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    with pytest.raises(WideError, match=r"the Hub cannot be reached: .*piqa.*--data-root") as error:
        load_tasks(["openbookqa", "piqa"], data_root=str(hub_folder))
    assert "openbookqa" not in str(error.value) and len(tried) == 1
    load_tasks(["openbookqa"], data_root=str(hub_folder))
    assert len(tried) == 1


def test_compiling_templates_once_changes_no_prompt(hub_folder: Path) -> None:
    from lm_eval import utils

    (task,) = load_tasks(["openbookqa"], data_root=str(hub_folder))
    documents = list(task.eval_docs)
    plain = [(task.doc_to_text(d), task.doc_to_target(d), task.doc_to_choice(d)) for d in documents]
    with templates_compiled_once():
        assert utils.env.from_string("{{x}}") is utils.env.from_string("{{x}}")
        assert [(task.doc_to_text(d), task.doc_to_target(d), task.doc_to_choice(d)) for d in documents] == plain
        with templates_compiled_once():
            pass
        assert "from_string" in vars(utils.env)
    assert "from_string" not in vars(utils.env)

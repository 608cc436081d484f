"""lm-eval tasks by name: found without lm-eval's slow index where possible, read from a local data root where named."""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from widecli.errors import UsageError
from widecli.evaluate.hub_data import (
    local_folder,
    prepared_folder,
    quiet_datasets,
    reading,
    require_present,
    require_reachable,
)
from widecli.evaluate.protocol import expand_tasks
from widecli.evaluate.quiet import quiet_harness

# Where lm-eval keeps the tasks that everybody asks for. Walking its 14 000 YAML files takes seconds, reading them 15.
_KNOWN_FILES = {
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "winogrande": "winogrande/default.yaml",
    "piqa": "piqa/piqa.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "wikitext": "wikitext/wikitext.yaml",
}

_NAME_LINE = re.compile(r"^(task|group):[ \t]*[\"']?([\w.+-]+)[\"']?[ \t]*$", re.MULTILINE)
_DATASET_LINE = re.compile(r"^dataset_path:[ \t]*[\"']?([\w./-]+)", re.MULTILINE)
_INCLUDE_LINE = re.compile(r"^include:[ \t]*[\"']?([\w./-]+)", re.MULTILINE)
_TAG_LINES = re.compile(r"^tag:[ \t]*(?:\n[ \t]*-[ \t]*)?(.+(?:\n[ \t]*-[ \t]*.+)*)", re.MULTILINE)


def check_tasks(names: Sequence[str], *, data_root: str | None = None, offline: bool = False) -> tuple[str, ...]:
    """Expand `paper` and refuse an unknown task, a bad data root or, offline, missing data; loads no data set.

    Raises `UsageError` with the nearest known names.
    """
    tasks = expand_tasks(names)
    for name in tasks:
        if _task_file(name) is None and name not in _index().others:
            raise UsageError(_unknown(name))
    paths = [path for path in map(_dataset_path, tasks) if path is not None]
    for path in paths:
        local_folder(path, data_root)
    if offline:
        require_present(paths, data_root=data_root)
    return tasks


def load_tasks(names: Sequence[str], *, data_root: str | None = None, offline: bool = False) -> list[Any]:
    """lm-eval `Task` and `Group` objects, ready for `run_tasks`; they can serve several models, one after the other.

    A task whose data set lies below `data_root` reads it from there; the others use the Hub or its cache.
    """
    tasks = check_tasks(names, data_root=data_root, offline=offline)
    if not offline:
        require_reachable(filter(None, map(_dataset_path, tasks)), data_root=data_root)
    loaded: list[Any] = []
    with quiet_harness(), quiet_datasets():
        for name in tasks:
            if _task_file(name) is not None:
                with reading(_dataset_path(name) or "of the task", f" of task {name}"):
                    loaded.append(_from_file(name, data_root))
            else:
                with reading("of the group", f" {name}"):
                    loaded.extend(_from_manager(name, data_root))
    return loaded


def _task_file(name: str) -> Path | None:
    known = _KNOWN_FILES.get(name)
    if known is not None and (_tasks_folder() / known).is_file():
        return _tasks_folder() / known
    return _index().tasks.get(name)


@functools.cache
def _tasks_folder() -> Path:
    import importlib.util

    # Found, not imported: lm_eval.tasks pulls in torch, and a dry run needs the names only.
    found = importlib.util.find_spec("lm_eval")
    if found is None or not found.submodule_search_locations:
        raise UsageError("Tasks need lm-eval, which is not installed: pip install lm-eval.")
    return Path(next(iter(found.submodule_search_locations))) / "tasks"


class _Index:
    """Names found by reading the YAML files as text: a second instead of a quarter of a minute."""

    def __init__(self, folder: Path) -> None:
        self.tasks: dict[str, Path] = {}
        self.others: set[str] = set()
        for path in sorted(folder.rglob("*.yaml")):
            text = path.read_text(encoding="utf-8", errors="replace")
            simple = "\nclass:" not in f"\n{text}" and "\ngroup:" not in f"\n{text}"
            for kind, name in _NAME_LINE.findall(text):
                if kind == "task" and simple:
                    self.tasks.setdefault(name, path)
                else:
                    self.others.add(name)
            for block in _TAG_LINES.findall(text):
                self.others.update(re.findall(r"[\w.+-]*\w[\w.+-]*", block))
        self.others -= self.tasks.keys()


@functools.cache
def _index() -> _Index:
    return _Index(_tasks_folder())


def _unknown(name: str) -> str:
    known = ["paper", *_index().tasks, *_index().others]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else "`paper` stands for the seven tasks of the paper."
    return f"There is no lm-eval task {name!r}; {hint}"


@functools.cache
def _dataset_path(name: str) -> str | None:
    """The Hub id a task reads; None for groups and for tasks that bring their own loader or files."""
    path = _task_file(name)
    while path is not None and path.is_file():
        # Read as text: importing lm-eval's loader takes seconds, which a dry run should not.
        text = path.read_text(encoding="utf-8", errors="replace")
        if found := _DATASET_LINE.search(text):
            return found[1] if "/" in found[1] else None
        included = _INCLUDE_LINE.search(text)
        path = path.parent / included[1] if included else None
    return None


def _from_file(name: str, data_root: str | None) -> Any:
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    path = _task_file(name)
    assert path is not None  # the caller looked
    config = load_yaml(path)
    for structural in ("tag", "group", "task_list"):
        config.pop(structural, None)
    named = _read_locally(config, data_root)
    task = ConfigurableTask(config=config)
    if named is not None:
        _name_the_hub(task, named)
    return task


def _name_the_hub(task: Any, named: dict[str, Any]) -> None:
    """Once its data is loaded, let a task's record name the data set and not a folder of this machine."""
    for key, value in named.items():
        task.set_config(key=key, value=value)


def _read_locally(config: dict[str, Any], data_root: str | None) -> dict[str, Any] | None:
    """Point a task's configuration at the data root; returns what it said before, None if the root lacks the set."""
    hub_id = config.get("dataset_path")
    if not isinstance(hub_id, str) or "/" not in hub_id:
        return None
    folder = local_folder(hub_id, data_root)
    if folder is None:
        return None
    named: dict[str, Any] = {"dataset_path": hub_id, "dataset_kwargs": config.get("dataset_kwargs")}
    config["dataset_path"] = str(folder)
    config["dataset_kwargs"] = {**(named["dataset_kwargs"] or {}), "cache_dir": prepared_folder(folder)}
    metadata = config.get("metadata")
    config["metadata"] = {**(metadata if isinstance(metadata, dict) else {}), "data": "local data root"}
    return named


def _from_manager(name: str, data_root: str | None) -> list[Any]:
    """Groups, tags and tasks written in Python: lm-eval's own manager knows how to put them together."""
    from lm_eval.api.group import Group
    from lm_eval.tasks._yaml_loader import load_yaml

    manager = _manager()
    local: dict[str, dict[str, Any]] = {}
    for entry in _members(manager.task_index, name) if data_root is not None else ():
        if entry.yaml_path is None or not isinstance(entry.cfg, dict) or "class" in entry.cfg:
            continue
        if _read_locally(dict(entry.cfg), data_root) is not None:
            config = load_yaml(entry.yaml_path)
            local[entry.name] = _read_locally(config, data_root) or {}
            entry.cfg, entry.yaml_path = config, None
    try:
        loaded = manager.load([name])
    except KeyError:
        raise UsageError(_unknown(name)) from None
    for task_name, task in loaded["tasks"].items():
        if task_name in local:
            _name_the_hub(task, local[task_name])
    top = loaded.get("groups", {}).get(name)
    return [top] if isinstance(top, Group) else list(loaded["tasks"].values())


def _members(index: Mapping[str, Any], name: str) -> list[Any]:
    """Index entries of the plain tasks that a group, a tag or a task name stands for."""
    found: dict[str, Any] = {}
    open_names, seen = [name], set()
    while open_names:
        entry = index.get(open_names.pop())
        if entry is None or entry.name in seen:
            continue
        seen.add(entry.name)
        listed = (entry.cfg or {}).get("task")
        if entry.yaml_path is None:  # a tag
            open_names.extend(entry.tags)
        elif isinstance(listed, list):  # a group
            open_names.extend(
                item if isinstance(item, str) else str(item.get("group") or item.get("task")) for item in listed
            )
        else:
            found[entry.name] = entry
    return list(found.values())


def _manager() -> Any:
    from lm_eval.tasks import TaskManager

    # Not shared between calls: _from_manager edits its entries for one data root.
    return TaskManager()


@contextlib.contextmanager
def templates_compiled_once() -> Iterator[None]:
    """Let lm-eval's prompt templates be compiled once a task instead of once a document.

    lm-eval asks its jinja environment to compile the same template string for every document (1 ms each; half a minute
    for the seven tasks, twice). A compiled template is stateless, so remembering it changes no prompt.
    """
    from lm_eval import utils

    environment = getattr(utils, "env", None)
    if environment is None or "from_string" in vars(environment):
        yield
        return
    environment.from_string = functools.lru_cache(maxsize=1024)(environment.from_string)
    try:
        yield
    finally:
        del environment.from_string

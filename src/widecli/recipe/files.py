"""Finding and reading recipe files: paths, shipped names, `base` chains."""

from __future__ import annotations

import difflib
from pathlib import Path

import yaml

from widecli.errors import UsageError
from widecli.recipe.dialect import parse_yaml
from widecli.recipe.keys import Tree, keys_of, leaves, recipe_keys, section_keys, suggestion
from widecli.recipe.retired import drop_silent_keys
from widecli.recipe.schema import NO_COMPENSATION
from widecli.storage import given_path

_BESIDE_STORED = ("wide_config.json", "environment.json", "summary.json")


def recipes_folder() -> Path:
    """The recipes that come with the product: inside the package when installed, beside `src/` in a clone."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parents[1] / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """Name as typed (`demo`, `calibrate/smollm2_s50_g64`) -> file."""
    root = recipes_folder()
    return {p.relative_to(root).with_suffix("").as_posix(): p for p in sorted(root.rglob("*.yaml"))}


def find_recipe(name: str, command: str = "calibrate") -> Path:
    """The file behind a path or a shipped name; raises UsageError with the closest names.

    A name without its folder means the recipe of `command` when several commands have one of that name; for a sweep
    without one, the calibration's.
    """
    path = given_path(name)
    if path.is_file():
        return path
    if path.is_dir() and (path / "recipe.yaml").is_file():
        return path / "recipe.yaml"  # a run or checkpoint directory names its own recipe
    shipped = shipped_recipes()
    wanted = name.removeprefix("recipes/").removesuffix(".yaml")
    if wanted in shipped:
        return shipped[wanted]
    for folder in (command, "calibrate") if command == "sweep" else (command,):
        if f"{folder}/{wanted}" in shipped:
            return shipped[f"{folder}/{wanted}"]
    same_stem = [key for key in shipped if key.rsplit("/", 1)[-1] == wanted]
    if len(same_stem) == 1:
        return shipped[same_stem[0]]
    if same_stem:
        raise UsageError(f"The recipe name {name!r} fits {' and '.join(same_stem)}; name one of them.")
    own_last = sorted(shipped, key=lambda key: key.startswith(f"{command}/"))  # the last of a name counts
    by_name = {**{key.rsplit("/", 1)[-1]: key for key in own_last}, **{key: key for key in shipped}}
    close = list(dict.fromkeys(by_name[n] for n in difflib.get_close_matches(wanted, by_name, n=3, cutoff=0.6)))
    hint = f"did you mean {' or '.join(close)}?" if close else f"shipped ones are {', '.join(shipped)}."
    raise UsageError(f"There is no recipe {name!r}, neither as a file nor as a shipped name; {hint}")


def read_with_base(path: Path, provenance: dict[str, str], seen: tuple[Path, ...] = ()) -> Tree:
    """The file's tree laid over that of the recipe it names as `base`; notes in `provenance` who set what."""
    path = path.resolve()
    shown = shown_path(path)
    if path in seen:
        raise UsageError(f"The recipe {shown} is its own base, by way of {' -> '.join(shown_path(p) for p in seen)}.")
    tree = parse_mapping(recipe_text(path, shown), shown)
    if is_stored(path):
        tree = as_stored(tree)
    base = tree.pop("base", None)
    merged: Tree = {}
    if base is not None:
        if not isinstance(base, str):
            raise UsageError(f"base in {shown} must be the file name of another recipe, not {base!r}.")
        base_path = path.parent / base
        if not base_path.is_file():
            raise UsageError(f"The base {base!r} of {shown} is not there; it is looked for beside that recipe.")
        merged = read_with_base(base_path, provenance, (*seen, path))
    check_keys(tree, shown)
    for key in leaves(tree):
        provenance[key] = shown
    return _merge(merged, tree)


def recipe_text(path: Path, shown: str | None = None) -> str:
    """What a recipe file holds; raises UsageError, under the name `shown`, when that is no text."""
    shown = shown or str(path)
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UsageError(f"The recipe {shown} line {line} is not UTF-8 text: save it as UTF-8.") from None
    except OSError as error:
        raise UsageError(f"The recipe {shown} cannot be read: {error.strerror or error}.") from None


def as_stored(tree: Tree) -> Tree:
    """A run's recipe with what it meant where it is older than a key, or a default: contiguous groups, no compensation
    and no distillation, a budget of rates.

    Such a recipe is written whole, so a key that it lacks is one that did not exist.
    """
    before: Tree = {
        "routing": {"grouping": "contiguous"},
        "compensation": dict(NO_COMPENSATION),
        "budget": {"kind": "rate"},
        "train": {"distill": 0.0},
    }
    found = {name: section if section is not None else {} for name, section in tree.items()}
    if isinstance(found.get("compensation"), dict):  # the section came whole: what it lacks is at its default
        before.pop("compensation")
    return _merge(before, found)


def is_stored(path: Path) -> bool:
    """Whether a recipe file is one that a run or a checkpoint wrote beside its results."""
    return path.name == "recipe.yaml" and any((path.parent / name).is_file() for name in _BESIDE_STORED)


def parse_mapping(text: str, shown: str) -> Tree:
    """The sections in a recipe's text; `shown` names it in errors."""
    try:
        tree = parse_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UsageError(f"The recipe {shown}{where} is not valid YAML: {problem}.") from None
    except ValueError as error:  # a scalar that its type refuses
        raise UsageError(f"The recipe {shown} holds a value that cannot be read: {error}.") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UsageError(
            f"The recipe {shown} must hold sections ({', '.join(section_keys())}), not a {type(tree).__name__}."
        )
    return tree


def _merge(below: Tree, above: Tree) -> Tree:
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def shown_path(path: Path) -> str:
    """A path below the recipes folder or the working directory in its short form."""
    root = recipes_folder()
    resolved = path.resolve()
    if resolved.is_relative_to(root.resolve()):
        return f"recipes/{resolved.relative_to(root.resolve()).as_posix()}"
    return str(resolved.relative_to(Path.cwd())) if resolved.is_relative_to(Path.cwd()) else str(path)


def check_keys(tree: Tree, shown: str) -> None:
    """Refuses unknown sections and keys; an empty section becomes `{}`, retired keys at their default go."""
    for section, value in tree.items():
        if section not in section_keys():
            raise UsageError(f"Unknown key {section} in {shown}; {suggestion(str(section))}")
        if value is None:
            tree[section] = {}  # a section whose keys are all commented out
        elif not isinstance(value, dict):
            raise UsageError(f"{section} in {shown} is a section and takes keys ({keys_of(section)}), not {value!r}.")
    drop_silent_keys(tree)
    for key in leaves(tree):
        if key not in recipe_keys() and key not in section_keys():
            raise UsageError(f"Unknown key {key} in {shown}; {suggestion(key)}")

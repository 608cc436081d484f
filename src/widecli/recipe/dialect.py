"""The YAML that recipes are written in: YAML 1.2's core scalars on PyYAML.

PyYAML reads YAML 1.1, where `off` is false, `2e-3` is text and `1:30` is 90. Recipes hold `wandb: off` and
`learning_rate: 2e-3`, so both directions use the 1.2 rules here; what `dump_yaml` writes, `parse_yaml` reads back.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
# Underscores (10_000) are not YAML 1.2, but people write step counts that way.
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+)"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_RESOLVERS: tuple[tuple[str, re.Pattern[str], list[str]], ...] = (
    ("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", _BOOL, list("tTfF")),
    ("tag:yaml.org,2002:int", _INT, list("-+0123456789")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789.")),
    ("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"]),
)


_DEEPEST = 50
_MOST_VALUES = 10_000


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars that refuses a key given twice."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - as declared by PyYAML
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > _DEEPEST:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, f"values are nested more than {_DEEPEST} deep", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _refuse_bomb(node)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            try:
                repeated = key in seen
                seen.add(key)
            except TypeError:
                repeated = False  # an unhashable key is reported by the base class
            if repeated:
                problem = f"the key {key} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        return super().construct_mapping(node, deep=deep)


def _refuse_bomb(root: yaml.Node) -> None:
    """Aliases of aliases write out more values than any machine holds, and one that holds itself has no end."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: yaml.Node) -> int:
        if id(node) in open_nodes:
            raise yaml.composer.ComposerError(None, None, "an alias holds itself", node.start_mark)
        if id(node) not in sizes:
            open_nodes.add(id(node))
            inner: list[yaml.Node] = []
            if isinstance(node, yaml.MappingNode):
                inner = [part for pair in node.value for part in pair]
            elif isinstance(node, yaml.SequenceNode):
                inner = node.value
            sizes[id(node)] = 1 + sum(map(size, inner))
            open_nodes.remove(id(node))
        return sizes[id(node)]

    if size(root) > max(_MOST_VALUES, len(sizes)):  # written out it is more than what stands there
        raise yaml.composer.ComposerError(
            None, None, f"aliases write out more than {_MOST_VALUES:,} values", root.start_mark
        )


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what `_Loader` would not read as text."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - as declared by PyYAML

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)


def parse_yaml(text: str) -> Any:
    """Reads one YAML document.

    Raises `yaml.YAMLError` for bad syntax, a repeated key, and what no recipe needs: values nested more than 50 deep,
    or aliases that write out 10,000 values.
    """
    return yaml.load(text, Loader=_Loader)


def parse_value(text: str) -> Any:
    """Reads a value from a command line, where `#` begins no comment. Raises `yaml.YAMLError` as `parse_yaml`."""
    if "#" not in text:
        return parse_yaml(text)
    stand_in = next(mark for mark in map(chr, range(0xE000, 0xF900)) if mark not in text)
    return _replaced(parse_yaml(text.replace("#", stand_in)), stand_in)


def _replaced(value: Any, stand_in: str) -> Any:
    if isinstance(value, str):
        return value.replace(stand_in, "#")
    if isinstance(value, dict):
        return {_replaced(key, stand_in): _replaced(item, stand_in) for key, item in value.items()}
    return [_replaced(item, stand_in) for item in value] if isinstance(value, list) else value


def dump_yaml(value: Any) -> str:
    """Writes plain data as block YAML in the given key order."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110))

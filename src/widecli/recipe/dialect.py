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


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars that refuses a key given twice."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - as declared by PyYAML

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


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what `_Loader` would not read as text."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - as declared by PyYAML

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)


def parse_yaml(text: str) -> Any:
    """Reads one YAML document; raises `yaml.YAMLError` for bad syntax or a repeated key."""
    return yaml.load(text, Loader=_Loader)


def dump_yaml(value: Any) -> str:
    """Writes plain data as block YAML in the given key order."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110))

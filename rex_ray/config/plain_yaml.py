"""YAML as a configuration means it: ``off`` is a word, ``1e-3`` a number, and every key knows its line.

PyYAML follows YAML 1.1, where ``off`` is false, ``1e-3`` text, ``010`` eight and ``1:30`` ninety. ``off`` is a mode of
ours and ``1e-3`` a usual learning rate, so scalars are read by the core schema of YAML 1.2 instead, beside which only
``1_000`` is kept. What is written is quoted wherever either version would read it as something else.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

__all__ = ["Document", "flow_text", "read_document", "read_value", "write_document"]

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"(?:[-+]?(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_SCALARS = (
    ("bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+0123456789."),
    ("null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("merge", re.compile(r"<<$"), "<"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What a text holds.

    Attributes:
        value: plain values; of any kind, since a file may hold anything.
        lines: first line of every key of the outer mapping, and of the mappings right below it, counted from 1.
    """

    value: Any
    lines: Mapping[tuple[str, ...], int]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own way

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Refuse a key that stands twice: PyYAML would take the last one and say nothing."""
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key.value!r} stands twice", key.start_mark
                    )
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the signature is PyYAML's
        """Write everything out: a reader of a configuration should not have to follow anchors."""
        return True


for _kind, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _pattern, list(_first))
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _pattern, list(_first))


def read_document(text: str) -> Document:
    """Read a text.

    Raises:
        ValueError: it is no YAML, or more than one document; the message begins with the line where that is known.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            value = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark is not None else ""
        raise ValueError(f"{where}{error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("\n", " ")) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return Document(value=value, lines={} if node is None else _lines(node))


def read_value(text: str) -> Any:
    """Read one value as a file would hold it, from a command line or the environment.

    Raises:
        ValueError: it is no YAML.
    """
    return read_document(text).value


def write_document(values: Mapping[str, Any]) -> str:
    """Return the text that ``read_document`` reads back to equal values."""
    text: str = yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, width=110)
    return text


def flow_text(key: str, value: Any) -> str:
    """Return ``key: value`` on one line."""
    return f"{_flow(key)}: {_flow(value)}"


def _flow(value: Any) -> str:
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


def _lines(root: yaml.Node) -> dict[tuple[str, ...], int]:
    found: dict[tuple[str, ...], int] = {}
    if isinstance(root, yaml.MappingNode):
        for key, value in root.value:
            found[(str(key.value),)] = key.start_mark.line + 1
            if isinstance(value, yaml.MappingNode):
                for inner, _ in value.value:
                    found[(str(key.value), str(inner.value))] = inner.start_mark.line + 1
    return found

"""A configuration for people: every key with its meaning, which is said once, in the docstring of ``RexConfig``."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from rex_ray.config.plain_yaml import flow_text

__all__ = ["commented_yaml", "meanings_in", "yaml_with_origins"]

_WIDTH = 100
_HEAD = """\
# What rex_ray adapts, within which limits. Take the # from a key to change it; behind it stands its default.
# `rex-ray config validate FILE` checks this file, `rex-ray config show FILE` says what counts in the end."""
_ENTRY = re.compile(r"    (\w+): (.*)")
_SENTENCE_END = re.compile(r"(?<=\.) (?=[A-Z])")


def meanings_in(docstring: str | None) -> dict[str, str]:
    """Return the first sentence on every attribute that a docstring describes; empty where Python has stripped it."""
    section = inspect.cleandoc(docstring or "").partition("\nAttributes:\n")[2]
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in section.splitlines():
        if not line.strip() or not line.startswith("    "):
            break
        if entry := _ENTRY.match(line):
            current = found[entry[1]] = [entry[2]]
        else:
            current.append(line.strip())
    return {name: _first_sentence(" ".join(lines)) for name, lines in found.items()}


def commented_yaml(values: Mapping[str, Any], meanings: Mapping[str, str], is_default: Callable[[str], bool]) -> str:
    """Return a file to begin with: what was chosen, and every default behind a ``#``, each below its meaning.

    Defaults stay comments: a file that repeats them would keep today's when a later version has better ones.

    Args:
        values: of every key.
        meanings: of keys in words.
        is_default: whether a key's value is its default.
    """
    blocks = [_HEAD]
    for key, value in values.items():
        lines = textwrap.wrap(meanings.get(key, ""), _WIDTH, break_on_hyphens=False)
        comment = "".join(f"# {line}\n" for line in lines)
        blocks.append(comment + ("#" if is_default(key) else "") + flow_text(key, value))
    return "\n\n".join(blocks) + "\n"


def yaml_with_origins(values: Mapping[str, Any], origin_of: Callable[[tuple[str, ...]], str]) -> str:
    """Return a configuration as YAML, each value with a comment that says where it comes from.

    Args:
        values: of every key.
        origin_of: says where a key's value, or that of an option below it, comes from.
    """
    lines: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            lines.append((f"{key}:", ""))
            lines += [
                (f"  {flow_text(str(name), inner)}", origin_of((key, str(name)))) for name, inner in value.items()
            ]
        else:
            lines.append((flow_text(key, value), origin_of((key,))))
    width = min(max(len(text) for text, origin in lines if origin), _WIDTH // 2)
    return "".join(f"{text:<{width}}  # {origin}\n" if origin else f"{text}\n" for text, origin in lines)


def _first_sentence(text: str) -> str:
    return _SENTENCE_END.split(text.replace("``", ""), maxsplit=1)[0]

"""``NAME=VALUE`` options that may be given several times."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rex_ray.core.errors import ConfigError

__all__ = ["enter_once"]

_Value = TypeVar("_Value")


def enter_once(
    found: dict[str, _Value], option: str, name: str, value: _Value, shown: Callable[[_Value], str] = str
) -> None:
    """Enter a value under its name; the same one again is harmless.

    Args:
        found: values by name.
        option: as which they are given.
        name: the value's.
        value: the value.
        shown: spells values.

    Raises:
        ConfigError: it contradicts what is there.
    """
    known = found.setdefault(name, value)
    if known != value:
        raise ConfigError(f"{option} {name} is given twice, as {shown(known)} and as {shown(value)}: leave one out")

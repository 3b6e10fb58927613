"""Whether a data set was changed since its loader processes were given their copies of it.

A loop may set ``dataset.mosaic = False`` for its last epochs. Loader processes that outlive an epoch do not see that;
in plain torch, where they do not outlive one by default, they would.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["Settings", "settings_of"]

Settings = dict[str, Any]

_DEEPEST = 6
_MOST_ITEMS = 64
_BY_VALUE = (bool, int, float, complex, str, bytes, type(None))
# What is looked at as a whole: inside of it there are data or code, and no settings.
_OPAQUE = (torch.Tensor, torch.Generator, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


def settings_of(dataset: Any) -> Settings:
    """Return attributes by their path, of the data set and of what it holds (data sets, transforms, short lists).

    Two such mappings of one data set are equal if nothing was set in between; contents of tensors, arrays and long
    lists are not compared. The epoch of a data set with ``set_epoch`` is left out: it is told in every process.
    """
    found: Settings = {}
    _collect("dataset", dataset, _DEEPEST, {id(dataset)}, found)
    return found


class _Same:
    """Equal to the very same object only; keeps it, so that its address is not given to another one."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    __hash__ = None  # type: ignore[assignment]


def _collect(path: str, value: Any, depth: int, above: set[int], found: Settings) -> None:
    """Add what is below ``path``; ``above`` are the objects on the way here, which may hold each other."""
    told_its_epoch = callable(getattr(value, "set_epoch", None))
    for name, child in _children(value):
        if told_its_epoch and "epoch" in name:
            continue
        below = f"{path}.{name}"
        if isinstance(child, _BY_VALUE):
            # With its type: True is no 1, and a NaN is itself.
            found[below] = repr(child)
            continue
        found[below] = _Same(child)
        if depth and id(child) not in above and not isinstance(child, _OPAQUE):
            _collect(below, child, depth - 1, above | {id(child)}, found)


def _children(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        return [(str(k), child) for k, child in enumerate(value)] if len(value) <= _MOST_ITEMS else []
    if isinstance(value, Mapping):
        return [(str(key), child) for key, child in value.items()] if len(value) <= _MOST_ITEMS else []
    return list(getattr(value, "__dict__", {}).items())

"""Whether a data set was changed since its loader processes were given their copies of it.

A loop may set ``dataset.mosaic = False`` for its last epochs. Loader processes that outlive an epoch do not see that;
in plain torch, where they do not outlive one by default, they would.
"""

from __future__ import annotations

import types
from collections import deque
from typing import Any

import torch

__all__ = ["Settings", "settings_of"]

Settings = dict[str, Any]

_DEEPEST = 6
_MOST_ITEMS = 64
_MOST_SETTINGS = 10_000
"""A data set may hold the whole program, as by a reference to its trainer; what is nearest to it is looked at."""
_NUMBERS = (bool, int, float, complex, type(None))
_TEXTS = (str, bytes)
# What is looked at as a whole: inside of it there are data or code, and no settings.
_OPAQUE = (torch.Tensor, torch.Generator, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


def settings_of(dataset: Any) -> Settings:
    """Return attributes by their path, of the data set and of what it holds (data sets, transforms, short lists).

    Two such mappings of one data set are equal if nothing was set in between; contents of tensors, arrays and long
    lists are not compared. The epoch of a data set with ``set_epoch`` is left out: it is told in every process.
    """
    found: Settings = {}
    # Each object once, by its shortest path: objects may hold each other, and in many ways.
    seen, waiting = {id(dataset)}, deque([("dataset", dataset, 0)])
    while waiting and len(found) < _MOST_SETTINGS:
        path, value, depth = waiting.popleft()
        told_its_epoch = callable(getattr(value, "set_epoch", None))
        for name, child in _children(value):
            if told_its_epoch and "epoch" in name:
                continue
            below = f"{path}.{name}"
            found[below] = _told_of(child)
            if depth < _DEEPEST and id(child) not in seen and not isinstance(child, (*_NUMBERS, *_TEXTS, *_OPAQUE)):
                seen.add(id(child))
                waiting.append((below, child, depth + 1))
    return found


class _Same:
    """Equal to the very same object only; keeps it, so that its address is not given to another one."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    __hash__ = None  # type: ignore[assignment]


def _told_of(value: Any) -> Any:
    """Return what is equal as long as nothing else was set."""
    if isinstance(value, _NUMBERS):
        return repr(value)  # with its type: True is no 1, and a NaN is itself
    if isinstance(value, _TEXTS):
        return (type(value), value)  # the text itself, which may be the whole data
    return _Same(value)


def _children(value: Any) -> list[tuple[str, Any]]:
    """Return what was put into a value. Mappings of other libraries may make their entries anew at each look."""
    if isinstance(value, (list, tuple)):
        return [(str(k), child) for k, child in enumerate(value)] if len(value) <= _MOST_ITEMS else []
    if isinstance(value, dict):
        return [(str(key), child) for key, child in value.items()] if len(value) <= _MOST_ITEMS else []
    return list(getattr(value, "__dict__", {}).items())

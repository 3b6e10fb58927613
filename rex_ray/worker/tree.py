"""Batches and model outputs are trees: tensors inside tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

__all__ = ["children", "is_plain", "leading_rows", "map_tensors", "moves_itself", "rebuilt", "tensors_in"]

# By their very type: a NumPy float is a float, too, and yet nothing that ``weights_only`` reads back.
_PLAIN_LEAVES = frozenset({type(None), bool, int, float, str, bytes, torch.Tensor, torch.nn.Parameter})


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return ``tree`` with every tensor replaced by ``fn(tensor)``; everything else is passed on as it is."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    return rebuilt(tree, lambda child: map_tensors(fn, child))


def is_plain(tree: Any) -> bool:
    """Whether ``tree`` is made of nothing that ``torch.load(weights_only=True)`` does not read back."""
    if type(tree) in (dict, OrderedDict):
        return all(is_plain(key) and is_plain(value) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return all(map(is_plain, tree))
    return type(tree) in _PLAIN_LEAVES


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of ``tree``, depth first."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    found: list[torch.Tensor] = []
    _collect(tree, found)
    return found


def leading_rows(tree: Any) -> int | None:
    """Return the first dimension of the first tensor that has one: the number of rows, batch first."""
    for tensor in tensors_in(tree):
        if tensor.dim() > 0:
            return tensor.size(0)  # of a nested tensor the whole shape may not exist
    return None


def moves_itself(value: Any) -> bool:
    """Whether an object that is no tensor says by a method ``to`` how it goes to a device, and so holds tensors.

    A packed sequence is a tuple of tensors one of which stays on the host; a graph, or a list of boxes, is no tuple.
    """
    return not isinstance(value, torch.Tensor) and callable(getattr(value, "to", None))


def children(tree: Any) -> Iterable[Any]:
    """Return what a tree is made of, one level down; nothing of a leaf."""
    if isinstance(tree, (list, tuple)):
        return tree
    if isinstance(tree, Mapping):
        return tree.values()
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    return ()


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    """Add the tensors below ``tree``; several such walks a step would show if each built the tree anew."""
    kind = type(tree)
    if kind is tuple or kind is list:
        parts = tree
    elif kind is dict:
        parts = tree.values()
    else:
        # What is seldom met goes the one way that knows it.
        rebuilt(tree, lambda child: _note(child, found))
        return
    for child in parts:
        _note(child, found)


def _note(child: Any, found: list[torch.Tensor]) -> Any:
    if isinstance(child, torch.Tensor):
        found.append(child)
    elif type(child) not in _PLAIN_LEAVES:
        _collect(child, found)
    return child


def rebuilt(tree: Any, fn: Callable[[Any], Any]) -> Any:
    """Return ``tree`` of the same type with ``fn`` applied to each child; leaves come back as they are."""
    # First what batches and arguments mostly are: to ask for a Mapping is ten times as dear.
    if type(tree) in (list, tuple):
        return type(tree)([fn(item) for item in tree])
    if isinstance(tree, Mapping):
        mapped = {key: fn(value) for key, value in tree.items()}
        if type(tree) is dict:
            return mapped
        clone: Any = copy.copy(tree)
        for key, value in mapped.items():
            clone[key] = value
        return clone
    if isinstance(tree, list):
        changed_list = copy.copy(tree)
        changed_list[:] = [fn(item) for item in tree]
        return changed_list
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(fn(item) for item in tree))
    if isinstance(tree, tuple) and hasattr(type(tree), "n_sequence_fields"):  # what torch.max(x, dim) returns
        return type(tree)([fn(item) for item in tree])
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changed = {field.name: fn(getattr(tree, field.name)) for field in dataclasses.fields(tree) if field.init}
        return dataclasses.replace(tree, **changed)
    return tree

"""Batches and model outputs are trees: tensors inside tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from rex_ray.core.errors import ConfigError

__all__ = ["empty_like", "is_plain", "leading_rows", "map_tensors", "slice_rows", "tensors_in"]

# By their very type: a NumPy float is a float, too, and yet nothing that ``weights_only`` reads back.
_PLAIN_LEAVES = frozenset({type(None), bool, int, float, str, bytes, torch.Tensor, torch.nn.Parameter})


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return ``tree`` with every tensor replaced by ``fn(tensor)``; everything else is passed on as it is."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    return _rebuild(tree, lambda child: map_tensors(fn, child))


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
            return tensor.shape[0]
    return None


def slice_rows(tree: Any, start: int, stop: int, *, num_rows: int, strict: bool = False) -> Any:
    """Return rows ``start:stop`` of a collated batch of ``num_rows`` rows.

    Columns (tensors, arrays, or sequences of per-row values) are sliced along their first dimension; a tensor with
    another first dimension is no column and is left alone.

    Args:
        tree: what the collate function returned.
        start: first row.
        stop: one past the last row.
        num_rows: rows of the whole batch; tells columns from other tensors.
        strict: refuse tensors that are no columns, instead of passing them on whole.

    Raises:
        ConfigError: ``strict``, and a tensor's first dimension is not ``num_rows``.
    """

    def cut(child: Any) -> Any:
        if isinstance(child, (torch.Tensor, np.ndarray)):
            if child.ndim > 0 and child.shape[0] == num_rows:
                return child[start:stop]
            if strict and child.ndim > 0:
                raise ConfigError(
                    f"a batch of {num_rows} rows holds a tensor of shape {tuple(child.shape)}, whose first dimension "
                    "is not the rows: split such a batch yourself inside `with session.accumulate():`"
                )
            return child
        if isinstance(child, (list, tuple)) and len(child) == num_rows and not _holds_columns(child, num_rows):
            return child[start:stop]
        return _rebuild(child, cut)

    return cut(tree)


def empty_like(batch: Any, num_rows: int) -> Any:
    """Return a batch of ``num_rows`` rows without its rows, which keeps nothing of them in memory."""
    return map_tensors(torch.clone, slice_rows(batch, 0, 0, num_rows=num_rows))


def _holds_columns(items: list[Any] | tuple[Any, ...], num_rows: int) -> bool:
    """Whether a sequence that happens to be as long as the batch holds columns rather than one entry per row.

    Two rows of (inputs, labels) are two columns, though the sequence has one entry per row as well; so columns win
    where both readings fit.
    """
    return any(_is_column(item, num_rows) for item in items)


def _is_column(item: Any, num_rows: int) -> bool:
    if isinstance(item, (torch.Tensor, np.ndarray)):
        return item.ndim > 0 and item.shape[0] == num_rows
    if isinstance(item, Mapping):
        return any(_is_column(value, num_rows) for value in item.values())
    return isinstance(item, (list, tuple)) and (len(item) == num_rows or _holds_columns(item, num_rows))


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    """Add the tensors below ``tree``; several such walks a step would show if each built the tree anew."""
    kind = type(tree)
    if kind is tuple or kind is list:
        children = tree
    elif kind is dict:
        children = tree.values()
    else:
        # What is seldom met goes the one way that knows it.
        _rebuild(tree, lambda child: _note(child, found))
        return
    for child in children:
        _note(child, found)


def _note(child: Any, found: list[torch.Tensor]) -> Any:
    if isinstance(child, torch.Tensor):
        found.append(child)
    elif type(child) not in _PLAIN_LEAVES:
        _collect(child, found)
    return child


def _rebuild(tree: Any, fn: Callable[[Any], Any]) -> Any:
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
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(fn(item) for item in tree))
    if isinstance(tree, tuple) and hasattr(type(tree), "n_sequence_fields"):  # what torch.max(x, dim) returns
        return type(tree)([fn(item) for item in tree])
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changed = {field.name: fn(getattr(tree, field.name)) for field in dataclasses.fields(tree) if field.init}
        return dataclasses.replace(tree, **changed)
    return tree

"""Rows cut out of a collated batch: of its columns, and of its lists that have one entry per row.

A collate function may return anything, and nothing says which of its lists are columns (inputs, labels) and which hold
one entry per row (the boxes of each image). A list as long as the batch has rows can be either, and to take one for the
other would train on parts of the wrong rows. What tells is told by the entries, see ``_has_an_entry_per_row``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from rex_ray.core.errors import ConfigError
from rex_ray.worker.tree import children, map_tensors, moves_itself, rebuilt, tensors_in

__all__ = ["empty_like", "opaque_part", "slice_rows"]

_CUT_LAYOUTS = (torch.strided, torch.sparse_coo)


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
        ConfigError: ``strict``, and a tensor's first dimension is not ``num_rows``, or something cannot be cut.
    """
    return _Cut(tree, start, stop, num_rows, strict).of(tree, is_top=True)


def empty_like(batch: Any, num_rows: int) -> Any:
    """Return a batch of ``num_rows`` rows without its rows, which keeps nothing of them in memory.

    A batch that holds something that cannot be cut, or tensors whose rows are second, comes back whole: its parts
    still belong together then, and its rows stand for none, since they weigh nothing.
    """
    if opaque_part(batch) is not None or any(_rows_are_second(tensor, num_rows) for tensor in tensors_in(batch)):
        return batch
    return map_tensors(torch.clone, slice_rows(batch, 0, 0, num_rows=num_rows))


def opaque_part(tree: Any) -> str | None:
    """Return the type of something in the batch that holds tensors and cannot be cut into rows, or None."""
    if _is_opaque(tree):
        return type(tree).__name__
    return next((name for child in children(tree) if (name := opaque_part(child)) is not None), None)


class _Cut:
    """Rows of one batch.

    Args:
        batch: the whole batch.
        start: first row.
        stop: one past the last row.
        num_rows: rows of the batch.
        strict: refuse what is no column.
    """

    def __init__(self, batch: Any, start: int, stop: int, num_rows: int, strict: bool) -> None:
        self._start, self._stop = start, stop
        self._num_rows = num_rows
        self._strict = strict
        self._has_tensor_columns = any(
            isinstance(member, torch.Tensor) and _fits(member, num_rows) for member in children(batch)
        )

    def of(self, tree: Any, *, is_top: bool = False) -> Any:
        """Return the rows of a part of the batch, which is the batch itself where ``is_top``."""
        if _is_opaque(tree):
            if self._strict:
                raise ConfigError(
                    f"a batch of {self._num_rows} rows holds a {type(tree).__name__}, which cannot be cut into rows: "
                    "split such a batch yourself inside `with session.accumulate():`"
                )
            return tree
        if isinstance(tree, (torch.Tensor, np.ndarray)):
            return self._of_tensor(tree)
        if isinstance(tree, (list, tuple)) and len(tree) == self._num_rows and self._has_an_entry_per_row(tree, is_top):
            return tree[self._start : self._stop]
        return rebuilt(tree, self.of)

    def _of_tensor(self, tensor: Any) -> Any:
        if _fits(tensor, self._num_rows):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.sparse_coo:
                return tensor.index_select(0, torch.arange(self._start, self._stop, device=tensor.device))
            return tensor[self._start : self._stop]
        if self._strict and tensor.ndim > 0:
            raise ConfigError(
                f"a batch of {self._num_rows} rows holds a tensor of shape {tuple(tensor.shape)}, whose first "
                "dimension is not the rows: split such a batch yourself inside `with session.accumulate():`"
            )
        return tensor

    def _has_an_entry_per_row(self, items: list[Any] | tuple[Any, ...], is_top: bool) -> bool:
        """Whether a sequence as long as the batch has one entry per row, rather than being so many columns.

        Entries of one kind of which some could not be columns (boxes of each image, of which one image happens to
        have as many as the batch has rows) are one per row. Where all could, the batch itself is made of columns, as
        two rows of (inputs, labels) are, and a list within it only beside columns that are tensors: without any, as
        where images differ in size, everything has one entry per row. One row's list is seldom a single column.
        """
        fits = [_could_be_column(item, self._num_rows, is_top) for item in items]
        if True not in fits:
            return True
        if False in fits and len({_kind(item) for item in items}) == 1:
            return True
        return not is_top and (self._num_rows == 1 or not self._has_tensor_columns)


def _could_be_column(item: Any, num_rows: int, is_top: bool) -> bool | None:
    """Whether an entry could be a column; None: it says nothing, as a text or a number."""
    if isinstance(item, (torch.Tensor, np.ndarray)):
        return _fits(item, num_rows) if item.ndim > 0 else None
    if isinstance(item, Mapping):
        return _all(_could_be_column(value, num_rows, is_top) for value in item.values())
    if not isinstance(item, (list, tuple)):
        return None
    parts = _all(_could_be_column(part, num_rows, is_top) for part in item)
    if is_top and len(item) == num_rows:
        return True  # whatever it is made of, as in zip(*rows)
    if parts is not None:
        return parts or len(item) == num_rows
    # torch's own collate function makes tensors of numbers, and tuples of texts.
    return isinstance(item, tuple) and len(item) == num_rows and any(isinstance(part, (str, bytes)) for part in item)


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    """Return False where one is, else True where one is, else None."""
    known = [verdict for verdict in verdicts if verdict is not None]
    return all(known) if known else None


def _kind(item: Any) -> tuple[Any, ...]:
    if isinstance(item, (torch.Tensor, np.ndarray)):
        return type(item), item.dtype, item.ndim
    return (type(item),)


def _fits(tensor: Any, num_rows: int) -> bool:
    """Whether a tensor or array is a column of so many rows."""
    return not _is_opaque(tensor) and bool(tensor.ndim > 0 and tensor.shape[0] == num_rows)


def _rows_are_second(tensor: torch.Tensor, num_rows: int) -> bool:
    """Whether a tensor looks as if time came first, as recurrent networks have it."""
    return tensor.ndim > 1 and tensor.shape[0] != num_rows and tensor.shape[1] == num_rows


def _is_opaque(value: Any) -> bool:
    """Whether a value holds tensors by a rule of its own: a graph, a packed sequence, rows of unequal lengths."""
    if isinstance(value, torch.Tensor):
        return value.is_nested or value.layout not in _CUT_LAYOUTS
    if isinstance(value, PackedSequence):
        return True
    is_known = isinstance(value, (list, tuple, Mapping)) or dataclasses.is_dataclass(value)
    return not is_known and moves_itself(value)

"""Reads a shard that comes as batches of columns, as Ray Data's do. Knows the shape of the calls, and no Ray."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from rex_ray.core.errors import ConfigError
from rex_ray.worker.data.dataloader import num_processes
from rex_ray.worker.data.failures import Failure
from rex_ray.worker.data.requests import Request
from rex_ray.worker.data.row_reader import kept_rows
from rex_ray.worker.data.stream_reader import StreamBatch

__all__ = ["ColumnReader", "comes_in_columns"]

Columns: TypeAlias = dict[str, np.ndarray]

_SHARDS_OWN = ("prefetch_batches", "local_shuffle_buffer_size", "local_shuffle_seed")
_SHUFFLED_ROWS = 256


def comes_in_columns(dataset: object) -> bool:
    """Whether a data set is iterated by ``iter_batches(batch_size=, batch_format=)``."""
    return callable(getattr(dataset, "iter_batches", None))


class ColumnReader:
    """A shard that answers requests with whole batches, cut from whatever pieces it comes in.

    Args:
        dataset: the shard.
        collate: makes a batch of numpy columns by name; None: tensors by name.
        options: the user's; the shard's own are taken out.

    Raises:
        ConfigError: loader processes were asked for.
    """

    def __init__(self, dataset: Any, collate: Callable[[Columns], Any] | None, options: dict[str, Any]) -> None:
        if num_processes(options) > 0:
            raise ConfigError(
                f"num_workers={options['num_workers']} was given with a {type(dataset).__name__}, which is read by "
                "processes of its own already; leave it out, and set prefetch_batches to have it read further ahead"
            )
        self.dataset = dataset
        self._collate = _as_tensors if collate is None else collate
        self._options = {name: options.pop(name) for name in _SHARDS_OWN if name in options}
        self._pass: int | None = None
        self._pieces: Iterator[Mapping[str, np.ndarray]] = iter(())
        self._left: deque[Columns] = deque()
        self._num_read = 0

    def __getitems__(self, requests: Sequence[Request]) -> StreamBatch:
        """Answer one request."""
        (request,) = requests
        wanted = request.num_rows or 0
        try:
            if request.pass_number != self._pass:
                self._begin(request)
            columns, num_read = self._take(wanted)
        except Exception as error:  # noqa: BLE001 - the shard's; raised by name in the training loop
            what = f"the shard could not be read on after row {self._num_read} of this pass"
            return StreamBatch(None, 0, 0, 0, failure=Failure.of(what, error))
        try:
            batch = self._collate(columns) if num_read else None
        except Exception as error:  # noqa: BLE001 - the user's code
            what = f"rows {self._num_read} to {self._num_read + num_read - 1} of the shard could not be collated"
            return StreamBatch(None, 0, 0, 0, failure=Failure.of(what, error))
        self._num_read += num_read
        kept = kept_rows(batch, num_read)
        return StreamBatch(batch if kept else None, kept, num_read, 0, ended=num_read < wanted)

    def _begin(self, request: Request) -> None:
        self._pass = request.pass_number
        self._left.clear()
        self._num_read = 0
        shuffled = self._options.get("local_shuffle_buffer_size")
        # Whole blocks come as they are; a shuffle buffer wants to know how much to hand out.
        rows = None if shuffled is None else min(_SHUFFLED_ROWS, shuffled)
        self._pieces = iter(self.dataset.iter_batches(batch_size=rows, batch_format="numpy", **self._options))

    def _take(self, num_rows: int) -> tuple[Columns, int]:
        """Take up to so many rows off what was read, reading on where that is too little."""
        parts: list[Columns] = []
        missing = num_rows
        while missing:
            if not self._left:
                piece = next(self._pieces, None)
                if piece is None:
                    break
                self._left.append(dict(piece))
            piece = self._left.popleft()
            size = len(next(iter(piece.values()), ()))
            if not size:
                continue
            parts.append({name: column[:missing] for name, column in piece.items()})
            if size > missing:
                self._left.append({name: column[missing:] for name, column in piece.items()})
            missing -= min(size, missing)
        # Copies in any case: what lies in a shared object store must not be written to.
        columns = {name: np.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else ())}
        return columns, num_rows - missing


def _as_tensors(columns: Columns) -> dict[str, Any]:
    return {
        name: torch.from_numpy(column) if column.dtype.kind in "biufc" else column for name, column in columns.items()
    }

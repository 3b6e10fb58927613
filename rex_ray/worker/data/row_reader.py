"""Reads and collates a map-style data set's rows, in whichever process that happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.utils.data import default_collate

from rex_ray.worker.data.failures import Failure
from rex_ray.worker.data.sending import check_sendable
from rex_ray.worker.tree import tensors_in

__all__ = ["RowBatch", "RowReader", "kept_rows"]

_MOST_NAMED_ROWS = 8


class RowBatch(NamedTuple):
    """A collated batch, or why there is none. A named tuple, since torch pins what is in those."""

    batch: Any
    num_rows: int
    failure: Failure | None = None


class RowReader:
    """A map-style data set that answers with whole batches.

    It tells the data set its epoch. The epoch travels with each index, so persistent loader processes need no other
    channel, and a batch drawn before an epoch's end cannot see the next one's value.

    Args:
        dataset: the user's.
        collate: makes a batch of rows; None: torch's own.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None) -> None:
        self.dataset = dataset
        self._collate = default_collate if collate is None else collate
        self._tell_epoch: Callable[[int], object] | None = getattr(dataset, "set_epoch", None)
        self._fetch_all: Callable[[list[int]], list[Any]] | None = getattr(dataset, "__getitems__", None)
        self._epoch: int | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: Sequence[tuple[int, int]]) -> RowBatch:
        """Return the batch of these ``(epoch, row)`` pairs of one epoch."""
        rows = [row for _, row in indices]
        try:
            self._tell(indices[0][0])
        except Exception as error:  # noqa: BLE001 - the user's code; raised by name in the training process
            return RowBatch(None, 0, Failure.of(f"set_epoch({indices[0][0]}) failed", error))
        items: list[Any] = []
        try:
            if self._fetch_all is not None:
                items = self._fetch_all(rows)
            else:
                for row in rows:
                    items.append(self.dataset[row])
        except Exception as error:  # noqa: BLE001
            failed = _named(rows) if self._fetch_all is not None else f"row {rows[len(items)]}"
            return RowBatch(None, 0, Failure.of(f"{failed} could not be read", error))
        try:
            batch = self._collate(items)
        except Exception as error:  # noqa: BLE001
            return RowBatch(None, 0, Failure.of(f"{_named(rows)} could not be collated", error))
        try:
            check_sendable(batch)
        except Exception as error:  # noqa: BLE001
            return RowBatch(None, 0, Failure.of(f"the batch of {_named(rows)} cannot leave its loader process", error))
        return RowBatch(batch, kept_rows(batch, len(rows)))

    def _tell(self, epoch: int) -> None:
        if epoch != self._epoch and callable(self._tell_epoch):
            self._tell_epoch(epoch)
        self._epoch = epoch


def kept_rows(batch: Any, num_rows: int) -> int:
    """Return how many of ``num_rows`` rows a collated batch still holds, as far as its tensors tell.

    They tell where all agree on a smaller first dimension. Where time comes first instead, all of them have the rows
    second; and where tokens or nodes take the place of rows, those are more.
    """
    if batch is None:
        return 0
    # A nested tensor's rows have lengths of their own, and it may have no shape at all.
    shapes = [tensor.shape for tensor in tensors_in(batch) if tensor.dim() > 0 and not tensor.is_nested]
    if all(shape[0] == num_rows for shape in shapes):
        return num_rows
    leading = {shape[0] for shape in shapes}
    if len(leading) != 1 or all(len(shape) > 1 and shape[1] == num_rows for shape in shapes):
        return num_rows
    return min(leading.pop(), num_rows)


def _named(rows: Sequence[int]) -> str:
    shown = ", ".join(str(row) for row in rows[:_MOST_NAMED_ROWS])
    return (
        f"one of the rows {shown}{', ...' if len(rows) > _MOST_NAMED_ROWS else ''}" if len(rows) > 1 else f"row {shown}"
    )

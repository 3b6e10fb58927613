"""Reads rows off a stream and collates them, in whichever process that happens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import default_collate, get_worker_info

from rex_ray.worker.data.failures import Failure
from rex_ray.worker.data.requests import FIRST_PASS, Request
from rex_ray.worker.data.row_reader import kept_rows
from rex_ray.worker.data.sending import check_sendable

__all__ = ["Resumption", "StreamBatch", "StreamReader"]


class StreamBatch(NamedTuple):
    """What a request brought. A named tuple, since torch pins what is in those.

    Attributes:
        batch: the collated rows; None where there are none.
        num_rows: rows in it.
        num_read: rows taken off the stream for it; more where the collate function left some out.
        process: number of the loader process, 0 without.
        void: no rows were asked for.
        ended: the stream has no more.
        state: the data set's after these rows; None where it has none.
        failure: why there are no rows.
    """

    batch: Any
    num_rows: int
    num_read: int
    process: int
    void: bool = False
    ended: bool = False
    state: Any = None
    failure: Failure | None = None


class Resumption(NamedTuple):
    """Where one process's stream goes on: by its own state, or by leaving out the rows that were consumed."""

    num_rows: int
    state: Any


class StreamReader:
    """An iterable data set that answers requests with whole batches. Each loader process has one, with a stream.

    Args:
        dataset: the user's; may have ``set_epoch``, and ``state_dict`` with ``load_state_dict``.
        collate: makes a batch of rows; None: torch's own.
        resumptions: by loader process, where its stream goes on in the first pass.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any] | None,
        resumptions: Mapping[int, Resumption],
    ) -> None:
        self.dataset = dataset
        self._collate = default_collate if collate is None else collate
        self._resumptions = dict(resumptions)
        self._stateful = has_state(dataset)
        self._pass: int | None = None
        self._rows: Iterator[Any] = iter(())
        self._num_read = 0

    def __getitems__(self, requests: Sequence[Request]) -> StreamBatch:
        """Answer one request."""
        (request,) = requests
        info = get_worker_info()
        process = 0 if info is None else info.id
        rows: list[Any] = []
        what = "the stream could not be begun"
        try:
            if request.pass_number != self._pass:
                self._begin(request, process)
            if request.num_rows is None:
                return StreamBatch(None, 0, 0, process, void=True)
            what = ""
            rows.extend(islice(self._rows, request.num_rows))
        except Exception as error:  # noqa: BLE001 - the user's code; raised by name in the training process
            what = what or f"row {self._num_read + len(rows)} of this pass over the stream could not be read"
            return StreamBatch(None, 0, len(rows), process, failure=Failure.of(what, error))
        self._num_read += len(rows)
        ended = len(rows) < request.num_rows
        try:
            batch = self._collate(rows) if rows else None
            state = copy.deepcopy(self.dataset.state_dict()) if self._stateful else None
        except Exception as error:  # noqa: BLE001
            what = f"rows {self._num_read - len(rows)} to {self._num_read - 1} of the stream could not be collated"
            return StreamBatch(None, 0, len(rows), process, failure=Failure.of(what, error))
        try:
            check_sendable((batch, state))
        except Exception as error:  # noqa: BLE001
            what = (
                f"the batch of rows {self._num_read - len(rows)} to {self._num_read - 1} of the stream, or its state, "
                "cannot leave its loader process"
            )
            return StreamBatch(None, 0, len(rows), process, failure=Failure.of(what, error))
        kept = kept_rows(batch, len(rows))
        return StreamBatch(batch if kept else None, kept, len(rows), process, ended=ended, state=state)

    def _begin(self, request: Request, process: int) -> None:
        # By its number: a process that begins anew for a later pass has a copy of them, too.
        resumed = self._resumptions.get(process) if request.pass_number == FIRST_PASS else None
        self._pass = request.pass_number
        self._num_read = 0
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(request.epoch)
        by_state = resumed is not None and resumed.state is not None and self._stateful
        if resumed is not None and by_state:
            self.dataset.load_state_dict(resumed.state)
        self._rows = iter(self.dataset)
        if resumed is not None:
            self._num_read = resumed.num_rows
            if not by_state:
                next(islice(self._rows, resumed.num_rows, resumed.num_rows), None)


def has_state(dataset: object) -> bool:
    """Whether a data set can say where it is, and go there."""
    return callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))

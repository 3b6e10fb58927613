"""One rank's own rows: batch after batch off its stream, whichever loader processes read it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from rex_ray.worker.data.dataloader import num_processes
from rex_ray.worker.data.failures import handed_out_nothing
from rex_ray.worker.data.loader_processes import LoaderProcesses
from rex_ray.worker.data.requests import ShareRequests
from rex_ray.worker.data.schedule import Schedule
from rex_ray.worker.data.stream_marks import StreamMark
from rex_ray.worker.data.stream_reader import StreamBatch

__all__ = ["StreamRows"]

_log = logging.getLogger("rex_ray")


class StreamRows:
    """Reads this rank's share of each step, pass after pass.

    Args:
        reader: answers requests with batches; keeps the user's data set as ``dataset``.
        rank: this rank.
        schedule: allocations by step.
        tell: has the journal told of what was dealt with: a kind, and a sentence.
        options: the user's DataLoader options, without ``collate_fn``.

    Attributes:
        dataset: the user's data set.
    """

    def __init__(
        self, reader: Any, rank: int, schedule: Schedule, tell: Callable[[str, str], None], options: dict[str, Any]
    ) -> None:
        self.dataset = reader.dataset
        self._rank = rank
        self._tell = tell
        self._warned = False
        self._num_processes = max(num_processes(options), 1)
        self._requests = ShareRequests(rank, schedule)
        self._processes = LoaderProcesses(reader, self._requests, options, rank)
        self._batches: Iterator[StreamBatch] = iter(())
        self._ended: set[int] = set()

    @property
    def start(self) -> StreamMark:
        """The mark at which a pass begins."""
        return StreamMark.start(self._num_processes)

    @property
    def next_step(self) -> int:
        """The first step that no rows were asked for."""
        return self._requests.next_step

    @property
    def have_ended(self) -> bool:
        """Whether no loader process has a row left."""
        return len(self._ended) == self._num_processes

    def begin(self, epoch: int, step: int, mark: StreamMark) -> None:
        """Begin a pass of ``epoch`` at ``step``, with the process whose turn it is at ``mark``."""
        self._ended = set()
        self._requests.begin(epoch, step, num_void=mark.turn)
        self._batches = iter(())  # processes that are no longer wanted end before others begin
        self._batches = self._processes.begin()

    def read(self, step: int, mark: StreamMark) -> tuple[StreamBatch, StreamMark]:
        """Return the rows of ``step``, and the mark behind them; a failure is a value, too."""
        fetched, mark = self._fetch(mark)
        if not self._warned and fetched.failure is None and fetched.num_read > fetched.num_rows:
            self._warned = True
            message = (
                f"rank {self._rank}, step {step}: collate_fn was given {fetched.num_read} rows and returned a batch of "
                f"{fetched.num_rows}; ranks are weighted by the rows that are there, and no others are trained on"
            )
            _log.warning("%s", message)
            self._tell("rows_left_out", message)
        return fetched, mark

    def read_anew(self) -> None:
        """The rows that were read made no step: the next ones are for the same."""
        self._requests.take_back()

    def at_least_one(self) -> None:
        """Ask for a row also where the share is none, up to the pass's end."""
        self._requests.fewest = 1

    def stop(self) -> None:
        """Let go of the loader processes."""
        self._batches = iter(())
        self._processes.stop()

    def _fetch(self, mark: StreamMark) -> tuple[StreamBatch, StreamMark]:
        while not self.have_ended:
            try:
                fetched = next(self._batches)
            except Exception as error:  # noqa: BLE001 - a value, so that the other ranks hear of it
                return StreamBatch(None, 0, 0, 0, failure=handed_out_nothing(error)), mark
            if fetched.void:
                continue
            mark = mark.after(fetched)
            if fetched.ended:
                self._ended.add(fetched.process)
            # Loader processes take turns, and one whose stream is over leaves its turn to the others.
            if fetched.num_rows or fetched.failure is not None or not fetched.ended:
                return fetched, mark
            self._requests.take_back()
        return StreamBatch(None, 0, 0, 0, ended=True), mark

"""What a rank asks of its stream: its share of each step, batch after batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rex_ray.worker.data.schedule import Schedule

__all__ = ["FIRST_PASS", "Request", "ShareRequests"]

FIRST_PASS = 1


class Request(NamedTuple):
    """One batch asked of a stream.

    Attributes:
        pass_number: which pass over the stream; a new one begins it anew.
        epoch: told to the data set.
        num_rows: rows of it; None: none are wanted, this only takes the turn of a loader process.
    """

    pass_number: int
    epoch: int
    num_rows: int | None


class ShareRequests:
    """Requests in step order, each for the share that is in force at its step. They do not end by themselves.

    Args:
        rank: whose share.
        schedule: allocations by step.
    """

    def __init__(self, rank: int, schedule: Schedule) -> None:
        self._rank = rank
        self._schedule = schedule
        self._pass = FIRST_PASS - 1
        self._epoch = 0
        self._num_void = 0
        self.next_step = 0
        self.fewest = 0

    def begin(self, epoch: int, step: int, num_void: int) -> None:
        """Begin a pass.

        Args:
            epoch: the pass's.
            step: its first step.
            num_void: empty requests before that, so that the first one meets the loader process whose turn it is.
        """
        self._pass += 1
        self._epoch, self.next_step, self._num_void = epoch, step, num_void
        self.fewest = 0

    def take_back(self) -> None:
        """A request that brought no row did not serve its step: the next one does."""
        self.next_step -= 1

    def __iter__(self) -> Iterator[list[Request]]:
        """Yield one request per batch until another pass begins."""
        this_pass = self._pass
        for _ in range(self._num_void):
            yield [Request(this_pass, self._epoch, None)]
        # An iterator of an earlier pass must not ask: a DataLoader may hold on to it for a while.
        while self._pass == this_pass:
            share = self._schedule.at(self.next_step).local_batch_sizes[self._rank]
            self.next_step += 1
            yield [Request(this_pass, self._epoch, max(share, self.fewest))]

"""Batches of streams: every rank brings rows of its own, of a number that nobody knows.

A rank reads its share of a step one step ahead, and tells the others how many rows it found. So the weights of a step
follow the rows that are really there, a stream that ends is known before it is missed, and a stream that fails ends
training on all ranks at one step instead of leaving the others in a collective.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rex_ray.core.errors import DataError
from rex_ray.worker.data.counts import Count, StepCounts, StreamEnd
from rex_ray.worker.data.sampler import Plan, Position
from rex_ray.worker.data.schedule import Schedule
from rex_ray.worker.data.source import Drawn
from rex_ray.worker.data.stream_end import UnknownLengthError, WhenToEnd, account, is_over
from rex_ray.worker.data.stream_likeness import alike_in_words, first_rows_digest
from rex_ray.worker.data.stream_marks import StreamMark
from rex_ray.worker.data.stream_reader import StreamBatch
from rex_ray.worker.data.stream_rows import StreamRows
from rex_ray.worker.measuring.timing import now_s
from rex_ray.worker.row_cutting import empty_like

__all__ = ["StreamSource", "Streams"]

_log = logging.getLogger("rex_ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """What ranks agree on about their streams when the loader is made.

    Attributes:
        rank: this rank.
        lengths: rows of each rank's stream by its own ``__len__``; None where it has none. For the log only.
        end: an epoch ends with the last stream, or with the first.
        schedule: allocations by step.
        counts: tells the ranks each other's rows.
        gather: returns every rank's plain value, for a save.
        tell: has the journal told of what was dealt with: a kind, and a sentence.
    """

    rank: int
    lengths: tuple[int | None, ...]
    end: WhenToEnd
    schedule: Schedule
    counts: StepCounts
    gather: Callable[[Any, str], list[Any]]
    tell: Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class _Read:
    """A batch that was read and is not handed out."""

    fetched: StreamBatch
    mark: StreamMark


@dataclass(frozen=True, slots=True)
class _Held:
    """The batch that the loop holds, and the marks before and behind it."""

    drawn: Drawn
    before: StreamMark
    after: StreamMark
    rows_before: tuple[int, ...]


class StreamSource:
    """Draws this rank's share of each step from its own stream.

    Args:
        reader: answers requests with batches; keeps the user's data set as ``dataset``.
        streams: what the ranks agree on.
        options: the user's DataLoader options, without ``collate_fn``.
        resumed: every rank's rows and this rank's mark, where the first pass goes on in the middle of an epoch.
    """

    def __init__(
        self,
        reader: Any,
        streams: Streams,
        options: dict[str, Any],
        resumed: tuple[tuple[int, ...], StreamMark] | None = None,
    ) -> None:
        self.dataset = reader.dataset
        self._streams = streams
        self._counts = streams.counts
        self._resumed = resumed
        self._own = StreamRows(reader, streams.rank, streams.schedule, streams.tell, options)
        self._epoch: int | None = None
        self._complete: int | None = None
        self._next = Position()
        self._read: _Read | None = None
        self._held: _Held | None = None
        self._again = False
        self._has_read = False
        self._mark = self._own.start
        self._rows: tuple[int, ...] = ()
        self._form: Any = None

    @property
    def next_undrawn(self) -> int:
        """See ``Source``."""
        return self._own.next_step

    def num_reference_steps(self, reference_batch: int) -> int:
        """Nobody knows.

        Raises:
            ConfigError: always.
        """
        del reference_batch
        raise UnknownLengthError(
            f"len(loader) is not known: session.loader was given a stream ({type(self.dataset).__name__}), whose rows "
            "nobody has counted. Give a schedule its number of steps yourself (rows you expect / global_batch_size), "
            "or step it once per epoch"
        )

    def rewind(self, position: Position) -> None:
        """Go on in the position's epoch, from the batch that was handed out and not used if there is one."""
        if position.epoch == self._epoch:
            self._again = self._held is not None and position.step == self._held.drawn.plan.step
            return
        self._begin(position)

    def draw(self) -> Drawn | None:
        """See ``Source``."""
        if self._again and self._held is not None:
            self._again = False
            return self._held.drawn
        if self._complete == self._epoch:
            return None
        peers_s = 0.0
        while True:
            read = self._read or self._read_ahead(self._next.step)
            asked_s = now_s()
            counts = self._counts.read()
            self._stop_if_failed(counts, read.fetched)
            self._tell_if_alike(counts)
            over = is_over(counts, self._streams.end)
            if not over and any(count.formless for count in counts) and any(count.num_rows for count in counts):
                self._form = self._counts.share_form(self._form)
            peers_s += now_s() - asked_s
            if over:
                self._finish(counts)
                return None
            if any(count.end is StreamEnd.ENDED for count in counts):
                # Whoever is left must not be given 0 rows for ever.
                self._own.at_least_one()
            plan = self._plan(counts)
            self._read = None
            before, self._mark = self._mark, read.mark
            rows_before, self._rows = self._rows, tuple(map(sum, zip(self._rows, plan.num_rows, strict=True)))
            if plan.total_rows:
                self._next = plan.after
            else:  # all of them were left out
                self._own.read_anew()
            self._read_ahead(self._next.step)
            if plan.total_rows:
                break
        batch = self._form if read.fetched.batch is None else read.fetched.batch
        drawn = Drawn(plan=plan, batch=batch, peers_s=peers_s)
        self._held = _Held(drawn, before, read.mark, rows_before)
        return drawn

    def is_complete(self, position: Position) -> bool:
        """Whether the position's epoch was read to its end."""
        return self._complete == position.epoch

    def save(self, position: Position) -> dict[str, Any] | None:
        """Return every rank's place in its stream, None between two epochs. Collective."""
        if self.is_complete(position) or position.cursor == 0:
            return None
        mark, rows = self._mark, self._rows
        if self._resumed is not None:  # no pass has begun since
            rows, mark = self._resumed
        elif self._held is not None and position.step == self._held.drawn.plan.step:
            mark, rows = self._held.before, self._held.rows_before
        ranks = self._streams.gather(mark.to_plain(), "every rank's place in its stream")
        return {"rows": list(rows), "ranks": ranks}

    def stop(self) -> None:
        """See ``Source``."""
        self._own.stop()
        self._read = self._held = None

    def close(self, timeout_s: float) -> None:
        """See ``Source``."""
        self._counts.close(timeout_s)

    # --- inside

    def _begin(self, position: Position) -> None:
        self._counts.forget()
        num_ranks = len(self._streams.lengths)
        rows, mark = self._resumed or ((0,) * num_ranks, self._own.start)
        self._resumed = None
        self._epoch, self._next = position.epoch, position
        self._rows, self._mark = rows, mark
        self._read = self._held = None
        self._again = False
        self._own.begin(position.epoch, position.step, mark)

    def _read_ahead(self, step: int) -> _Read:
        """Read the rows of ``step``, and tell the others of them."""
        fetched, mark = self._own.read(step, self._mark if self._read is None else self._read.mark)
        if fetched.batch is not None and self._form is None:
            self._form = empty_like(fetched.batch, fetched.num_rows)
        end = StreamEnd.OPEN
        if fetched.failure is not None:
            end = StreamEnd.FAILED
        elif self._own.have_ended:
            end = StreamEnd.ENDED
        assert self._epoch is not None
        first_rows = 0 if self._has_read else first_rows_digest(fetched.batch, fetched.num_rows)
        self._has_read = True
        self._counts.tell(
            Count(
                epoch=self._epoch,
                step=step,
                num_rows=fetched.num_rows,
                end=end,
                formless=self._form is None,
                first_rows=first_rows,
            )
        )
        self._read = _Read(fetched, mark)
        return self._read

    def _plan(self, counts: Sequence[Count]) -> Plan:
        return Plan(
            step=self._next.step,
            epoch=self._next.epoch,
            cursor=self._next.cursor,
            allocation=self._streams.schedule.at(self._next.step),
            num_rows=tuple(count.num_rows for count in counts),
        )

    def _stop_if_failed(self, counts: Sequence[Count], own: StreamBatch) -> None:
        failed = [rank for rank, count in enumerate(counts) if count.end is StreamEnd.FAILED]
        if not failed:
            return
        place = counts[0]
        if own.failure is not None:
            raise own.failure.to_error(rank=self._streams.rank, epoch=place.epoch, step=place.step)
        raise DataError(
            f"rank {self._streams.rank}, epoch {place.epoch}, step {place.step}: training stops, because the stream of "
            f"rank {', '.join(map(str, failed))} failed; its own error says why"
        )

    def _tell_if_alike(self, counts: Sequence[Count]) -> None:
        if self._streams.rank:
            return
        alike = alike_in_words([count.first_rows for count in counts])
        if alike is not None:
            _log.warning("%s", alike)
            self._streams.tell("streams_alike", alike)

    def _finish(self, counts: Sequence[Count]) -> None:
        self._complete = self._epoch
        self._read = self._held = None
        if self._streams.rank == 0:
            told = account(self._rows, counts, self._streams.lengths)
            _log.info("epoch %s ends before step %d: %s", self._epoch, self._next.step, told)

"""A worker's end of the control plane in Ray: records out through the Queue, allocations in by actor calls.

Two threads keep Ray away from the training loop: a *pump* that feeds the Queue and, on rank 0, a *poller* that asks
the control actor. What the loop itself pays is an append to a deque and a look at a field. If the Queue dies, records
are dropped and counted; if the actor does, the last allocation stays in force; training goes on in both cases.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.queue import Queue

from rex_ray.core.types import Allocation
from rex_ray.hosting.listener import Listener
from rex_ray.hosting.outbox import Outbox
from rex_ray.hosting.wire import encode
from rex_ray.worker.link import GroupInfo, Record, SaveRequest

__all__ = ["POLL_LIMIT_S", "Poller", "Pump", "first_line", "pump_interval_s"]

logger = logging.getLogger("rex_ray")

POLL_LIMIT_S = 10.0
"""The control actor answers a poll within this time, with news or without."""

_LEAST_INTERVAL_S = 0.1
_FIRST_BACK_OFF_S, _LAST_BACK_OFF_S = 0.5, 8.0
_SLICE_S = 0.5


def pump_interval_s(world_size: int) -> float:
    """Seconds between two puts of a worker: the Queue and the control actor see at most some 2,000 puts a second."""
    return max(0.25, 0.0005 * world_size)


class Pump:
    """Moves records to the Queue from a thread of its own, a batch per interval.

    A put is sent and not waited for; how it fared is looked up at the next one.

    Args:
        queue: the run's queue.
        rank: whose records these are.
        interval_s: seconds between two puts; 16 waiting records shorten it, but not below 0.1 s.
    """

    def __init__(self, queue: Queue, rank: int, interval_s: float) -> None:
        self._queue = queue
        self._rank = rank
        self._interval_s = interval_s
        self._outbox = Outbox()
        self._in_flight: deque[tuple[Any, int]] = deque()
        self._early = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rex_ray-pump", daemon=True)

    @property
    def num_dropped(self) -> int:
        """Records that never reached the Queue."""
        return self._outbox.num_dropped

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, records: Sequence[Record]) -> None:
        """Take records; never waits. When too many wait already, the oldest are dropped."""
        if self._outbox.put(records):
            self._early.set()

    def stop(self, timeout_s: float) -> None:
        """Send what waits, see it arrive within the limit, and end the thread."""
        deadline = time.monotonic() + timeout_s
        self._stopping.set()
        self._early.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        references = [reference for reference, _ in self._in_flight]
        if references and ray.is_initialized():
            ray.wait(references, num_returns=len(references), timeout=max(deadline - time.monotonic(), 0.0))

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._early.wait(self._interval_s)
            self._early.clear()
            self._send()
            self._stopping.wait(_LEAST_INTERVAL_S)
        self._send(is_last=True)

    def _send(self, *, is_last: bool = False) -> None:
        self._settle()
        records = self._outbox.take(time.monotonic(), is_last=is_last)
        if records:
            batch = encode(self._rank, records, self._outbox.num_dropped)
            # Queue.put_nowait would wait for the answer.
            self._in_flight.append((self._queue.actor.put_nowait.remote(batch), len(records)))

    def _settle(self) -> None:
        """See how the puts under way fared."""
        while self._in_flight:
            reference, num_records = self._in_flight[0]
            if not ray.wait([reference], timeout=0)[0]:
                return
            self._in_flight.popleft()
            try:
                ray.get(reference)
            except RayError as error:
                if self._outbox.failed(num_records, time.monotonic()):
                    logger.warning(
                        "rank %d: the telemetry queue takes no records (%s); training goes on, unobserved",
                        self._rank,
                        first_line(error),
                    )
            else:
                if self._outbox.arrived():
                    logger.warning("rank %d: the telemetry queue takes records again", self._rank)


class Poller:
    """Asks the control actor for news, in a thread of its own; only rank 0 has one.

    Args:
        control: handle of the control actor.
        group: the group that asks.
        known: the allocation that the group joined with; None if nobody answered then, so that this goes on trying.
    """

    def __init__(self, control: Any, group: GroupInfo, known: Allocation | None) -> None:
        self._control = control
        self._group = group
        self._listener = Listener(known)
        self._is_broken = known is None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rex_ray-poller", daemon=True)

    @property
    def newest(self) -> Allocation | None:
        """The newest allocation that was published, or None; a read of a field."""
        return self._listener.newest

    @property
    def save(self) -> SaveRequest | None:
        """The newest request for a save, or None; a read of a field."""
        return self._listener.save

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread; a poll under way is left to itself."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        back_off_s = _FIRST_BACK_OFF_S
        while not self._stopping.is_set():
            try:
                news = self._poll()
            except RayError as error:
                self._tell_broken(error)
                self._stopping.wait(back_off_s)
                back_off_s = min(2 * back_off_s, _LAST_BACK_OFF_S)
                continue
            if self._stopping.is_set():
                return
            if self._is_broken:
                self._is_broken = False
                logger.warning("the control actor answers again")
            back_off_s = _FIRST_BACK_OFF_S
            self._listener.hear(news)

    def _poll(self) -> Allocation | SaveRequest | None:
        """Ask once, in slices, so that a stop is heard.

        Raises:
            RayError: the actor is gone, failed, or did not answer within twice its own limit.
        """
        known_version = self._listener.known_version
        if known_version is None:
            reference = self._control.join.remote(self._group)
        else:
            reference = self._control.latest.remote(self._group.generation, known_version, self._listener.known_save)
        deadline = time.monotonic() + 2 * POLL_LIMIT_S
        while not self._stopping.is_set():
            if ray.wait([reference], timeout=_SLICE_S)[0]:
                news: Allocation | SaveRequest | None = ray.get(reference)
                return news
            if time.monotonic() >= deadline:
                raise GetTimeoutError(f"no answer within {2 * POLL_LIMIT_S:g} s")
        return None

    def _tell_broken(self, error: RayError) -> None:
        if not self._is_broken:
            self._is_broken = True
            logger.warning(
                "the control actor does not answer (%s); training goes on under the last allocation", first_line(error)
            )


def first_line(error: Exception) -> str:
    """Return what an error says in one line; an error inside an actor's method is its cause."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    text = str(cause).strip() or type(cause).__name__
    return text.splitlines()[0]

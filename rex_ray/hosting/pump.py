"""Moves a worker's records to the controller from a thread of its own: what the loop pays is an append to a deque."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from rex_ray.core.errors import LinkError, first_line
from rex_ray.hosting.outbox import Outbox
from rex_ray.hosting.transport import Pending, Transport
from rex_ray.hosting.wire import encode
from rex_ray.worker.link import Record

__all__ = ["Pump", "pump_interval_s"]

logger = logging.getLogger("rex_ray")

_LEAST_INTERVAL_S = 0.1


def pump_interval_s(world_size: int) -> float:
    """Seconds between two batches of a worker: the controller's end sees at most some 2,000 batches a second."""
    return max(0.25, 0.0005 * world_size)


class Pump:
    """Sends records, a batch per interval. A batch is sent and not waited for; how it fared is looked up at the next.

    Args:
        transport: carries batches.
        rank: whose records these are.
        interval_s: seconds between two batches; 16 waiting records shorten it, but not below 0.1 s.
    """

    def __init__(self, transport: Transport, rank: int, interval_s: float) -> None:
        self._transport = transport
        self._rank = rank
        self._interval_s = interval_s
        self._outbox = Outbox()
        self._in_flight: deque[tuple[Pending[None], int]] = deque()
        self._early = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rex_ray-pump", daemon=True)

    @property
    def num_dropped(self) -> int:
        """Records that never arrived."""
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
        for pending, _ in tuple(self._in_flight):
            with contextlib.suppress(LinkError):
                pending.arrived(max(deadline - time.monotonic(), 0.0))

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
            self._in_flight.append((self._transport.put(batch), len(records)))

    def _settle(self) -> None:
        """See how the batches under way fared."""
        while self._in_flight:
            pending, num_records = self._in_flight[0]
            if not pending.arrived(0.0):
                return
            self._in_flight.popleft()
            try:
                pending.result()
            except LinkError as error:
                if self._outbox.failed(num_records, time.monotonic()):
                    logger.warning(
                        "rank %d: the telemetry queue takes no records (%s); training goes on, unobserved",
                        self._rank,
                        first_line(error),
                    )
            else:
                if self._outbox.arrived():
                    logger.warning("rank %d: the telemetry queue takes records again", self._rank)

"""A worker's connection to the controller, whoever carries it: pump and poller of its rank, and how a group joins."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

from rex_ray.core.errors import LinkError
from rex_ray.core.types import Allocation
from rex_ray.hosting.poller import Poller
from rex_ray.hosting.pump import Pump, pump_interval_s
from rex_ray.hosting.transport import Transport, UnreachableError
from rex_ray.worker.link import GroupInfo, Record, SaveRequest

__all__ = ["CarriedLink"]

_RETRY_S = 0.5
_LEAST_STOP_S = 1.0
_STATUS_LIMIT_S = 5.0


class CarriedLink:
    """One rank's connection to the controller; a ``rex_ray.worker.link.ControlLink``.

    Args:
        transport: carries its messages; closed with the link.
        rank: this worker's rank.
        world_size: number of workers.
    """

    def __init__(self, transport: Transport, rank: int, world_size: int) -> None:
        self._transport = transport
        self._pump = Pump(transport, rank, pump_interval_s(world_size))
        self._poller: Poller | None = None
        self._row_limits: Mapping[str, int] = {}

    def started(self, generation: str) -> None:
        """Start to carry records."""
        del generation  # records bear it themselves
        self._pump.start()

    def join(self, group: GroupInfo, timeout_s: float) -> Allocation:
        """Announce the group, ask again while the controller's process restarts, and start to listen for news.

        Raises:
            LinkError: no answer within the limit, or the controller failed.
            InfeasibleError: no allocation fits the group's bounds.
        """
        try:
            first = self._ask_to_join(group, time.monotonic() + timeout_s)
        except LinkError:
            self._listen(group, None)
            raise
        self._hear_row_limits()
        self._listen(group, first)
        return first

    def send(self, records: Sequence[Record]) -> None:
        """Take records along; never waits."""
        self._pump.put(records)

    def latest(self) -> Allocation | None:
        """Return the newest allocation that was published since the group joined; never waits."""
        return None if self._poller is None else self._poller.newest

    def save_request(self) -> SaveRequest | None:
        """Return the newest request for a save; never waits."""
        return None if self._poller is None else self._poller.save

    def row_limits(self) -> Mapping[str, int]:
        """Return what the controller had learnt of memories when the group joined; never waits."""
        return self._row_limits

    def close(self, timeout_s: float) -> None:
        """Send what waits and stop both threads, within the limit."""
        deadline = time.monotonic() + timeout_s
        self._pump.stop(timeout_s)
        if self._poller is not None:
            self._poller.stop(max(deadline - time.monotonic(), _LEAST_STOP_S))
        self._transport.close()

    def _ask_to_join(self, group: GroupInfo, deadline: float) -> Allocation:
        while True:
            try:
                return self._transport.join(group).result(max(deadline - time.monotonic(), 0.0))
            except UnreachableError as error:
                if time.monotonic() + _RETRY_S >= deadline:
                    raise LinkError(f"rank 0 waited for the controller: {error}") from error
                time.sleep(_RETRY_S)

    def _hear_row_limits(self) -> None:
        """Learn what to save of earlier groups' memories; a save without it costs no more than a restart."""
        with contextlib.suppress(LinkError):
            self._row_limits = self._transport.row_limits().result(_STATUS_LIMIT_S)

    def _listen(self, group: GroupInfo, known: Allocation | None) -> None:
        self._poller = Poller(self._transport, group, known)
        self._poller.start()

"""A worker's connection to the control actor: the pump and the poller of its rank, and how a group joins."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.queue import Queue

from rex_ray.core.errors import InfeasibleError, LinkError
from rex_ray.core.types import Allocation
from rex_ray.train.telemetry import Poller, Pump, first_line, pump_interval_s
from rex_ray.worker.link import GroupInfo, Record, SaveRequest

__all__ = ["RayLink"]

_RETRY_S = 0.5
_LEAST_STOP_S = 1.0
_STATUS_LIMIT_S = 5.0


class RayLink:
    """One rank's connection to the controller, over Ray; a ``rex_ray.worker.link.ControlLink``.

    Args:
        control: handle of the control actor.
        queue: the run's telemetry queue.
        rank: this worker's rank.
        world_size: number of workers.
    """

    def __init__(self, control: Any, queue: Queue, rank: int, world_size: int) -> None:
        self._control = control
        self._pump = Pump(queue, rank, pump_interval_s(world_size))
        self._poller: Poller | None = None
        self._row_limits: Mapping[str, int] = {}

    def started(self, generation: str) -> None:
        """Start to carry records."""
        del generation  # records bear it themselves
        self._pump.start()

    def join(self, group: GroupInfo, timeout_s: float) -> Allocation:
        """Announce the group, ask again while the control actor restarts, and start to listen for news.

        Raises:
            LinkError: no answer within the limit, or the controller failed.
            InfeasibleError: no allocation fits the group's bounds.
        """
        try:
            first = self._ask_to_join(group, time.monotonic() + timeout_s)
        except LinkError:
            self._listen(group, None)
            raise
        self._listen(group, first)
        self._hear_row_limits()
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

    def _ask_to_join(self, group: GroupInfo, deadline: float) -> Allocation:
        while True:
            try:
                left_s = max(deadline - time.monotonic(), 0.0)
                first: Allocation = ray.get(self._control.join.remote(group), timeout=left_s)
            except GetTimeoutError:
                raise LinkError("rank 0 waited for the control actor, which did not answer in time") from None
            except RayTaskError as error:
                if isinstance(error.cause, InfeasibleError):
                    raise error.cause from None
                raise LinkError(f"the control actor could not take the group: {first_line(error)}") from error
            except RayActorError as error:
                if time.monotonic() + _RETRY_S >= deadline:
                    raise LinkError(f"rank 0 waited for the control actor: {first_line(error)}") from error
                time.sleep(_RETRY_S)
            else:
                return first

    def _hear_row_limits(self) -> None:
        """Learn what to save of earlier groups' memories; a save without it costs no more than a restart."""
        with contextlib.suppress(RayError):
            self._row_limits = ray.get(self._control.status.remote(), timeout=_STATUS_LIMIT_S).row_limits

    def _listen(self, group: GroupInfo, known: Allocation | None) -> None:
        self._poller = Poller(self._control, group, known)
        self._poller.start()

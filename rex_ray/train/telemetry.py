"""A worker's messages over Ray: records out through the Queue, allocations in by actor calls.

If the Queue dies, records are dropped and counted; if the actor does, the last allocation stays in force; training
goes on in both cases.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.queue import Queue

from rex_ray.core import errors
from rex_ray.core.errors import InfeasibleError, LinkError
from rex_ray.core.types import Allocation
from rex_ray.hosting.control_status import ControlStatus
from rex_ray.hosting.transport import Pending, UnreachableError
from rex_ray.hosting.wire import Batch
from rex_ray.worker.link import GroupInfo, SaveRequest

__all__ = ["RayTransport", "first_line"]

_Answer = TypeVar("_Answer")


class RayTransport:
    """Carries one rank's messages over Ray; a ``rex_ray.hosting.transport.Transport``.

    Args:
        queue: the run's telemetry queue.
        control: handle of the control actor; None: records only.
    """

    def __init__(self, queue: Queue, control: Any = None) -> None:
        self._queue = queue
        self._control = control

    def put(self, batch: Batch) -> Pending[None]:
        """Send records: ``Queue.put_nowait`` would wait for the answer."""
        return _Reference(self._queue.actor.put_nowait.remote(batch), _as_it_is)

    def join(self, group: GroupInfo) -> Pending[Allocation]:
        """Announce a group."""
        return _Reference(self._control.join.remote(group), _as_it_is)

    def latest(self, generation: str, version: int, save_number: int) -> Pending[Allocation | SaveRequest | None]:
        """Ask for news."""
        return _Reference(self._control.latest.remote(generation, version, save_number), _as_it_is)

    def row_limits(self) -> Pending[Mapping[str, int]]:
        """Ask for the most rows that kinds of device are given."""
        return _Reference(self._control.status.remote(), _row_limits)

    def close(self) -> None:
        """Nothing is held; the actors are the driver's."""


class _Reference(Generic[_Answer]):
    """Ray's reference to an answer.

    Args:
        reference: Ray's.
        read: makes the answer of what Ray returns.
    """

    def __init__(self, reference: Any, read: Callable[[Any], _Answer]) -> None:
        self._reference = reference
        self._read = read

    def arrived(self, limit_s: float) -> bool:
        """Whether Ray has it; without a cluster nothing arrives any more."""
        return ray.is_initialized() and bool(ray.wait([self._reference], timeout=limit_s)[0])

    def result(self, limit_s: float = 0.0) -> _Answer:
        """Return it."""
        began_s = time.monotonic()
        try:
            return self._read(ray.get(self._reference, timeout=limit_s))
        except GetTimeoutError:
            waited_s = time.monotonic() - began_s
            raise LinkError(f"the control actor did not answer within {waited_s:.1f} s") from None
        except RayTaskError as error:
            if isinstance(error.cause, InfeasibleError):
                raise error.cause from None
            raise LinkError(f"the control actor refused: {first_line(error)}") from error
        except RayActorError as error:
            raise UnreachableError(first_line(error)) from error
        except RayError as error:
            raise LinkError(first_line(error)) from error


def first_line(error: Exception) -> str:
    """Return what an error says in one line; an error inside an actor's method is its cause."""
    return errors.first_line(error.cause if isinstance(error, RayTaskError) else error)


def _as_it_is(answer: Any) -> Any:
    return answer


def _row_limits(status: ControlStatus) -> Mapping[str, int]:
    return status.row_limits

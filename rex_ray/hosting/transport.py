"""What a worker's link needs of whoever carries its messages: Ray, or a TCP connection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol, TypeVar

from rex_ray.core.errors import LinkError
from rex_ray.core.types import Allocation
from rex_ray.hosting.wire import Batch
from rex_ray.worker.link import GroupInfo, SaveRequest

__all__ = ["POLL_LIMIT_S", "Pending", "Transport", "UnreachableError"]

POLL_LIMIT_S: Final = 10.0
"""A question for news is answered within this time, with news or without."""

_Answer_co = TypeVar("_Answer_co", covariant=True)


class UnreachableError(LinkError):
    """The network's: nobody is there to answer just now; asking again may help."""


class Pending(Protocol[_Answer_co]):
    """An answer under way."""

    def arrived(self, limit_s: float) -> bool:
        """Whether the answer is there, or it is known that none will come; waits for that within the limit."""
        ...

    def result(self, limit_s: float = 0.0) -> _Answer_co:
        """Return the answer, after waiting for it within the limit.

        Raises:
            UnreachableError: the other side is gone.
            InfeasibleError: no allocation fits the bounds of a group that asked to join.
            LinkError: no answer within the limit, or a refusal; says which.
        """
        ...


class Transport(Protocol):
    """Carries one rank's messages. Each method sends, returns at once or within a short limit, and never raises."""

    def put(self, batch: Batch) -> Pending[None]:
        """Send records; called by the pump's thread only."""
        ...

    def join(self, group: GroupInfo) -> Pending[Allocation]:
        """Announce a group; called before the first ``latest`` and, where nobody answered, by the poller's thread."""
        ...

    def latest(self, generation: str, version: int, save_number: int) -> Pending[Allocation | SaveRequest | None]:
        """Ask for news beyond what is known; answered within ``POLL_LIMIT_S``. Called by the poller's thread only."""
        ...

    def row_limits(self) -> Pending[Mapping[str, int]]:
        """Ask for the most rows that kinds of device are given; called before the first ``latest``."""
        ...

    def close(self) -> None:
        """Give back what is held; questions under way are left to themselves."""
        ...

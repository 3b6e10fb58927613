"""A worker's messages over TCP; a ``rex_ray.hosting.transport.Transport``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from rex_ray.core.errors import LinkError, RexError
from rex_ray.core.types import Allocation
from rex_ray.hosting.looking import ANSWER_LIMIT_S
from rex_ray.hosting.transport import Pending, UnreachableError
from rex_ray.hosting.wire import Batch
from rex_ray.standalone.connection import NO_RANK, Address, Connection
from rex_ray.standalone.messages import AskNews, AskRowLimits, AskSights, Join, Lost, Put, Request
from rex_ray.watch.backlog import Mark, Shown
from rex_ray.worker.link import GroupInfo, SaveRequest

__all__ = ["TcpTransport", "asker"]

_TAKEN_LIMIT_S: Final = 5.0


class TcpTransport:
    """Two connections, made when they are first used: records go on one, and a long poll holds up the other.

    Args:
        address: of the control server.
        token: the run's.
        rank: of this worker.
    """

    def __init__(self, address: Address, token: str, rank: int) -> None:
        self._rank = rank
        self._records = Connection(address, token, rank)
        self._news = Connection(address, token, rank)

    def put(self, batch: Batch) -> Pending[None]:
        """Send records and wait until they were taken: on the pump's thread nobody minds.

        So one batch at most is under way, and what the server did not take is counted. A slow server has the outbox
        fill up, and drop and count in its turn.
        """
        under_way = _UnderWay(self._records, Put(batch=batch))
        under_way.wait(_TAKEN_LIMIT_S)
        return under_way

    def join(self, group: GroupInfo) -> Pending[Allocation]:
        """Announce a group."""
        return _UnderWay(self._news, Join(group=group))

    def latest(self, generation: str, version: int, save_number: int) -> Pending[Allocation | SaveRequest | None]:
        """Ask for news."""
        return _UnderWay(self._news, AskNews(generation=generation, version=version, save_number=save_number))

    def row_limits(self) -> Pending[Mapping[str, int]]:
        """Ask for the most rows that kinds of device are given."""
        return _UnderWay(self._news, AskRowLimits())

    def lost(self, generation: str, reason: str) -> None:
        """Say that this rank has failed, as far as somebody hears it; after ``close``."""
        farewell = _UnderWay(self._records, Lost(generation=generation, rank=self._rank, reason=reason))
        farewell.wait(_TAKEN_LIMIT_S)
        self._records.close()

    def close(self) -> None:
        """Close both connections."""
        self._records.close()
        self._news.close()


def asker(address: Address, token: str) -> Callable[[Mark], Shown]:
    """Return what asks the control server for sights; raises ``LinkError`` where it does not answer.

    Args:
        address: of the control server.
        token: the run's.
    """
    connection = Connection(address, token, NO_RANK)

    def ask(mark: Mark) -> Shown:
        shown: Shown = _UnderWay(connection, AskSights(mark=mark)).result(ANSWER_LIMIT_S)
        return shown

    return ask


class _UnderWay:
    """A question and its answer.

    Args:
        connection: on which nothing else is asked meanwhile.
        request: the question, sent at once.
    """

    def __init__(self, connection: Connection, request: Request) -> None:
        self._connection = connection
        self._error: RexError | None = None
        self._answer: Any = None
        self._is_over = False
        try:
            connection.ask(request)
        except LinkError as error:
            self._fail(error)

    def arrived(self, limit_s: float) -> bool:
        """Whether the answer is there, or that there will be none."""
        if not self._is_over and self._connection.has_answer(limit_s):
            try:
                self._answer, self._is_over = self._connection.answer(), True
            except RexError as error:
                self._fail(error)
        return self._is_over

    def wait(self, limit_s: float) -> None:
        """Wait for the answer; past the limit there will be none."""
        began_s = time.monotonic()
        if not self.arrived(limit_s):
            # An answer that comes later must not be taken for that of the next question.
            self._connection.close()
            waited_s = time.monotonic() - began_s
            self._fail(UnreachableError(f"the control server did not answer within {waited_s:.1f} s"))

    def result(self, limit_s: float = 0.0) -> Any:
        """Return the answer."""
        self.wait(limit_s)
        if self._error is not None:
            raise self._error
        return self._answer

    def _fail(self, error: RexError) -> None:
        self._error, self._is_over = error, True

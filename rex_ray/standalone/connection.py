"""A worker's end of a TCP connection to the control server: one question at a time, each within a limit."""

from __future__ import annotations

import contextlib
import select
import socket
from typing import Any, Final

from rex_ray.control.codec import CodecError
from rex_ray.core.errors import InfeasibleError, LinkError
from rex_ray.hosting.transport import UnreachableError
from rex_ray.standalone.frames import FIRST_FRAME_BYTES, FrameError, frame, parsed, receive_frame, send_bytes
from rex_ray.standalone.handshake import greeting, is_proof, nonce_of
from rex_ray.standalone.messages import Refusal, Request, answer_in, framed

__all__ = ["NO_RANK", "Address", "Connection", "keep_alive"]

Address = tuple[str, int]

NO_RANK: Final = -1
"""Of a connection that belongs to no rank's link, but to whoever looks on."""

_CONNECT_LIMIT_S: Final = 3.0
_SEND_LIMIT_S: Final = 5.0
_FRAME_LIMIT_S: Final = 5.0


class Connection:
    """Connects when it is first used, and again after it broke. Used by one thread at a time.

    Args:
        address: host and port of the control server.
        token: the run's.
        rank: of this worker.
    """

    def __init__(self, address: Address, token: str, rank: int) -> None:
        self._address = address
        self._token = token
        self._rank = rank
        self._socket: socket.socket | None = None

    def ask(self, request: Request) -> None:
        """Send a question.

        Raises:
            UnreachableError: the server is not there, or takes nothing.
            LinkError: somebody else is there, or the question is too large.
        """
        try:
            data = framed(request)
        except FrameError as error:
            raise LinkError(str(error)) from error
        try:
            if self._socket is None or _has_left(self._socket):
                self._connect()
            assert self._socket is not None
            send_bytes(self._socket, data, _SEND_LIMIT_S)
        except OSError as error:
            self.close()
            raise UnreachableError(f"no control server at {self._told()}: {error}") from error
        except LinkError:
            self.close()
            raise

    def has_answer(self, limit_s: float) -> bool:
        """Whether an answer, or its end, has begun to arrive; waits for that within the limit."""
        connection = self._socket
        return connection is None or _is_readable(connection, limit_s)

    def answer(self) -> Any:
        """Return the answer, which has begun to arrive.

        Raises:
            InfeasibleError: no allocation fits a group's bounds.
            UnreachableError: the connection broke.
            LinkError: the server refused, or what came is no answer.
        """
        try:
            if self._socket is None:
                raise ConnectionError("the connection is closed")
            said = answer_in(receive_frame(self._socket, _FRAME_LIMIT_S))
        except OSError as error:
            self.close()
            raise UnreachableError(f"the control server at {self._told()} has gone: {error}") from error
        except (FrameError, CodecError) as error:
            self.close()
            raise LinkError(f"what answers at {self._told()} is no control server of this version: {error}") from error
        if isinstance(said, Refusal):
            raise InfeasibleError(said.reason) if said.infeasible else LinkError(said.reason)
        return said.value

    def close(self) -> None:
        """Give the connection back; the next question makes another one."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None

    def _connect(self) -> None:
        """Connect, and have both ends show that they know the token."""
        self.close()
        self._socket = socket.create_connection(self._address, timeout=_CONNECT_LIMIT_S)
        keep_alive(self._socket)
        try:
            challenged = nonce_of(parsed(self._first()))
            if challenged is None:
                raise LinkError(f"what listens at {self._told()} is no control server of this version of rex_ray")
            greeted = greeting(self._token, challenged, self._rank)
            send_bytes(self._socket, frame(greeted), _SEND_LIMIT_S)
            replied = parsed(self._first())
        except (FrameError, CodecError) as error:
            raise LinkError(f"what listens at {self._told()} is no control server: {error}") from error
        if not is_proof(self._token, "server", greeted["nonce"], replied):
            raise LinkError(f"what listens at {self._told()} does not know this run's token")

    def _first(self) -> bytes:
        assert self._socket is not None
        return receive_frame(self._socket, _CONNECT_LIMIT_S, FIRST_FRAME_BYTES)

    def _told(self) -> str:
        return f"{self._address[0]}:{self._address[1]}"


def keep_alive(connection: socket.socket) -> None:
    """Have the system notice a peer whose machine is gone, within two minutes, and send small frames at once."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # Linux; elsewhere the system's hours stand
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _has_left(connection: socket.socket) -> bool:
    """Nothing is due between two questions: what can be read then is the connection's end, or an answer too late."""
    return _is_readable(connection, 0.0)


def _is_readable(connection: socket.socket, limit_s: float) -> bool:
    poller = select.poll()  # select() knows no descriptor above 1023
    try:
        poller.register(connection, select.POLLIN)
        return bool(poller.poll(limit_s * 1e3))
    except (OSError, ValueError):
        return True

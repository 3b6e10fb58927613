"""The control server's connections: who may speak, and what each question is answered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import Final

from rex_ray.control.codec import CodecError
from rex_ray.core.errors import InfeasibleError, RexError, first_line
from rex_ray.hosting.control_service import ControlService
from rex_ray.standalone.connection import NO_RANK, keep_alive
from rex_ray.standalone.frames import FIRST_FRAME_BYTES, FrameError, frame, parsed, read_frame
from rex_ray.standalone.handshake import challenge, reply, welcome
from rex_ray.standalone.messages import (
    Answer,
    AskNews,
    AskRowLimits,
    AskSights,
    Join,
    Lost,
    Put,
    Refusal,
    Request,
    framed,
    request_in,
)

__all__ = ["Connections"]

logger = logging.getLogger("rex_ray")

_GREETING_LIMIT_S: Final = 3.0
_FRAME_LIMIT_S: Final = 10.0
_SEND_LIMIT_S: Final = 5.0
_IDLE_LIMIT_S: Final = 3600.0
_MOST_STRANGERS: Final = 256
_MOST_PER_RANK: Final = 4
"""Two are in use. A rank that comes again after a break of the network has left some that nobody closed."""


class Connections:
    """Answers whoever knows the token, one question of each at a time; so nothing queues up here.

    Args:
        service: answers.
        token: the run's.
        num_ranks: size of the group; so many ranks, and whoever looks on, are held a few connections each.
    """

    def __init__(self, service: ControlService, token: str, num_ranks: int) -> None:
        self._service = service
        self._token = token
        self._ranks = range(NO_RANK, num_ranks)
        self._strangers: set[asyncio.Task[None]] = set()
        self._known: dict[asyncio.Task[None], int] = {}
        self._num_turned_away = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends; never raises."""
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._strangers) >= _MOST_STRANGERS:
                return
            self._strangers.add(task)
            rank = await self._rank_of(reader, writer)
            self._strangers.discard(task)
            if rank is None:
                self._turn_away(writer)
                return
            self._make_room(rank)
            self._known[task] = rank
            await self._answer_all(reader, writer)
        except (OSError, EOFError):
            # It has left, or is as good as gone, and takes nothing any more; whoever lives connects again.
            writer.transport.abort()
        except FrameError as error:
            self._service.take(error)
        except asyncio.CancelledError:
            return  # the server ends, and this with it
        finally:
            self._strangers.discard(task)
            self._known.pop(task, None)
            writer.close()

    async def all_gone(self, limit_s: float) -> None:
        """Wait until all ranks have left, since they may still be sending; within the limit."""
        waited_for = [task for task, rank in self._known.items() if rank != NO_RANK]
        if waited_for:
            await asyncio.wait(waited_for, timeout=limit_s)

    async def _rank_of(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int | None:
        """Return who speaks, None where it does not show that it knows the token."""
        connection = writer.get_extra_info("socket")
        if connection is not None:
            keep_alive(connection)
        challenged = challenge()
        await _send(writer, frame(challenged))
        try:
            greeted = parsed(await read_frame(reader, _GREETING_LIMIT_S, most_bytes=FIRST_FRAME_BYTES))
        except (FrameError, CodecError, EOFError):
            return None
        number = welcome(self._token, challenged["nonce"], greeted)
        if number is None:
            return None
        await _send(writer, frame(reply(self._token, number)))
        rank = greeted.get("rank")
        return rank if isinstance(rank, int) and rank in self._ranks else NO_RANK

    def _make_room(self, rank: int) -> None:
        """Let go of a rank's oldest connection where it holds too many."""
        held = [task for task, other in self._known.items() if other == rank]
        if len(held) >= _MOST_PER_RANK:
            self._known.pop(held[0])
            held[0].cancel()

    async def _answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            data = await read_frame(reader, _FRAME_LIMIT_S, _IDLE_LIMIT_S)
            try:
                request = request_in(data)
            except CodecError as error:
                self._service.take(error)  # is counted there, as what is no batch is in any queue
                said: Answer | Refusal = Refusal(reason=first_line(error))
            else:
                said = await self._answer(request)
            await _send(writer, framed(said))

    async def _answer(self, request: Request) -> Answer | Refusal:
        service = self._service
        try:
            match request:
                case Put(batch=batch):
                    service.take(batch)
                    return Answer()
                case Join(group=group):
                    return Answer(value=await service.join(group))
                case AskNews(generation=generation, version=version, save_number=save_number):
                    return Answer(value=await service.latest(generation, version, save_number))
                case AskRowLimits():
                    return Answer(value=(await service.status()).row_limits)
                case AskSights(mark=mark):
                    return Answer(value=await service.sights(mark))
                case Lost(generation=generation, rank=rank, reason=reason):
                    await service.lost(generation, {rank: reason})
                    return Answer()
        except InfeasibleError as error:
            return Refusal(reason=str(error), infeasible=True)
        except RexError as error:
            return Refusal(reason=first_line(error))

    def _turn_away(self, writer: asyncio.StreamWriter) -> None:
        """Say so the first time, and then ever more rarely: a scanner must not fill the log."""
        self._num_turned_away += 1
        count = self._num_turned_away
        if count & (count - 1) == 0:
            with contextlib.suppress(OSError):
                logger.warning(
                    "turned away %d connection%s that did not show this run's token, the last from %s",
                    count,
                    "s" if count > 1 else "",
                    _told(writer),
                )


def _told(writer: asyncio.StreamWriter) -> str:
    connection: socket.socket | None = writer.get_extra_info("socket")
    return "nowhere" if connection is None else str(writer.get_extra_info("peername"))


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send a frame; a peer that does not read it in time is left."""
    writer.write(data)
    await asyncio.wait_for(writer.drain(), _SEND_LIMIT_S)

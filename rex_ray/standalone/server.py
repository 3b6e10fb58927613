"""The control server's process: ``python -m rex_ray.standalone.server``, started by rank 0 and told what to do by it.

A process of its own, since the controller's arithmetic would take the interpreter's lock from the training loop. It
ends with rank 0, however that ends. What it had not written then is written, and the run's end is left open: torchrun
may start the ranks again, and the next server goes on from the journal.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import BinaryIO, Final

from rex_ray.core.errors import first_line
from rex_ray.hosting.control_service import ControlService
from rex_ray.standalone.orders import Orders, line, said
from rex_ray.standalone.serving import Connections

__all__ = ["main", "own_output"]

_LOOK_S: Final = 0.5
_ORDERS_LIMIT_S: Final = 30.0
_MOST_LINE_BYTES: Final = 2**28
_LAST_RECORDS_S: Final = 3.0
CANNOT_LISTEN: Final = 3
"""Exit status of a server that was given an address which is not its machine's, or is taken."""


async def _serve(parent: int, words: BinaryIO) -> int:
    loop = asyncio.get_running_loop()
    pipe = asyncio.StreamReader(limit=_MOST_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(pipe), sys.stdin.buffer)
    async with asyncio.timeout(_ORDERS_LIMIT_S):
        first = await pipe.readline()
    if not first:
        return 0
    orders = Orders.from_line(first)
    connections: Connections

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await connections.serve(reader, writer)

    # The port first: a server that cannot have it leaves no trace in the journal, however often it is tried.
    try:
        server = await asyncio.start_server(serve, orders.host, orders.port, start_serving=False)
    except OSError as error:
        _say(words, {"failed": first_line(error)})
        return CANNOT_LISTEN
    service = ControlService(orders.config, orders.journal_dir, orders.learnt, memory=orders.memory)
    connections = Connections(service, orders.token, orders.num_ranks)
    await server.start_serving()
    _say(words, {"port": server.sockets[0].getsockname()[1]})
    reason = await _told_to_end(pipe, parent)
    if reason is None:
        service.pause()
        return 0
    await connections.all_gone(_LAST_RECORDS_S)
    status = await service.finish(reason)
    _say(words, {"ended": {"fault": status.fault, "last_step": status.last_step, "num_events": status.num_events}})
    # Whoever looks on is shown the end, too; rank 0 closes the pipe after that.
    await _told_to_end(pipe, parent)
    return 0


async def _told_to_end(pipe: asyncio.StreamReader, parent: int) -> str | None:
    """Return the reason for which rank 0 ends the run, or None once rank 0 is gone.

    A loader process that rank 0 forked holds its end of the pipe open after its death; so its number is looked at, too.
    """
    listening = asyncio.ensure_future(pipe.readline())
    while True:
        await asyncio.wait({listening}, timeout=_LOOK_S)
        if listening.done():
            heard = listening.result()
            if heard.endswith(b"\n"):
                return str(said(heard)["finish"])
            return None
        if os.getppid() != parent:
            return None


def _say(words: BinaryIO, document: dict[str, object]) -> None:
    try:
        words.write(line(document))
        words.flush()
    except OSError:
        return  # rank 0 is gone, which is seen elsewhere


def own_output() -> BinaryIO:
    """Return standard output for words to rank 0; what else is printed here, as by a policy, goes to standard error."""
    words = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return words


def main() -> None:
    """Serve until rank 0 says otherwise, or is gone."""
    sys.exit(asyncio.run(_serve(os.getppid(), own_output())))


if __name__ == "__main__":
    main()

"""A control server's connections over real loopback sockets, in this process."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from batches import group, records

from rex_ray import InfeasibleError, LinkError, RexConfig
from rex_ray.hosting.carried_link import CarriedLink
from rex_ray.hosting.control_service import ControlService
from rex_ray.hosting.transport import UnreachableError
from rex_ray.standalone.connection import Connection
from rex_ray.standalone.frames import MOST_FRAME_BYTES, frame, parsed, receive_frame
from rex_ray.standalone.handshake import greeting
from rex_ray.standalone.messages import AskRowLimits, Refusal, answer_in
from rex_ray.standalone.serving import Connections
from rex_ray.standalone.tcp_transport import TcpTransport

TOKEN = "the run's"


class Server:
    """A control service and its connections on a thread's event loop."""

    def __init__(self, folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.service, self.server = self.call(self._start(folder))
        self.address = self.server.sockets[0].getsockname()[:2]

    async def _start(self, folder: Path) -> Any:
        service = ControlService(RexConfig(global_batch_size=32), folder)
        connections = Connections(service, TOKEN, num_ranks=2)
        return service, await asyncio.start_server(connections.serve, "127.0.0.1", 0)

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def status(self) -> Any:
        return self.call(self.service.status())

    def close(self) -> None:
        async def end() -> None:
            self.server.close()
            await self.service.finish("finished")
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

        self.call(end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "journal"
    folder.mkdir()
    running = Server(folder)
    yield running
    running.close()


def wait_for(what: Callable[[], Any], limit_s: float = 30.0) -> Any:
    deadline = time.monotonic() + limit_s
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return found


def greeted(server: Server, token: str = TOKEN) -> socket.socket:
    connection = socket.create_connection(server.address, timeout=30)
    nonce = parsed(receive_frame(connection, 30.0))["nonce"]
    connection.sendall(frame(greeting(token, nonce, rank=0)))
    return connection


def test_records_go_out_and_a_better_allocation_comes_back(server: Server) -> None:
    links = [CarriedLink(TcpTransport(server.address, TOKEN, rank), rank, 2) for rank in range(2)]
    for link in links:
        link.started("g")
    first = links[0].join(group(), 30.0)
    assert first.local_batch_sizes == (16, 16)
    assert links[0].latest() is None, "nothing is newer than what the group joined with"
    for step in range(20):
        for rank, link in enumerate(links):
            link.send(records(rank, [step], first))
    news = wait_for(links[0].latest)
    assert news.version == first.version + 1
    assert news.local_batch_sizes[0] < 16 < news.local_batch_sizes[1]
    server.call(server.service.request_save("a test asks"))
    assert wait_for(links[0].save_request).reason == "a test asks"
    for link in links:
        link.close(30.0)
    assert server.status().last_step == 19
    assert server.status().dropped == {}


def test_bounds_that_no_allocation_meets_are_the_users_to_hear(server: Server) -> None:
    link = CarriedLink(TcpTransport(server.address, TOKEN, 0), 0, 2)
    with pytest.raises(InfeasibleError):
        link.join(group(most_rows=10), 30.0)
    assert server.status().fault is None
    link.close(5.0)


def test_who_does_not_know_the_token_is_told_nothing(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with greeted(server, token="a guess") as stranger:
        stranger.settimeout(30)
        assert stranger.recv(1) == b"", "no word, and the connection ends"
    wrong = Connection(server.address, "a guess", 0)
    with pytest.raises(LinkError):
        wrong.ask(AskRowLimits())


def test_a_stranger_at_the_servers_port_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(frame({"rex_ray": 1, "nonce": "0" * 32}))
                receive_frame(connection, 30.0)
                connection.sendall(frame({"proof": "0" * 64}))

        impostor = threading.Thread(target=pretend)
        impostor.start()
        with pytest.raises(LinkError, match="does not know this run's token"):
            Connection(listener.getsockname(), TOKEN, 0).ask(AskRowLimits())
        impostor.join(30)


def test_a_malformed_message_is_counted_and_the_next_one_heard(server: Server) -> None:
    with greeted(server) as connection:
        receive_frame(connection, 30.0)
        connection.sendall(struct.pack(">I", 3) + b"abc")
        assert isinstance(answer_in(receive_frame(connection, 30.0)), Refusal)
        connection.sendall(frame({"$": "AskRowLimits"}))
        assert answer_in(receive_frame(connection, 30.0)).value == {}
    assert server.status().dropped == {"malformed batch": 1}
    assert server.status().fault is None


def test_a_frame_beyond_the_limit_ends_the_connection_and_nothing_else(server: Server) -> None:
    with greeted(server) as connection:
        receive_frame(connection, 30.0)
        connection.sendall(struct.pack(">I", MOST_FRAME_BYTES + 1))
        connection.settimeout(30)
        assert connection.recv(1) == b""
    wait_for(lambda: server.status().dropped == {"malformed batch": 1})
    fine = Connection(server.address, TOKEN, 0)
    fine.ask(AskRowLimits())
    assert fine.has_answer(30.0)
    assert fine.answer() == {}
    fine.close()


def test_a_rank_that_comes_again_and_again_is_heard_in_its_newest_connections(server: Server) -> None:
    came = []
    for _ in range(20):
        came.append(greeted(server))
        receive_frame(came[-1], 30.0)
    came[0].settimeout(30)
    assert came[0].recv(1) == b"", "what nobody closed is let go of"
    came[-1].sendall(frame({"$": "AskRowLimits"}))
    assert answer_in(receive_frame(came[-1], 30.0)).value == {}
    for connection in came:
        connection.close()


def test_strangers_that_say_nothing_and_a_client_that_reads_nothing_hold_up_nobody(server: Server) -> None:
    silent = [socket.create_connection(server.address, timeout=30) for _ in range(20)]
    deaf = greeted(server)
    receive_frame(deaf, 30.0)
    deaf.setblocking(False)
    question = frame({"$": "AskRowLimits"})
    try:
        for _ in range(20_000):
            deaf.send(question)
    except BlockingIOError:
        pass
    transport = TcpTransport(server.address, TOKEN, 1)
    assert transport.join(group()).result(30.0).local_batch_sizes == (16, 16)
    transport.close()
    for connection in (*silent, deaf):
        connection.close()


def test_a_server_that_is_not_there_is_an_error_within_the_limit_and_found_again(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = listener.getsockname()
    link = CarriedLink(TcpTransport(nobody, TOKEN, 0), 0, 2)
    with pytest.raises(LinkError, match="rank 0 waited for the controller"):
        link.join(group(), 0.2)
    assert link.latest() is None
    link.close(5.0)

    connection = Connection(server.address, TOKEN, 0)
    connection.ask(AskRowLimits())
    assert connection.has_answer(30.0)
    connection.close()
    with pytest.raises(UnreachableError):
        connection.answer()
    connection.ask(AskRowLimits())
    assert connection.has_answer(30.0)
    assert connection.answer() == {}
    connection.close()


def test_sending_never_waits_for_a_dead_server(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = listener.getsockname()
    link = CarriedLink(TcpTransport(nobody, TOKEN, 0), 0, 2)
    link.started("g")
    from batches import first_allocation

    for step in range(6000):
        link.send(records(0, [step], first_allocation()))
    wait_for(lambda: "takes no records" in caplog.text)
    link.close(30.0)
    assert caplog.text.count("takes no records") == 1, "said once, not at every batch"

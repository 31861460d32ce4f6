"""A burst of connections is accepted at once, also beside a busy event loop, and a lack of descriptors is survived."""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

import pytest
import trustme
import uvloop

from pdserve.server.connections import acceptor
from pdserve.server.connections.acceptor import ACCEPTS_PER_TURN, Acceptor


class Greeting(asyncio.Protocol):
    """Sends what it was made with, and closes."""

    def __init__(self, made: Callable[[], None]) -> None:
        self._made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._made()
        transport.write(b"hello")  # type: ignore[attr-defined]  # uvloop's is a Transport in all but name
        transport.close()


class Exhausted(socket.socket):
    """A listening socket of a process that has no descriptor left, twice."""

    failures = 2

    def accept(self) -> tuple[socket.socket, Any]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def listen(kind: type[socket.socket] = socket.socket) -> socket.socket:
    listening = kind(socket.AF_INET, socket.SOCK_STREAM)
    listening.bind(("127.0.0.1", 0))
    listening.listen(1024)
    return listening


def connect(listening: socket.socket, count: int) -> list[socket.socket]:
    return [socket.create_connection(listening.getsockname(), 5) for _ in range(count)]


def greet(kind: type[socket.socket], clients: int) -> list[int]:
    """Connect these clients before anything is accepted. Returns the turn of the event loop in which each was made."""

    async def run() -> list[int]:
        loop, turn, made = asyncio.get_running_loop(), 0, list[int]()

        def count_turns() -> None:
            nonlocal turn
            turn += 1
            counting[0] = loop.call_soon(count_turns)

        listening = listen(kind)
        connections = await asyncio.to_thread(connect, listening, clients)
        counting = [loop.call_soon(count_turns)]
        served = Acceptor(listening, lambda: Greeting(lambda: made.append(turn)), backlog=1024, ssl_context=None)
        try:
            async with asyncio.timeout(20):
                for connection in connections:
                    assert await asyncio.to_thread(connection.recv, 5) == b"hello"
        finally:
            counting[0].cancel()
            served.close()
            await served.wait_closed()
            for connection in connections:
                connection.close()
        return made

    return uvloop.run(run())


def test_burst_of_connections_needs_a_few_turns_of_the_event_loop() -> None:
    """uvloop's own server takes a turn for each: beside streams, a turn takes milliseconds."""
    turns = greet(socket.socket, 4 * ACCEPTS_PER_TURN)
    assert len(turns) == 4 * ACCEPTS_PER_TURN
    assert max(turns) - min(turns) <= 12


def test_connections_wait_while_there_are_no_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor, "PAUSE_S", 0.05)
    with caplog.at_level(logging.ERROR):
        assert len(greet(Exhausted, 3)) == 3
    assert [record.getMessage() for record in caplog.records] == 2 * [
        "no connection is accepted for 0.05 s: [Errno 24] Too many open files"
    ]


@pytest.mark.parametrize("limit", ["MOST_OPENING", "HANDSHAKE_S"])
def test_tls_handshakes_that_do_not_end_are_given_up(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(acceptor, limit, {"MOST_OPENING": 2, "HANDSHAKE_S": 0.1}[limit])
    authority = trustme.CA()
    of_server, of_client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.issue_cert("127.0.0.1").configure_cert(of_server)
    authority.configure_trust(of_client)

    async def run() -> None:
        listening = listen()
        served = Acceptor(listening, lambda: Greeting(lambda: None), backlog=8, ssl_context=of_server)
        mute = await asyncio.to_thread(connect, listening, 3)
        mute[0].settimeout(30)
        assert await asyncio.to_thread(mute[0].recv, 1) == b""
        assert len(served._opening) <= 2
        reader, writer = await asyncio.open_connection(*listening.getsockname(), ssl=of_client)
        assert await reader.read() == b"hello"
        writer.close()
        served.close()
        await served.wait_closed()
        for one in mute:
            one.close()

    uvloop.run(run())


def test_closed_acceptor_refuses_connections() -> None:
    async def run() -> None:
        listening = listen()
        address = listening.getsockname()
        served = Acceptor(listening, lambda: Greeting(lambda: None), backlog=8, ssl_context=None)
        served.close()
        await served.wait_closed()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.to_thread(socket.create_connection, address, 5)

    uvloop.run(run())

"""Clients that ask for HTTP/2 or WebSocket get HTTP/1.1 responses; HTTP/1.0 clients get no chunked responses. What one
connection may hold is limited.
"""

import asyncio
import json
import socket
from contextlib import suppress
from typing import Any, cast
from unittest.mock import Mock

import pytest

from pdserve.scheduler.messages.frontend import Cancel, Submit, Tokens
from pdserve.server.connections import http_protocol
from pdserve.server.connections.http_protocol import (
    MAX_PIPELINED,
    ConnectionLimit,
    PatientHttpProtocol,
    without_upgrade,
)
from pdserve.server.observability.metrics import Metrics
from pdserve.transfer.tcp_info import NO_LINGER
from tests.server.http_harness import RunningServer, sse_events
from tests.server.scripted_leader import make_finished

# As Java's HttpClient and `curl --http2` send it.
HEAD = (
    "POST /generate HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: {length}\r\nHost: x\r\n"
    "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\n\r\n"
)


async def read_response(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Status line and body of the next response."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next(line for line in head.splitlines() if line.startswith("content-length: "))
    return head.splitlines()[0], await reader.readexactly(int(length.partition(": ")[2]))


@pytest.mark.parametrize("pause_s", [0.0, 0.05])
async def test_upgrade_to_http2_is_ignored(decode: RunningServer, pause_s: float) -> None:
    """Two requests on one connection, with the body right after the headers or a little later."""
    reader, writer = await asyncio.open_connection("127.0.0.1", decode.port)
    for text in ("ab", "cd"):
        body = json.dumps({"text": text}).encode()
        writer.write(HEAD.format(length=len(body)).encode())
        await asyncio.sleep(pause_s)
        writer.write(body)
        submit = await decode.leader.expect(Submit)
        assert bytes(submit.prompt_ids).decode() == text
        await decode.leader.send(Tokens(submit.rid, (65,)), make_finished(submit.rid, 1))
        status, answer = await read_response(reader)
        assert (status, json.loads(answer)["text"]) == ("HTTP/1.1 200 OK", "A")
    writer.close()


async def test_upgrade_to_websocket_is_ignored(decode: RunningServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", decode.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nupgrade: websocket\r\n\r\n")
    assert (await read_response(reader))[0] == "HTTP/1.1 200 OK"
    writer.close()


async def test_stream_to_an_http_1_0_client_ends_with_the_connection(decode: RunningServer) -> None:
    """nginx and `ab` use HTTP/1.0 by default. Events are still sent one by one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", decode.port)
    body = json.dumps({"text": "a", "stream": True}).encode()
    writer.write(b"POST /generate HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    submit = await decode.leader.expect(Submit)
    await decode.leader.send(Tokens(submit.rid, (65,)))
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert (await reader.readuntil(b"\n\n")).startswith(b'data: {"text":"A"')
    await decode.leader.send(Tokens(submit.rid, (66,)), make_finished(submit.rid, 2))
    events: list[Any] = sse_events((await reader.read()).decode())
    assert [event if isinstance(event, str) else event["text"] for event in events] == ["AB", "[DONE]"]
    writer.close()


async def test_response_to_an_http_1_0_client_has_a_content_length(decode: RunningServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", decode.port)
    writer.write(b"GET /health HTTP/1.0\r\n\r\n")
    status, answer = await read_response(reader)
    assert (status, json.loads(answer)["status"]) == ("HTTP/1.1 200 OK", "ok")
    assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("head", ["POST /generate HTTP/1.0", "POST /generate HTTP/1.1\r\nConnection: close"])
async def test_client_that_is_refused_while_it_sends_can_read_the_response(decode: RunningServer, head: str) -> None:
    """nginx, urllib and others read the response only after they have sent the whole body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", decode.port)
    size = 16 << 20
    writer.write(f"{head}\r\nContent-Length: {size}\r\n\r\n".encode())
    for _ in range(16):
        writer.write(bytes(size // 16))
        await writer.drain()
    status, answer = await read_response(reader)
    assert status == "HTTP/1.1 413 Request Entity Too Large"
    assert json.loads(answer)["error"]["code"] == "too_large"
    assert await reader.read() == b"", "the connection is closed"
    writer.close()


async def test_refused_client_that_stops_sending_is_disconnected(
    decode: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", decode.port)
    writer.write(b"POST /generate HTTP/1.0\r\nContent-Length: 16777216\r\n\r\nabc")
    assert (await read_response(reader))[0] == "HTTP/1.1 413 Request Entity Too Large"
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"POST / HTTP/1.1\r\nHost: x\r\n\r\nbody\r\nUpgrade: h2c\r\n",
        b"GET /upgrade: HTTP/1.1\r\nX-Upgrade: h2c\r\nUpgrade-Insecure-Requests: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x",
    ],
)
def test_data_without_an_upgrade_header_is_unchanged(data: bytes) -> None:
    assert without_upgrade(data) is data


async def test_client_with_too_many_requests_at_once_is_disconnected(decode: RunningServer) -> None:
    one = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", decode.port)
    writer.write(one * MAX_PIPELINED)
    for _ in range(MAX_PIPELINED):
        assert (await read_response(reader))[0] == "HTTP/1.1 200 OK"
    writer.write(one * (MAX_PIPELINED + 2))
    answers = b""
    with suppress(ConnectionResetError):
        answers = await reader.read()
    assert answers.count(b"HTTP/1.1 200") < MAX_PIPELINED
    writer.close()


@pytest.mark.parametrize("how", ["closes", "resets"])
async def test_client_that_leaves_pipelined_requests_ends_all_of_them(
    decode: RunningServer, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """uvicorn did not notice it: the first request ran to its end, and its response was a traceback."""
    body = json.dumps({"text": "a"}).encode()
    head = b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    _, writer = await asyncio.open_connection("127.0.0.1", decode.port)
    writer.write((head + body) * 2)
    rid = (await decode.leader.expect(Submit)).rid
    if how == "resets":
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    writer.close()
    assert (await decode.leader.expect(Cancel)).rid == rid
    await decode.leader.expect_nothing()
    assert not caplog.records


async def test_a_client_that_reads_nothing_costs_little_work(decode: RunningServer) -> None:
    """Without a limit the kernel takes megabytes, and all its requests are answered."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", decode.port))
        for _ in range(14):
            await loop.sock_sendall(client, b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
            await asyncio.sleep(0.02)
        (connection,) = decode.server.server_state.connections
        answered = decode.server.server_state.total_requests
        assert connection.transport.get_write_buffer_size() < 1 << 20
    print(f"{answered} requests were answered")
    assert answered < 12


async def test_metrics_requested_at_once_are_rendered_once(
    decode: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    render = Mock(return_value=b"metrics")
    monkeypatch.setattr(Metrics, "render", render)
    connections = [await asyncio.open_connection("127.0.0.1", decode.port) for _ in range(20)]
    for _, writer in connections:
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
    for reader, writer in connections:
        assert (await read_response(reader))[1] == b"metrics"
        writer.close()
    assert 1 <= render.call_count < 10


async def test_room_for_a_connection_is_made_by_the_host_with_most_idle_ones(decode: RunningServer) -> None:
    decode.server._limit = ConnectionLimit(6)
    other = await asyncio.open_connection("127.0.0.1", decode.port, local_addr=("127.0.0.2", 0))
    many = [await asyncio.open_connection("127.0.0.1", decode.port) for _ in range(12)]
    async with asyncio.timeout(10):
        while not all(reader.at_eof() or reader.exception() for reader, _ in many[:7]):
            await asyncio.sleep(0.01)
    assert len(decode.server.server_state.connections) == 6
    for reader, writer in (other, *many[7:]):
        writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    for _, writer in (other, *many):
        writer.close()


def test_connection_is_refused_if_all_others_are_in_use() -> None:
    busy = Mock(is_idle=False, is_unread=False, client=("127.0.0.1", 1))
    busy.transport.is_closing.return_value = False
    assert ConnectionLimit(2).make_room([busy], 0.0)
    assert not ConnectionLimit(1).make_room([busy], 0.0)


async def test_room_is_made_by_clients_that_read_nothing(decode: RunningServer) -> None:
    """Otherwise as many clients that ask and read nothing would lock out all others."""
    decode.server._limit = ConnectionLimit(4)
    unread = []
    for _ in range(4):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.to_thread(client.connect, ("127.0.0.1", decode.port))
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n" * MAX_PIPELINED)
        unread.append(client)
    connections = cast("set[PatientHttpProtocol]", decode.server.server_state.connections)
    async with asyncio.timeout(30):
        while sum(one.is_unread for one in connections) < 4:
            await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_connection("127.0.0.1", decode.port, local_addr=("127.0.0.2", 0))
    writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    for client in unread:
        client.close()


def test_looks_at_all_connections_are_rare_while_many_clients_connect() -> None:
    """Each takes milliseconds. One closes 2 of 128 connections; one that finds none idle is not repeated at once."""
    limit = ConnectionLimit(128)
    connections = [Mock(is_idle=True, client=("127.0.0.1", port), active_at=port) for port in range(128)]
    for one in connections:
        one.transport.is_closing.return_value = False
    assert [limit.make_room(connections, 0.0) for _ in range(2)] == [True, True]
    assert [port for port, one in enumerate(connections) if one.transport.abort.called] == [0, 1]
    busy = [Mock(is_idle=False, is_unread=False)] * 128
    assert not limit.make_room(busy, 1.0)
    assert not limit.make_room(connections, 1.05), "looked again too soon"
    assert limit.make_room(connections, 1.2)

"""Clients that ask for HTTP/2 or WebSocket get HTTP/1.1 responses; HTTP/1.0 clients get no chunked responses."""

import asyncio
import json
from typing import Any

import pytest

from pdserve.scheduler.messages.frontend import Submit, Tokens
from pdserve.server.connections import http_protocol
from pdserve.server.connections.http_protocol import without_upgrade
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

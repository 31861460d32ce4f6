"""Clients that do not read a response or do not complete a request are disconnected; slow clients are served."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import pytest

from pdserve.common.sampling import TokenLogprob
from pdserve.scheduler.messages.frontend import Cancel, Submit, Tokens
from pdserve.server.connections.http_protocol import PatientHttpProtocol
from pdserve.server.text.tokenizer import Tokenizer
from tests.server.http_harness import RunningServer, running_server
from tests.server.scripted_leader import make_finished

PATIENCE_S = 0.4
END_OF_STREAM = b"data: [DONE]\n\n\r\n0\r\n\r\n"


@pytest.fixture
async def decode(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningServer]:
    monkeypatch.setattr(PatientHttpProtocol, "patience_s", PATIENCE_S)
    async with running_server(tokenizer) as server:
        yield server


def ask_without_reading(server: RunningServer, stream: bool) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32_768)
    client.connect(("127.0.0.1", server.port))
    body = json.dumps(
        {"text": "a", "rid": "r", "stream": stream, "return_logprob": True, "top_logprobs_num": 20}
    ).encode()
    client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    client.setblocking(False)
    return client


async def send_much(server: RunningServer, messages: int) -> None:
    """Half a megabyte of JSON per message. Stream events repeat all earlier ones: more than socket buffers hold."""
    top = tuple((65 + rank, -1.23456789) for rank in range(20))
    tokens = Tokens("r", tuple(b"x" * 1000), tuple(TokenLogprob(120, -0.5, top) for _ in range(1000)))
    for _ in range(messages):
        await server.leader.send(tokens)
        await asyncio.sleep(0.05)


async def test_unread_stream_is_cancelled(decode: RunningServer) -> None:
    with ask_without_reading(decode, stream=True):
        await decode.leader.expect(Submit)
        await send_much(decode, 8)
        assert await decode.leader.expect(Cancel, within_s=10) == Cancel("r")


async def test_unread_response_is_dropped(decode: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    """Without a stream, the request has ended, and the connection must not keep the response forever."""
    with ask_without_reading(decode, stream=False) as client:
        await decode.leader.expect(Submit)
        await send_much(decode, 16)
        await decode.leader.send(make_finished("r", 16_000))
        async with asyncio.timeout(10):
            while "has read nothing for 0.4 s" not in caplog.text:
                await asyncio.sleep(0.05)
        received = await read_to_end(client)
        assert b"200 OK" in received
        assert not received.endswith(b"}}"), "the answer arrived whole; it fits the socket buffers"


async def test_slow_reader_gets_the_whole_response(decode: RunningServer) -> None:
    """Reading takes several times `patience_s`, but no pause is that long."""
    with ask_without_reading(decode, stream=True) as client:
        await decode.leader.expect(Submit)
        await send_much(decode, 4)
        await decode.leader.send(make_finished("r", 4000))
        started = asyncio.get_running_loop().time()
        received = await read_to_end(client, pause_s=PATIENCE_S / 20)
        assert received.endswith(END_OF_STREAM)
        assert asyncio.get_running_loop().time() - started > 3 * PATIENCE_S


async def read_to_end(client: socket.socket, pause_s: float = 0.0) -> bytes:
    """All data until the connection or the stream ends."""
    received = bytearray()
    while not received.endswith(END_OF_STREAM):
        try:
            data = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1 << 19), 2)
        except ConnectionResetError:
            break
        if not data:
            break
        received += data
        await asyncio.sleep(pause_s)
    return bytes(received)


async def connect(server: RunningServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", server.port)


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
async def test_connection_with_an_incomplete_request_is_closed(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """On a new and on a reused connection. A request that is completed in time gets its response."""
    monkeypatch.setattr(PatientHttpProtocol, "header_timeout_s", 0.6)
    async with running_server(tokenizer) as server:
        reader, writer = await connect(server)
        writer.write(sent)
        async with asyncio.timeout(3):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()

        reader, writer = await connect(server)
        for half in (b"GET /version HTTP/1.1\r\nHost: x\r\n", b"\r\n"):
            writer.write(half)
            await asyncio.sleep(0.1)
        assert b'{"version"' in await reader.read(1000)
        await asyncio.sleep(0.8)
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b'{"version"' in await reader.read(1000), "an idle connection is kept"
        writer.write(b"GET ")
        async with asyncio.timeout(3):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("end", [b"", b"\r\n"], ids=["unfinished", "whole"])
@pytest.mark.parametrize("path", [b"/health", b"/health?" + b"y" * 70_000], ids=["headers", "path"])
async def test_headers_over_the_limit_are_refused(tokenizer: Tokenizer, path: bytes, end: bytes) -> None:
    """Also when all headers arrive at once."""
    async with running_server(tokenizer) as server:
        reader, writer = await connect(server)
        writer.write(b"GET %s HTTP/1.1\r\n" % path + b"X: %s\r\n" % (b"y" * 8192) * 9 + end)
        answer = await asyncio.wait_for(reader.read(), 3)
        assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        assert answer.count(b"HTTP/1.1") == 1
        assert b"headers are over 65536 bytes" in answer
        writer.close()


async def test_headers_up_to_the_limit_pass_and_bodies_do_not_count(tokenizer: Tokenizer) -> None:
    async with running_server(tokenizer) as server:
        reader, writer = await connect(server)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: %s\r\n" % (b"y" * 8000) * 8 + b"\r\n")
        assert (await reader.readline()).endswith(b"200 OK\r\n")
        writer.close()

        body = b'{"prompt": "%s"}' % (b"x" * (100 << 10))
        reader, writer = await connect(server)
        writer.write(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        assert (await reader.readline()).endswith(b"200 OK\r\n")
        writer.close()


async def test_invalid_http_gets_an_error_in_json(tokenizer: Tokenizer) -> None:
    async with running_server(tokenizer) as server:
        reader, writer = await connect(server)
        writer.write(b"hello?\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 3)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert json.loads(body)["error"]["code"] == "invalid_request"
        writer.close()

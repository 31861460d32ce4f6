"""Request bodies: gzip, its limits, and encodings that are refused."""

import asyncio
import gzip
import time
import tracemalloc
import zlib
from collections.abc import AsyncIterator
from typing import cast

import pytest
from starlette.requests import Request

from pdserve.common.errors import OverloadedError
from pdserve.configs.schema import DecodeConfig
from pdserve.server.api.common.fields import BodyError, decode_object
from pdserve.server.api.service import service
from pdserve.server.api.service.arriving_bodies import LEAST_BYTES, ArrivingBodies
from pdserve.server.api.service.request_body import GZIP_FORMAT, MOST_MEMBERS, PIECE_BYTES, read_body
from pdserve.server.api.tokenize import MOST_DETOKENIZED
from pdserve.server.connections.http_protocol import PatientHttpProtocol
from pdserve.server.text.chat_format import Arguments
from pdserve.server.text.json_parts import find_excess
from pdserve.server.text.tokenizer import Tokenizer
from tests.server.http_harness import RunningServer, running_server

GZIP = {"Content-Encoding": "gzip"}
BODY = b'{"prompt": "ab"}'


@pytest.mark.parametrize("encoding", ["gzip", "X-GZIP", "identity", ""])
async def test_gzip_body_is_decompressed(decode: RunningServer, encoding: str) -> None:
    content = gzip.compress(BODY) if "gzip" in encoding.lower() else BODY
    answer = await decode.http.post("/tokenize", content=content, headers={"Content-Encoding": encoding})
    assert (answer.status_code, answer.json()["tokens"]) == (200, [97, 98])


async def test_body_of_several_gzip_members(decode: RunningServer) -> None:
    content = gzip.compress(BODY[:5]) + gzip.compress(b"") + gzip.compress(BODY[5:])
    answer = await decode.http.post("/tokenize", content=content, headers=GZIP)
    assert answer.json()["tokens"] == [97, 98]


@pytest.mark.parametrize("after", [b"\0", bytes(PIECE_BYTES)], ids=("one", "many"))
async def test_zero_padding_after_a_gzip_member_is_skipped(decode: RunningServer, after: bytes) -> None:
    """As by gzip(1) and Python. Padding may begin in a later piece of the body than the member has ended in."""
    first, second = gzip.compress(BODY[:5]) + after, gzip.compress(BODY[5:]) + after

    async def pieces() -> AsyncIterator[bytes]:
        for content in (first[: -len(after)], after, second):
            yield content

    for content in (first + second, pieces()):
        answer = await decode.http.post("/tokenize", content=content, headers=GZIP)
        assert (answer.status_code, answer.json()["tokens"]) == (200, [97, 98])


async def test_long_gzip_body_is_decompressed_in_pieces(decode: RunningServer) -> None:
    text = "ab" * (PIECE_BYTES // 4)
    content = gzip.compress(b'{"tokens": [97], "ignored": "%b"}' % (text * 4).encode())
    assert len(content) < PIECE_BYTES / 100
    answer = await decode.http.post("/detokenize", content=content, headers=GZIP)
    assert (answer.status_code, answer.text) == (200, '{"text":"a"}')


async def test_size_of_a_decompressed_body_is_limited(tokenizer: Tokenizer) -> None:
    async with running_server(tokenizer, DecodeConfig(max_body_bytes=4096)) as server:
        for size, status in ((4096, 200), (4097, 413), (64 << 20, 413)):
            padded = BODY + b" " * (size - len(BODY))
            content = gzip.compress(padded, 9)[: 4096 if status == 413 else None]  # refused before it is complete
            answer = await server.http.post("/tokenize", content=content, headers=GZIP)
            assert answer.status_code == status, size
        assert answer.json()["error"]["message"] == "the inflated body is over 4096 bytes (max_body_bytes)"


async def test_gzip_body_that_inflates_to_nothing_is_refused(tokenizer: Tokenizer) -> None:
    async def blocks() -> AsyncIterator[bytes]:
        yield zlib.compressobj(wbits=GZIP_FORMAT).flush(zlib.Z_SYNC_FLUSH)
        for _ in range(20):
            yield b"\0\0\0\xff\xff" * 800

    async with running_server(tokenizer, DecodeConfig(max_body_bytes=65_536)) as server:
        answer = await server.http.post("/tokenize", content=blocks(), headers=GZIP)
    assert answer.status_code == 413
    assert answer.json()["error"]["message"] == "the compressed body is over 65536 bytes (max_body_bytes)"


async def test_number_of_gzip_members_is_limited(decode: RunningServer) -> None:
    content = gzip.compress(BODY) + gzip.compress(b"") * MOST_MEMBERS
    answer = await decode.http.post("/tokenize", content=content, headers=GZIP)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the body has more than 1000 gzip members"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (BODY, "incorrect header check"),
        (zlib.compress(BODY), "incorrect header check"),
        (gzip.compress(BODY)[:-1], "it ends too early"),
        (gzip.compress(BODY) + b"x", "incorrect header check|it ends too early"),
        (gzip.compress(BODY) + b"\0x", "incorrect header check|it ends too early"),
        (b"\0" + gzip.compress(BODY), "incorrect header check"),
        (b"", "the body is empty"),
    ],
    ids=(
        "plain",
        "zlib",
        "cut",
        "longer",
        "longer after padding",
        "padding before",
        "empty",
    ),  # gzip data has a timestamp, so it cannot be an id
)
async def test_invalid_gzip_is_refused(decode: RunningServer, content: bytes, problem: str) -> None:
    answer = await decode.http.post("/tokenize", content=content, headers=GZIP)
    assert answer.status_code == 400
    assert any(part in answer.json()["error"]["message"] for part in problem.split("|")), answer.text


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, gzip"])
async def test_other_encodings_are_refused(decode: RunningServer, encoding: str) -> None:
    answer = await decode.http.post("/tokenize", content=BODY, headers={"Content-Encoding": encoding})
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "gzip")
    assert answer.json()["error"] == {
        "message": f'Content-Encoding "{encoding}" is not supported: send gzip or no encoding',
        "type": "invalid_request_error",
        "code": "unsupported_encoding",
        "param": None,
    }


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"tokens":[' + b"[]," * 100_000 + b"0]}", "100003 objects, arrays and strings; at most 100000 are allowed"),
        (b'{"prompt":"a","x":[' + b'"",' * 100_000 + b"0]}", "100003 objects, arrays and strings; at most 100000"),
        (b'{"prompt":"a","x":[' + b"1," * 100_000 + b"0]}", "100003 elements of objects and arrays; at most 100000"),
        (b'{"prompt":"a","x":"0","seed":' + b"9" * 1001 + b"}", "a number of 1001 digits; at most 1000 are allowed"),
    ],
    ids=("arrays", "strings", "numbers", "digits"),
)
async def test_body_of_too_many_parts_is_refused(decode: RunningServer, content: bytes, problem: str) -> None:
    answer = await decode.http.post("/tokenize", content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"the body has {problem}"), answer.text


async def test_token_ids_and_text_of_the_body_are_not_counted_as_parts(decode: RunningServer) -> None:
    ids = b'{"tokens":[' + b"97," * 200_000 + b"97]}"
    assert (await decode.http.post("/detokenize", content=ids)).json() == {"text": "a" * 200_001}
    text = '{"a":["' * 20_000 + "\\" + "9" * 1001
    answer = await decode.http.post("/tokenize", json={"prompt": text})
    assert answer.json()["count"] == len(text)


async def test_detokenize_takes_a_limited_number_of_ids(decode: RunningServer) -> None:
    answer = await decode.http.post("/detokenize", content=b'{"tokens":[' + b"97," * MOST_DETOKENIZED + b"97]}")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "tokens holds 262145 items; at most 262144 are allowed"


def cpu_s(body: bytes) -> float:
    began_s = time.thread_time()
    decode_object(body, counts_numbers=False)
    return time.thread_time() - began_s


@pytest.mark.parametrize("number", [b"1e300", b"4.9e-324", b"1.7976931348623157e308", b"1" + 400 * b"0" + b"e-300"])
def test_no_number_takes_long_to_decode(number: bytes) -> None:
    """msgspec alone takes 10 to 20 us for each of these, and holds the interpreter's lock meanwhile."""
    body = b'{"a":[' + (number + b",") * 50_000 + b"1]}"
    assert min(cpu_s(body) for _ in range(3)) < 50_000 * 5e-6


def test_digits_are_found_without_a_list_of_all_numbers() -> None:
    body = b'{"x":"' + 1001 * b"0" + b'","a":[' + b"1," * 1_000_000 + b"1]}"
    tracemalloc.start()
    try:
        assert find_excess(body, counts_numbers=False) is None
        assert tracemalloc.get_traced_memory()[1] < 8 * len(body)
    finally:
        tracemalloc.stop()


def test_many_elements_are_in_few_lists_of_a_body_with_token_ids() -> None:
    prompts = b'{"input_ids":[' + b",".join([b"[" + b"7," * 1000 + b"7]"] * 256) + b'],"x":"' + b"[" * 20_000 + b'"}'
    assert find_excess(prompts, counts_numbers=False) is None
    lists = b'{"input_ids":[' + b"[7,7,7,7,7,7,7,7,7,7]," * 20_000 + b"[]]}"
    problem = "220003 elements in 20003 objects and arrays; at most 100000 in 10000 are allowed"
    assert find_excess(lists, counts_numbers=False) == problem


def test_number_beyond_the_range_is_refused() -> None:
    with pytest.raises(BodyError, match=r"the body is not valid JSON: number out of range - at `\$\[...\]`"):
        decode_object(b'{"a":1e309}')


def test_arguments_of_too_many_parts_stay_text() -> None:
    """They are text within the body, so they are not counted with it. Decoding them holds the interpreter's lock."""
    assert Arguments.of('{"a":[' + "[]," * 1000 + "1]}") == {"a": [[]] * 1000 + [1]}
    for part in ("[],", "1,", '"",'):
        text = '{"a":[' + part * 100_001 + "1]}"
        assert Arguments.of(text) is text


class SlowBody:
    """A body that a test sends piece by piece."""

    def __init__(self, arriving: ArrivingBodies, host: str) -> None:
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()
        scope = {"type": "http", "headers": [], "client": (host, 1)}
        self.read = asyncio.create_task(read_body(Request(scope, self._receive), 1 << 20, arriving))

    async def _receive(self) -> dict[str, object]:
        piece = await self._pieces.get()
        return {"type": "http.request", "body": piece, "more_body": bool(piece)}

    async def send(self, size: int) -> None:
        """0 ends the body."""
        self._pieces.put_nowait(bytes(size))
        for _ in range(5):
            await asyncio.sleep(0)


async def test_client_with_most_bytes_loses_its_oldest_body() -> None:
    size = 2 * LEAST_BYTES
    arriving = ArrivingBodies(4 * size)
    slow = [SlowBody(arriving, "a") for _ in range(3)]
    for body in slow:
        await body.send(size)
    other = SlowBody(arriving, "b")
    await other.send(size)
    assert not any(body.read.done() for body in (*slow, other))
    await other.send(1)
    with pytest.raises(
        OverloadedError, match=rf"^request bodies of {4 * size + 1} bytes are arriving \(limit {4 * size}"
    ):
        await slow[0].read
    for body in (slow[1], slow[2], other):
        await body.send(0)
    assert [len(await body.read) for body in (slow[1], slow[2], other)] == [size, size, size + 1]
    assert (arriving._bytes, arriving._hosts, arriving._bytes_of) == (0, {}, {})


async def test_each_arriving_body_counts_although_it_is_short() -> None:
    arriving = ArrivingBodies(4 * LEAST_BYTES)
    slow = [SlowBody(arriving, "a") for _ in range(5)]
    for body in slow:
        await body.send(1)
    assert [body.read.done() for body in slow] == [True, False, False, False, False]
    for body in slow[1:]:
        body.read.cancel()
    await asyncio.wait([body.read for body in slow])
    assert (arriving._bytes, arriving._hosts, arriving._bytes_of) == (0, {}, {})
    assert isinstance(slow[0].read.exception(), OverloadedError)


async def test_a_single_body_may_be_larger_than_the_budget_of_all(tokenizer: Tokenizer) -> None:
    async with running_server(tokenizer, DecodeConfig(max_arriving_bytes=1024)) as server:
        answer = await server.http.post("/tokenize", content=BODY + b" " * 300_000)
        assert answer.status_code == 200, answer.text


async def test_body_that_arrives_for_longest_is_refused_with_429(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    arriving = ArrivingBodies(4 * LEAST_BYTES)
    monkeypatch.setattr(service, "ArrivingBodies", lambda _max_bytes: arriving)
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    async with running_server(tokenizer, DecodeConfig()) as server:
        slow = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(5)]
        for number, (_, writer) in enumerate(slow):
            writer.write(head + BODY[:1])
            while number < 4 and len(arriving._hosts.get("127.0.0.1", ())) == number:
                await asyncio.sleep(0.01)
        status = [b"HTTP/1.1 429 Too Many Requests\r\n"] + 4 * [b"HTTP/1.1 200 OK\r\n"]
        for (reader, writer), expected in zip(slow, status, strict=True):
            writer.write(BODY[1:] if expected == status[1] else b"")
            assert await asyncio.wait_for(reader.readline(), 30) == expected
            writer.close()
        assert arriving._bytes == 0


@pytest.mark.parametrize("path", ["/health", "/tokenize"])
async def test_body_that_nobody_reads_is_dropped_with_the_response(tokenizer: Tokenizer, path: str) -> None:
    """The connection may stay open for long."""
    async with running_server(tokenizer, DecodeConfig(max_body_bytes=1024)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        method = "GET" if path == "/health" else "POST"
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n".encode() + bytes(40_000))
        assert (await asyncio.wait_for(reader.readline(), 30)).startswith(b"HTTP/1.1 ")
        (connection,) = cast("set[PatientHttpProtocol]", server.server.server_state.connections)
        assert connection.is_idle
        assert not connection.cycle.body
        writer.close()

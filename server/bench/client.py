"""The client of `pdserve bench`: streamed /generate calls over persistent connections, with the time of every arrival.

It uses an asyncio protocol and a C parser instead of an HTTP library: httpx takes eight times the CPU time per event,
which at 64 streams raises the latencies and takes CPU from a server on the same machine (benchmarks/README.md).
"""

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

INTERNAL_ERROR_CHARACTERS = 200


@dataclass(frozen=True)
class RequestRecord:
    """The result of one request. Seconds count from its start, `started_s` from the start of the run.

    `arrivals` has an entry for each event with tokens: its time, and the number of tokens so far. `failure` is a short
    reason, the same for all requests that failed alike; `detail` is the server's message.
    """

    started_s: float
    e2e_s: float
    arrivals: list[tuple[float, int]]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    timeline: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def output_tokens(self) -> int:
        return self.arrivals[-1][1] if self.arrivals else 0

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.arrivals[0][0] if self.arrivals else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: the mean of `itl_s`."""
        if self.output_tokens < 2:
            return None
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / (self.output_tokens - 1)

    @cached_property
    def itl_s(self) -> list[float]:
        """Inter-token latencies, one per token after the first; tokens that arrive together share the time evenly."""
        gaps: list[float] = []
        previous_s, previous_tokens = self.arrivals[0] if self.arrivals else (0.0, 0)
        gaps += [0.0] * (previous_tokens - 1)
        for at_s, tokens in self.arrivals[1:]:
            new = tokens - previous_tokens
            gaps += [(at_s - previous_s) / new] * new
            previous_s, previous_tokens = at_s, tokens
        return gaps


class _Finish(msgspec.Struct):
    type: str


class _Meta(msgspec.Struct):
    completion_tokens: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: _Finish | None = None
    timeline: dict[str, float] = {}


class _Error(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _Event(msgspec.Struct):
    """The part of an event that is decoded; its cumulative text and ids are skipped."""

    meta_info: _Meta | None = None
    error: _Error | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


class BenchClient:
    """Sends to one server. Idle connections are reused; `close()` ends them."""

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None, "checked with the flags"
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._timeout_s = timeout_s
        key = f"Authorization: Bearer {api_key}\r\n" if api_key is not None else ""
        self._head = (
            f"POST {parts.path}/generate HTTP/1.1\r\nHost: {parts.netloc}\r\n{key}"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()
        self._idle: list[_Connection] = []
        self.tokens = 0
        """Tokens received so far, over all requests."""

    async def generate(self, body: bytes, run_started: float, *, expected_tokens: int | None = None) -> RequestRecord:
        """Send one request and read the whole response. Only cancellation raises; other failures are in the record.

        With `expected_tokens`, any other number of tokens is a failure.
        """
        request = self._head + str(len(body)).encode() + b"\r\n\r\n" + body
        response = _ResponseParser(self, time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._connect()
                try:
                    await connection.send(request, response)
                finally:
                    self._give_back(connection)
        except TimeoutError:
            response.fail("timeout", f"no complete response within {self._timeout_s:g} s")
        except OSError as error:
            response.fail(f"connection: {type(error).__name__}", str(error))
        return response.record(run_started, expected_tokens)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connect(self) -> "_Connection":
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        return connection

    def _give_back(self, connection: "_Connection") -> None:
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.close()


class _ResponseParser:
    """Parses one response as it arrives."""

    def __init__(self, client: BenchClient, started: float) -> None:
        self._client = client
        self._started = started
        self._ended: float | None = None
        self._status = 0
        self._buffer = bytearray()
        self._arrivals: list[tuple[float, int]] = []
        self._meta: _Meta | None = None
        self._failure: tuple[str, str] | None = None

    def fail(self, reason: str, detail: str) -> None:
        """Only the first failure counts."""
        self._ended = self._ended or time.perf_counter()
        if self._failure is None:
            self._failure = reason, detail

    def headers(self, status: int) -> None:
        self._status = status

    def body(self, data: bytes) -> None:
        now = time.perf_counter()
        self._buffer += data
        if self._status != 200:
            return
        while (end := self._buffer.find(b"\n\n")) >= 0:
            event = bytes(self._buffer[:end])
            del self._buffer[: end + 2]
            self._event(event, now)

    def complete(self) -> None:
        self._ended = self._ended or time.perf_counter()
        if self._status != 200:
            self._fail_with_status()
        elif self._meta is None or self._meta.finish_reason is None:
            self.fail(
                "incomplete stream", f"the stream ended after {self._output_tokens} tokens without its last event"
            )

    def record(self, run_started: float, expected_tokens: int | None) -> RequestRecord:
        ended = self._ended if self._ended is not None else time.perf_counter()
        if expected_tokens is not None and self._output_tokens != expected_tokens:
            self.fail("wrong length", f"{self._output_tokens} tokens came, {expected_tokens} were asked for")
        reason, detail = self._failure or (None, "")
        meta = self._meta or _Meta(0)
        return RequestRecord(
            started_s=self._started - run_started,
            e2e_s=ended - self._started,
            arrivals=self._arrivals,
            prompt_tokens=meta.prompt_tokens,
            cached_tokens=meta.cached_tokens,
            timeline=meta.timeline,
            failure=reason,
            detail=detail,
        )

    @property
    def _output_tokens(self) -> int:
        return self._arrivals[-1][1] if self._arrivals else 0

    def _event(self, line: bytes, now: float) -> None:
        if line == b"data: [DONE]":
            return
        try:
            event = _decode_event(memoryview(line)[6:] if line.startswith(b"data: ") else line)
        except msgspec.MsgspecError as error:
            self.fail("malformed event", f"{error}: {line[:INTERNAL_ERROR_CHARACTERS]!r}")
            return
        if event.error is not None:
            self.fail(f"error event: {event.error.code or 'no code'}", event.error.message)
        if event.meta_info is None:
            return
        self._meta = event.meta_info
        new = event.meta_info.completion_tokens - self._output_tokens
        if new > 0:
            self._client.tokens += new
            self._arrivals.append((now - self._started, event.meta_info.completion_tokens))
        finish = event.meta_info.finish_reason
        if finish is not None:
            self._ended = now
            if finish.type == "abort":
                self.fail("aborted", "the server ended the request")

    def _fail_with_status(self) -> None:
        try:
            error = _decode_event(self._buffer).error or _Error()
        except msgspec.MsgspecError:
            error = _Error(message=self._buffer[:INTERNAL_ERROR_CHARACTERS].decode(errors="replace"))
        self.fail(f"{self._status} {error.code or ''}".rstrip(), error.message)


class _Connection(asyncio.Protocol):
    """One connection, one request at a time. The methods named on_... are the parser's callbacks."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None  # untyped in httptools
        self._response: _ResponseParser | None = None
        self._done: asyncio.Future[None] | None = None
        self.usable = False
        """Open, and between two requests."""

    async def send(self, request: bytes, response: _ResponseParser) -> None:
        """Returns when the response is complete; raises OSError when the connection ends before."""
        assert self._transport is not None
        assert self.usable
        self.usable = False
        self._response = response
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from it
        self.usable = True

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            self.close()  # unexpected bytes
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(ConnectionError(f"not HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        self._end(
            error if isinstance(error, OSError) else ConnectionResetError("closed before the response was complete")
        )

    def on_headers_complete(self) -> None:
        assert self._response is not None
        self._response.headers(self._parser.get_status_code())

    def on_body(self, data: bytes) -> None:
        assert self._response is not None
        self._response.body(data)

    def on_message_complete(self) -> None:
        assert self._response is not None
        self._response.complete()
        self.usable = self._parser.should_keep_alive()
        self._end(None)

    def _end(self, error: OSError | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self.close()
            self._done.set_exception(error)

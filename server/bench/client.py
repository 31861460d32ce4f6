"""The client of `pdserve bench`: streamed /generate calls over persistent connections, with the time of every arrival.

It uses an asyncio protocol and a C parser instead of an HTTP library: httpx takes eight times the CPU time per event,
which at 64 streams raises the latencies and takes CPU from a server on the same machine (benchmarks/README.md).
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from ..terminal.options import SYSTEM_TLS, TlsOptions
from ..terminal.tls import context

INTERNAL_ERROR_CHARACTERS = 200


@dataclass
class RequestRecord:
    """The result of one request. Seconds count from its start, `started_s` from the start of the run.

    `arrivals` has an entry for each event with tokens: its time, and the number of tokens so far. `failure` is a short
    reason, the same for all requests that failed alike; `detail` is the server's message.
    """

    started_s: float
    e2e_s: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    timeline: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None
    detail: str = ""

    def fail(self, reason: str, detail: str) -> None:
        """Record a failure, unless one is recorded already."""
        if self.failure is None:
            self.failure, self.detail = reason, detail

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
    """The fields of an event that are decoded. Text and ids are cumulative, so decoding them would be slow."""

    meta_info: _Meta | None = None
    error: _Error | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


class BenchClient:
    """Sends to one server. Idle connections are reused; `close()` ends them."""

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float, tls: TlsOptions = SYSTEM_TLS) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None, "checked with the flags"
        self._host = parts.hostname
        self._tls = context(tls) if parts.scheme == "https" else None
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
        response = _Response(self)
        record = response.record
        record.started_s = response.started - run_started
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._connect()
                try:
                    await connection.send(b"%b%d\r\n\r\n%b" % (self._head, len(body), body), response)
                finally:
                    self._give_back(connection)
        except TimeoutError:
            record.fail("timeout", f"no complete response within {self._timeout_s:g} s")
        except OSError as error:
            record.fail(f"connection: {type(error).__name__}", str(error))
        record.e2e_s = record.e2e_s or time.perf_counter() - response.started
        if expected_tokens is not None and record.output_tokens != expected_tokens:
            record.fail("wrong length", f"{record.output_tokens} tokens came, {expected_tokens} were asked for")
        return record

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


class _Response:
    """Fills the record of a request while its response arrives. The methods named on_... are the parser's callbacks."""

    def __init__(self, client: BenchClient) -> None:
        self.started = time.perf_counter()
        self.record = RequestRecord(0.0)
        self.parser: Any = httptools.HttpResponseParser(self)  # untyped in httptools
        self.complete: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._client = client
        self._buffer = bytearray()
        self._finished = False

    def on_body(self, data: bytes) -> None:
        now = time.perf_counter()
        self._buffer += data
        if self.parser.get_status_code() == 200:
            *events, self._buffer = self._buffer.split(b"\n\n")
            for event in events:
                self._add_event(event, now)

    def on_message_complete(self) -> None:
        status = self.parser.get_status_code()
        if status != 200:
            try:
                error = _decode_event(self._buffer).error or _Error()
            except msgspec.MsgspecError:
                error = _Error(message=self._buffer[:INTERNAL_ERROR_CHARACTERS].decode(errors="replace"))
            self.record.fail(f"{status} {error.code or ''}".rstrip(), error.message)
        elif not self._finished:
            tokens = self.record.output_tokens
            self.record.fail("incomplete stream", f"the stream ended after {tokens} tokens without its last event")
        if not self.complete.done():
            self.complete.set_result(self.parser.should_keep_alive())

    def _add_event(self, line: bytearray, now: float) -> None:
        record = self.record
        if line == b"data: [DONE]":
            return
        try:
            event = _decode_event(line.removeprefix(b"data: "))
        except msgspec.MsgspecError as error:
            record.fail("malformed event", f"{error}: {bytes(line[:INTERNAL_ERROR_CHARACTERS])!r}")
            return
        if event.error is not None:
            record.fail(f"error event: {event.error.code or 'no code'}", event.error.message)
        if (meta := event.meta_info) is None:
            return
        record.prompt_tokens, record.cached_tokens = meta.prompt_tokens, meta.cached_tokens
        record.timeline = meta.timeline
        new = meta.completion_tokens - record.output_tokens
        if new > 0:
            self._client.tokens += new
            record.arrivals.append((now - self.started, meta.completion_tokens))
        if meta.finish_reason is not None:
            self._finished = True
            record.e2e_s = now - self.started
            if meta.finish_reason.type == "abort":
                record.fail("aborted", "the server ended the request")


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    _transport: asyncio.Transport
    _response: _Response | None = None
    usable = True
    """Whether the connection is open and has no request in flight."""

    async def send(self, request: bytes, response: _Response) -> None:
        """Returns when the response is complete; raises OSError when the connection ends before."""
        assert self.usable
        self.usable = False
        self._response = response
        self._transport.write(request)
        keeps_alive = await response.complete
        self._response = None
        self.usable = keeps_alive and not self._transport.is_closing()

    def close(self) -> None:
        """Close the connection without the TLS shutdown: no request is open, and the event loop may end before the
        server answers.
        """
        self.usable = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from it

    def data_received(self, data: bytes) -> None:
        if self._response is None:
            self.close()  # unexpected bytes
            return
        try:
            self._response.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"not HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        self._fail(
            error if isinstance(error, OSError) else ConnectionResetError("closed before the response was complete")
        )

    def _fail(self, error: OSError) -> None:
        if self._response is not None and not self._response.complete.done():
            self._response.complete.set_exception(error)

"""uvicorn's HTTP protocol with timeouts for incomplete requests and unread responses.

It works around four defects of uvicorn:

- It loses the body of a request that offers an upgrade to HTTP/2, as those of Java's client do.
- It sends chunked responses to HTTP/1.0 clients, which cannot read them.
- It resets a connection whose request was refused before its body had arrived.
- It does not notice that a client with pipelined requests disconnects.
"""

import array
import asyncio
import fcntl
import logging
import math
import re
import termios
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from typing import Any, ClassVar

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ...transfer.tcp_info import has_ended
from ..api.common.errors import error_object

log = logging.getLogger("pdserve.http")

HEADER_LINE_BYTES = 4
"""Bytes of a header line beside name and value: colon, space and line end."""

HANG_UP_S = 1.0
"""Time between an error response to an incomplete request and the close of the connection."""

LINGER_S = 10.0
"""How long a connection that ends with its response stays open for the rest of the request's body."""

_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


MAX_PIPELINED = 16
"""Most requests of a connection that wait for the response to an earlier one."""
PEER_CHECK_S = 1.0
"""How often a connection with such requests is looked at: it is not read, so that its end is not reported."""


class RefusedError(Exception):
    """Stops the parser after the connection was refused."""


def unframed_send(cycle: RequestResponseCycle) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """Returns a `send` for an HTTP/1.0 client. It sends a body of unknown length without chunks: the end of the
    connection, which uvicorn closes after every response to such a client, is the end of the body.
    """
    framed_send, unframed = cycle.send, False

    async def send(message: Any) -> None:  # Any: each library types ASGI messages differently
        nonlocal unframed
        if message["type"] == "http.response.start":
            unframed = all(name.lower() != b"content-length" for name, _ in message["headers"])
            if unframed:
                cycle.chunked_encoding = False
        elif unframed:
            cycle.expected_content_length = len(message.get("body", b""))  # uvicorn checks each piece against it
        await framed_send(message)

    return send


def lingering_send(
    cycle: RequestResponseCycle, linger: Callable[[], None]
) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """Returns a `send` for a connection that ends with the response, as those of HTTP/1.0 clients do.

    A response such as 413 may end before the body of the request has arrived. This `send` then calls `linger` instead
    of closing the connection: the close would reset it, and a client that still sends would not read the response.
    """
    closing_send = cycle.send

    async def send(message: Any) -> None:  # Any: as above
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if not (is_last and cycle.more_body):
            await closing_send(message)
            return
        cycle.keep_alive = True  # the header `connection: close` is sent already
        await closing_send(message)
        linger()

    return send


class PatientHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose client is idle for too long or sends too many headers.

    - The client reads nothing of its response for `patience_s`. Otherwise it could hold its request, its KV pages and a
      send buffer forever. The application sees a disconnect. A slow client stays connected as long as it reads
      something.
    - The headers are incomplete `header_timeout_s` after the connection or the request began, or larger than
      `max_header_bytes`. Bodies have their own limits (server/api/service/request_body.py).

    An offer of another protocol (`Upgrade`) is ignored, which HTTP allows.
    """

    patience_s: ClassVar[float] = 30.0
    header_timeout_s: ClassVar[float] = 60.0
    max_header_bytes: ClassVar[int] = 64 << 10
    active_at = 0.0
    """When the connection was made or last received something, by the loop's clock."""
    _waiting: asyncio.TimerHandle | None = None
    _headers_due: asyncio.TimerHandle | None = None
    _hanging_up: asyncio.TimerHandle | None = None
    _lingering: asyncio.TimerHandle | None = None
    _peer_check: asyncio.TimerHandle | None = None
    _header_bytes = 0
    _in_body = False
    _unanswered: tuple[RequestResponseCycle, ...] = ()
    """The last request, and those before it that are not answered."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self.active_at = self.loop.time()
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        if self._hanging_up is not None:
            return
        self.active_at = self.loop.time()
        super().data_received(data if self._in_body else without_upgrade(data))
        if self._headers_due is None:
            return
        self._header_bytes += len(data)
        if self._header_bytes > self.max_header_bytes:
            self._refuse_headers()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._headers_due is None:
            self._expect_headers()

    def on_headers_complete(self) -> None:
        self._stop_expecting_headers()
        size = len(self.url) + sum(len(name) + len(value) + HEADER_LINE_BYTES for name, value in self.headers)
        if size > self.max_header_bytes:
            self._refuse_headers()
            raise RefusedError
        if len(self.pipeline) >= MAX_PIPELINED:
            log.warning("client %s has sent more than %d requests at once: closed", self.client, MAX_PIPELINED)
            self._stop_expecting_headers()
            self.transport.abort()
            raise RefusedError
        self._in_body = True
        super().on_headers_complete()
        self._unanswered = (*(one for one in self._unanswered if not one.response_complete), self.cycle)
        if self.pipeline and self._peer_check is None:
            self._peer_check = self.loop.call_later(PEER_CHECK_S, self._check_peer)
        if self.scope["http_version"] == "1.0":
            # patched here, because uvicorn has no hook for the class of the cycle
            self.cycle.send = unframed_send(self.cycle)  # type: ignore[assignment, method-assign]
        if not self.cycle.keep_alive:
            self.cycle.send = lingering_send(self.cycle, self._linger)  # type: ignore[assignment, method-assign]

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()
        if self._lingering is not None:
            self.transport.close()

    def on_response_complete(self) -> None:
        for cycle in self._unanswered:
            if cycle.response_complete:
                cycle.body = bytearray()  # what nobody has read; the connection may stay open for long
        super().on_response_complete()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_unread(self) -> bool:
        """Whether the response waits for the client to read."""
        return self.flow.write_paused

    def send_400_response(self, msg: str) -> None:
        if self._hanging_up is None:
            self._refuse(b"400 Bad Request", 400, "invalid_request", msg)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        for timer in (self._hanging_up, self._lingering, self._peer_check):
            if timer is not None:
                timer.cancel()
        self._stop_expecting_headers()
        for cycle in self._unanswered:  # uvicorn tells only the last one
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)

    def _check_peer(self) -> None:
        self._peer_check = None
        if self.pipeline and not self.transport.is_closing():
            if has_ended(self.transport.get_extra_info("socket").fileno()):
                self.transport.abort()
            else:
                self._peer_check = self.loop.call_later(PEER_CHECK_S, self._check_peer)

    def _expect_headers(self) -> None:
        self._header_bytes = 0
        self._headers_due = self.loop.call_later(self.header_timeout_s, self._give_up_on_headers)

    def _give_up_on_headers(self) -> None:
        self._headers_due = None
        log.debug("client %s has sent no whole request for %g s: connection closed", self.client, self.header_timeout_s)
        self.transport.abort()

    def _stop_expecting_headers(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _refuse_headers(self) -> None:
        message = f"headers are over {self.max_header_bytes} bytes"
        self._refuse(b"431 Request Header Fields Too Large", 431, "too_large", message)

    def _refuse(self, status_line: bytes, status: int, code: str, message: str) -> None:
        """Send an error response to an incomplete request and close the connection."""
        body = msgspec.json.encode({"error": error_object(status, code, message)})
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status_line, len(body)) + body)
        if self.transport.can_write_eof():  # not over TLS
            self.transport.write_eof()
        # ignore what the client still sends: a close now would reset the connection, and it could not read the response
        self._hanging_up = self.loop.call_later(HANG_UP_S, self.transport.close)
        self._stop_expecting_headers()

    def _linger(self) -> None:
        """Ignore the rest of the body, then close the connection; at the latest after LINGER_S."""
        if self._in_body:
            self._lingering = self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def _wait(self) -> None:
        self._stop_waiting()
        self._waiting = self.loop.call_later(self.patience_s, self._check_progress, self._unread_bytes())

    def _check_progress(self, unread_bytes: int) -> None:
        if self._unread_bytes() < unread_bytes:
            self._wait()
            return
        log.warning("client %s has read nothing for %g s: connection closed", self.client, self.patience_s)
        self.transport.abort()

    def _unread_bytes(self) -> int:
        """Bytes in the send buffers of this process and of the kernel. A slow client empties the kernel's for a long
        time before the other one shrinks.
        """
        in_kernel = array.array("i", [0])
        fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, in_kernel)
        return self.transport.get_write_buffer_size() + in_kernel[0]

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()


class ConnectionLimit:
    """Makes room for new connections where `most` are open: closes those that answer no request or, if there are none,
    those whose client does not read its response. Of the host that has most of these, those that have been silent for
    longest.

    To look at all connections takes milliseconds on the event loop, so one look closes several, and where none is idle
    the next look is later.
    """

    CLOSED_AT_ONCE = 64
    """A look closes one connection in so many."""
    PAUSE_S = 0.1
    """Time without a look after one that has found no idle connection."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._room = 0
        """Connections that may still come for those that were closed."""
        self._look_at = -math.inf

    def make_room(self, connections: Collection[PatientHttpProtocol], now: float) -> bool:
        """Call before a connection is accepted. Returns False if it has to be refused."""
        if len(connections) < self._most:
            self._room = 0
            return True
        if not self._room and now >= self._look_at:
            self._room = self._close_idle(connections)
            if not self._room:
                self._look_at = now + self.PAUSE_S
        if not self._room:
            return False
        self._room -= 1
        return True

    def _close_idle(self, connections: Collection[PatientHttpProtocol]) -> int:
        """Returns how many connections were closed."""
        opened = len(connections)
        ours = [one for one in connections if not one.transport.is_closing()]
        idle = [one for one in ours if one.is_idle] or [one for one in ours if one.is_unread]
        if not idle:
            log.warning("connections are refused: %d are open (max_connections), and all are in use", opened)
            return 0
        (host, _), *_ = Counter(_host(one) for one in idle).most_common(1)
        of_host = sorted((one for one in idle if _host(one) == host), key=lambda one: one.active_at)
        closed = of_host[: max(1, self._most // self.CLOSED_AT_ONCE)]
        log.warning(
            "%d connections of %s, idle or not read, were closed: %d are open (max_connections)",
            *(len(closed), host, opened),
        )
        for one in closed:
            one.transport.abort()
        return len(closed)


def _host(connection: PatientHttpProtocol) -> str:
    return connection.client[0] if connection.client is not None else ""


def without_upgrade(data: bytes) -> bytes:
    """Renames the `Upgrade` header in the beginning of a request.

    With that header the parser would take the body for another protocol, and uvicorn would pass on an empty body. A
    header name that arrives in two pieces is not found; clients send all headers in one write.
    """
    end = data.find(b"\r\n\r\n")
    head = data if end < 0 else data[:end]
    return _UPGRADE.sub(b"\r\nx-upgrade:", head) + data[len(head) :] if _UPGRADE.search(head) else data
